"""Build models whose parameters have no memory yet, and give them memory before they compute.

A buffer has its value once its module is built, a parameter only after `initialize` or
`load_weights`. So parameters alone are built on the meta device: a model of any size is built
in no time and can be sharded before it has memory; its buffers keep the values of their modules.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from model.transformer import Transformer
from run.instantiate import instantiate

REGISTERED = ("_parameters", "_buffers", "_modules")  # attributes of every nn.Module


def build_model(tree: dict) -> Transformer:
    """Build the model of a config: parameters on the meta device, buffers with their values.

    It cannot compute before `materialize`. Random values of buffers are the same in every build.
    Raises ValueError for a bad config, and for a tensor that would not move with the model.
    """
    with torch.random.fork_rng(devices=[]), parameters_on_meta():
        torch.default_generator.manual_seed(0)
        model = instantiate(tree)
    check_tensors(model)
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Turn each parameter registered inside into a meta tensor; shared parameters stay shared."""
    meta_parameters = WeakIdKeyDictionary()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:
            return parameter
        if parameter not in meta_parameters:
            meta = torch.empty_like(parameter, device="meta")
            meta_parameters[parameter] = nn.Parameter(meta, parameter.requires_grad)
        return meta_parameters[parameter]

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def materialize(
    model: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None
) -> nn.Module:
    """Give meta parameters uninitialized memory on `device`, move buffers there, return the model.

    Floating-point parameters get `dtype`; buffers keep their own, as under autocast.
    Parameters may be shards of FSDP2. Shared parameters stay shared.
    """
    # `_apply` makes a new parameter for each module that registers a shared one.
    owners = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners[parameter].append((module, name))

    def to_device(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device).contiguous()
        if not tensor.is_floating_point():
            return torch.empty_like(tensor, device=device)
        return torch.empty_like(tensor, device=device, dtype=dtype)

    model._apply(to_device)

    # Share them again.
    for (first, first_name), *others in owners.values():
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]
    return model


def check_tensors(model: nn.Module) -> None:
    """Raise ValueError for a tensor that would not move with the model, or that has no values."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in REGISTERED:
                check_attribute(f"{path}.{name}".lstrip("."), value)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"a buffer is computed from parameters, which have no values yet ({name}). "
                "fix: use constants"
            )


def check_attribute(path: str, value: object) -> None:
    """Raise ValueError if the attribute at `path`, or an item in it, is a tensor."""
    if isinstance(value, nn.Parameter):
        raise ValueError(f"a parameter is not registered ({path}). fix: nn.ParameterList")
    if isinstance(value, Tensor):
        name = path.rpartition(".")[2].partition("[")[0]
        raise ValueError(
            f"a tensor is neither parameter nor buffer, so it does not follow its model ({path}). "
            f"fix: self.register_buffer({name!r}, ..., persistent=False)"
        )
    if isinstance(value, (list, tuple, set)):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, item in value.items():
            check_attribute(f"{path}[{key!r}]", item)
