"""Softmax attention that reuses an earlier layer's keys or values."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from model.attention.base import LayerSpec, Shared
from model.attention.softmax import SoftmaxAttention
from model.cache import LayerCache, Shape
from model.context import ForwardContext


class SharedAttention(SoftmaxAttention):
    """Each group of layers shares the keys and values of its first layer, which alone has a cache.

    With `share` "pairs", every second layer reuses the keys and values of the layer before it
    (Brandon et al., 2405.12981). With "half", all layers in the second half use the keys
    and values of its first layer (Sun et al., 2405.05254). Also takes SoftmaxAttention's options.
    `forward` raises ValueError if the first layer of a group shares no keys, or if the layers of a
    group differ in their key-value heads, mask or RoPE.
    """

    def __init__(self, spec: LayerSpec, *, share: Literal["pairs", "half"], **options):
        super().__init__(spec, **options)
        self.layer = spec.layer
        if share == "pairs":
            self.first_layer = spec.layer - spec.layer % 2  # the layer whose keys it attends to
        else:
            self.first_layer = min(spec.layer, spec.depth // 2)
        self.reuses_kv = self.layer != self.first_layer
        # Options of the mask and the rotation, which must be the same as in the first layer.
        self.group_options = {
            "window": self.window,
            "chunk": self.chunk,
            "rope_base": self.rope_base,
            "rotary_dim": self.rotary_dim,
            "rope_scaling": self.rope_scaling,
        }
        if self.reuses_kv:
            self.k_proj = None
            self.v_proj = None
            self.k_norm = None

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        if self.reuses_kv:
            q = self.project_q(x, ctx)
            provider, kv, mask, options = take(shared, "kv", self.layer)
            if provider != self.first_layer:
                raise ValueError(
                    f"layer {self.layer} needs the keys of layer {self.first_layer}, but the "
                    f"latest shared keys are from layer {provider}. fix: use the same kind of "
                    f"attention in all layers from {self.first_layer} to {self.layer}"
                )
            check_reused(kv["k"], (self.kv_heads, self.head_dim), self.layer)
            if options != self.group_options:
                raise ValueError(
                    "layers that share keys must have the same window, chunk and RoPE (layer "
                    f"{self.layer}: {self.group_options}, layer {self.first_layer}: {options})"
                )
        else:
            q, k, v = self.project_qkv(x, ctx)
            kv, mask = self.extend_cache(cache, ctx, k=k, v=v)
            shared = shared | {"kv": (self.layer, kv, mask, self.group_options)}
        y = self.attend(q, kv["k"], kv["v"], mask)
        return self.project_out(y, x), shared

    def cache_shapes(self) -> dict[str, Shape]:
        return {} if self.reuses_kv else super().cache_shapes()


class ValueResidualAttention(SoftmaxAttention):
    """Later layers interpolate between their values and the first layer's by a learned `share`.

    Zhou et al., 2410.17897. Takes SoftmaxAttention's options.
    """

    def __init__(self, spec: LayerSpec, **options):
        super().__init__(spec, **options)
        self.layer = spec.layer
        self.share = nn.Parameter(torch.empty(1)) if spec.layer > 0 else None

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        q, k, v = self.project_qkv(x, ctx)
        if self.share is None:
            shared = shared | {"values": v}
        else:
            first_v = take(shared, "values", self.layer)
            check_reused(first_v, (self.kv_heads, self.head_dim), self.layer)
            v = v + self.share.type_as(v) * (first_v - v)
        kv, mask = self.extend_cache(cache, ctx, k=k, v=v)
        y = self.attend(q, kv["k"], kv["v"], mask)
        return self.project_out(y, x), shared

    def init_param(self, name: str, generator: torch.Generator) -> Tensor:
        if name == "share":
            return torch.full((1,), 0.5)
        return super().init_param(name, generator)


def take(shared: Shared, name: str, layer: int) -> Any:
    """Return the entry that an earlier layer put into `shared`. Raises ValueError if none did."""
    if name not in shared:
        raise ValueError(
            f"layer {layer} reuses {name!r}, which no earlier layer has stored. fix: use the "
            "same kind of attention in all earlier layers"
        )
    return shared[name]


def check_reused(x: Tensor, expected: Shape, layer: int) -> None:
    """Raise ValueError unless x (B, S, K, E), from an earlier layer, has the `expected` K and E."""
    if x.shape[2:] != expected:
        raise ValueError(
            "layers that share keys or values must have the same number and size of heads "
            f"({layer=} has (kv_heads, head_dim) = {expected}, but reuses {tuple(x.shape[2:])}). "
            "fix: use the same kv_heads and head_dim in these layers"
        )
