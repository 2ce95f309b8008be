"""First values of all parameters, each from a generator of its own: two models that share a name share its value."""

from collections.abc import Callable
from hashlib import sha256

import torch
from torch import Tensor, nn

from model.transformer import Transformer

ZERO = (
    "o_proj",
    "down_proj",
    "head",
)  # a block starts as the identity, every token as likely as any other


@torch.no_grad()
def initialize(
    model: Transformer, seed: int, like: Callable[[Tensor, Tensor], Tensor] = torch.Tensor.to
) -> None:
    """Drawn on the CPU in fp32 whatever the device; `like` spreads a value as its parameter is spread over devices."""
    for path, parameter in model.named_parameters():
        owner, _, name = path.rpartition(".")
        digest = sha256(f"{seed} {path}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]))
        parameter.copy_(
            like(initial_value(owner, model.get_submodule(owner), name, generator), parameter)
        )


def initial_value(path: str, module: nn.Module, name: str, generator: torch.Generator) -> Tensor:
    match module:
        case nn.RMSNorm():
            return torch.ones(module.normalized_shape)
        case nn.Embedding():
            return torch.randn(module.weight.shape, generator=generator) * 0.02
        case nn.Linear() if name == "bias" or path.endswith(ZERO):
            return torch.zeros(getattr(module, name).shape)
        case nn.Linear():
            return torch.randn(module.weight.shape, generator=generator) * module.in_features**-0.5
        case _:
            return module.init_param(name, generator)
