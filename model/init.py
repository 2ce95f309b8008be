"""Initial values of all parameters.

Each parameter has its own random generator, so layers of the same type, shape and name start with
the same values in all models that have the same seed.
"""

from collections.abc import Iterator
from hashlib import sha256

import torch
from torch import Tensor, nn

from model.transformer import Transformer

# Layers that start at zero, so that each block starts as the identity and, unless the head is tied
# to the embedding, all tokens are equally likely at first.
ZERO_LAYERS = ("o_proj", "down_proj", "head")


@torch.no_grad()
def initialize(model: Transformer, seed: int) -> None:
    """Set every parameter to its initial value."""
    for parameter, value in initial_values(model, seed):
        parameter.copy_(value)


def initial_values(model: Transformer, seed: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter with its initial value, on the CPU in fp32.

    A value depends only on the seed, on the parameter's name and shape, and on the module's type.
    The parameter may be on a different device, or sharded across several devices.
    """
    for path, parameter in model.named_parameters():
        # The generator depends on the name, not on the parameters sampled before.
        owner, _, name = path.rpartition(".")
        digest = sha256(f"{seed} {path}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]))
        value = initial_value(owner, model.get_submodule(owner), name, generator)
        assert value.shape == parameter.shape, (path, value.shape, parameter.shape)
        yield parameter, value


def initial_value(path: str, module: nn.Module, name: str, generator: torch.Generator) -> Tensor:
    """Return the initial value of parameter `name` of the module at `path`, on the CPU in fp32."""
    match module:
        case nn.RMSNorm() | nn.LayerNorm() if name == "weight":
            return torch.ones(module.normalized_shape)
        case nn.Embedding():
            return torch.randn(module.weight.shape, generator=generator) * 0.02
        case nn.Linear() if name == "weight" and path.rpartition(".")[-1] not in ZERO_LAYERS:
            return torch.randn(module.weight.shape, generator=generator) * module.in_features**-0.5
        case nn.Linear() | nn.LayerNorm():  # biases, and the weights of ZERO_LAYERS
            return torch.zeros(getattr(module, name).shape)
        case _:
            return module.init_param(name, generator)
