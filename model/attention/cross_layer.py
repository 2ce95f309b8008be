"""Softmax attention that takes something from an earlier layer."""

import torch
from torch import Tensor, nn

from model.attention.base import CrossLayer
from model.attention.softmax import SoftmaxAttention
from model.cache import KVCache, LayerCache
from model.context import ForwardContext


class SharedAttention(SoftmaxAttention):
    """Several layers read one layer's keys and values: `pairs` (Brandon et al., 2405.12981), or all of the last `half`
    those of its first (Sun et al., 2405.05254). Takes the knobs of SoftmaxAttention too.

    Raises ValueError for another `share`.
    """

    def __init__(
        self, dim: int, heads: int, context: int, layer: int, depth: int, *, share: str, **knobs
    ):
        super().__init__(dim, heads, context, layer, depth, **knobs)
        if share not in ("pairs", "half"):
            raise ValueError(f"attention.share is unknown (got {share!r}). fix: pairs or half")
        self.layer = layer
        self.takes = layer % 2 == 1 if share == "pairs" else layer > depth // 2
        if self.takes:
            self.k_proj = self.v_proj = self.k_norm = None

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: KVCache | None, handed: CrossLayer
    ) -> tuple[Tensor, CrossLayer]:
        if not self.takes:
            handed = handed | {"seen": self.remember(*self.keys_values(x, ctx), ctx, cache)}
        return self.answer(x, ctx, *take(handed, "seen", self.layer)), handed

    def new_cache(
        self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> LayerCache:
        return LayerCache() if self.takes else super().new_cache(batch, capacity, dtype, device)

    def cache_bytes(self, capacity: int, dtype: torch.dtype) -> int:
        return 0 if self.takes else super().cache_bytes(capacity, dtype)


class ValueResidualAttention(SoftmaxAttention):
    """Values are mixed with those of the first layer, by a learned share. Zhou et al., 2410.17897. Takes the knobs of
    SoftmaxAttention.
    """

    def __init__(self, dim: int, heads: int, context: int, layer: int, depth: int, **knobs):
        super().__init__(dim, heads, context, layer, depth, **knobs)
        self.layer = layer
        self.share = nn.Parameter(torch.empty(1)) if layer > 0 else None
        self.value_width = self.kv_heads * self.head_dim if layer > 0 else None

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: KVCache | None, handed: CrossLayer
    ) -> tuple[Tensor, CrossLayer]:
        k, v = self.keys_values(x, ctx)
        if self.share is None:
            handed = handed | {"values": (v,)}
        else:
            v = v + self.share.type_as(v) * (take(handed, "values", self.layer)[0].view_as(v) - v)
        return self.answer(x, ctx, *self.remember(k, v, ctx, cache)), handed

    def initial(self, name: str, generator: torch.Generator) -> Tensor:
        return torch.full((1,), 0.5) if name == "share" else super().initial(name, generator)


def take(handed: CrossLayer, what: str, layer: int) -> tuple[Tensor | None, ...]:
    if what not in handed:
        raise ValueError(
            f"no layer before hands on what this one takes ({what=} {layer=}). fix: another attention"
        )
    return handed[what]
