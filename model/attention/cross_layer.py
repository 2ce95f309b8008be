"""Softmax attention that uses keys or values of an earlier layer."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.types import Device

from model.attention.base import CrossLayer, LayerSpec
from model.attention.softmax import Features, Inputs, Seen, SoftmaxAttention
from model.cache import LayerCache


class SharedAttention(SoftmaxAttention):
    """Several layers use the keys and values of one; only that layer has a cache.

    `share` is "pairs": every second layer reuses those of the layer before (Brandon et al.,
    2405.12981); or "half": the last half of the layers reuses those of its first layer (Sun et al.,
    2405.05254). Takes the knobs of SoftmaxAttention too.
    """

    def __init__(self, spec: LayerSpec, *, share: Literal["pairs", "half"], **knobs):
        super().__init__(spec, **knobs)
        self.layer = spec.layer
        if share == "pairs":
            self.reuses_kv = spec.layer % 2 == 1
        else:
            self.reuses_kv = spec.layer > spec.depth // 2
        if self.reuses_kv:
            self.k_proj = None
            self.v_proj = None
            self.k_norm = None

    def project(self, inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self.reuses_kv:
            return self.q_proj(inputs.x).unflatten(-1, (self.heads, -1)), None, None
        return super().project(inputs)

    def see(self, inputs: Inputs, k: Tensor | None, v: Tensor | None) -> tuple[Seen, CrossLayer]:
        """Keys and values, as in SoftmaxAttention, which are carried to later layers."""
        if self.reuses_kv:
            return take(inputs.carry, "kv", self.layer), inputs.carry
        seen, carry = super().see(inputs, k, v)
        return seen, carry | {"kv": seen}

    def new_cache(
        self, batch: int, capacity: int, dtype: torch.dtype, device: Device
    ) -> LayerCache:
        if self.reuses_kv:
            return LayerCache()
        return super().new_cache(batch, capacity, dtype, device)


class ValueResidualAttention(SoftmaxAttention):
    """Values are interpolated with those of the first layer, by the learned weight `share`.

    Zhou et al., 2410.17897. Takes the knobs of SoftmaxAttention.
    """

    def __init__(self, spec: LayerSpec, **knobs):
        super().__init__(spec, **knobs)
        self.layer = spec.layer
        self.share = nn.Parameter(torch.empty(1)) if spec.layer > 0 else None

    def features(self, inputs: Inputs, k: Tensor, v: Tensor) -> tuple[Features, CrossLayer]:
        new, carry = super().features(inputs, k, v)
        if self.share is None:
            return new, carry | {"values": v}
        first_v = take(carry, "values", self.layer)
        return (new[0], v + self.share.type_as(v) * (first_v - v)), carry

    def init_param(self, name: str, generator: torch.Generator) -> Tensor:
        if name == "share":
            return torch.full((1,), 0.5)
        return super().init_param(name, generator)


def take(carry: CrossLayer, name: str, layer: int) -> Any:
    """Return what an earlier layer put into `carry` for `layer`. Raises ValueError if none did."""
    if name not in carry:
        raise ValueError(
            f"no earlier layer has what this one reuses ({name=} {layer=}). fix: attention=gqa"
        )
    return carry[name]
