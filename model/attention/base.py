"""The contract of an attention variant, and the one kernel call they share."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from model.cache import LayerCache
from model.context import ForwardContext

CrossLayer = dict[
    str, tuple[Tensor | None, ...]
]  # what earlier layers of this forward hand to later ones


class Attention(nn.Module, ABC):
    """Maps (B, T, D) to (B, T, D); every token sees itself and its past.

    It is constructed with what its layer knows, then its own knobs:
    (dim, heads, context, layer, depth, *, ...). Projections, ctx, mask and what to remember are its own affair.
    Its last map is called o_proj and begins at zero; its norms have `norm` in their names.
    A tensor that is no parameter is a buffer, which keeps its dtype whatever that of the parameters is:
    cast what is computed from it (`type_as`).
    """

    value_width: int | None = None  # width of the values that it takes from before it

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, handed: CrossLayer
    ) -> tuple[Tensor, CrossLayer]:
        """A variant that takes from or gives to other layers overrides this; all others only `mix`."""
        return self.mix(x, ctx, cache), handed

    @abstractmethod
    def mix(self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None) -> Tensor:
        """x (B, T, D) -> (B, T, D), with a cache also of what came before."""

    @abstractmethod
    def new_cache(
        self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> LayerCache:
        """Empty, with room for `capacity` tokens in each row.

        What a row holds before its first token is zero, or `initial` of the LayerCache.
        """

    @abstractmethod
    def cache_bytes(self, capacity: int, dtype: torch.dtype) -> int:
        """What a row of the cache costs, by arithmetic alone."""

    @abstractmethod
    def score_flops(self, context: int) -> float:
        """Floating-point operations of one token's forward outside the weights, averaged over a full context."""

    def initial(self, name: str, generator: torch.Generator) -> Tensor:
        """The first value of a parameter that belongs to no torch module: a sink weighs as much as a score of 0."""
        return torch.zeros(getattr(self, name).shape)


def validate_knobs(base: float | None = None, dropout: float = 0.0, **sizes: int | None) -> None:
    """Raises ValueError for a knob that no attention can have."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(
                f"attention.{name} must be a whole number from 1 (got {size!r}). fix: change it"
            )
    if base is not None and not 1 < base < math.inf:
        raise ValueError(f"attention.rope_base must be above 1 (got {base!r}). fix: 10000")
    if not 0 <= dropout < 1:
        raise ValueError(f"attention.dropout must be from 0 to below 1 (got {dropout!r}). fix: 0.0")
