"""Softmax attention over queries, keys and values that have seen their neighbours.

A short causal convolution follows the projections, before norm and RoPE: Canon layers, 2512.17351.
"""

import torch
from torch import Tensor

from model.attention.base import LayerSpec
from model.attention.short_conv import ShortConv
from model.attention.softmax import Inputs, SoftmaxAttention
from model.cache import Shape


class ConvAttention(SoftmaxAttention):
    """The convolution sees `kernel` tokens. Takes the knobs of SoftmaxAttention too."""

    def __init__(self, spec: LayerSpec, *, kernel: int, **knobs):
        super().__init__(spec, **knobs)
        self.sizes = [self.heads, self.kv_heads, self.kv_heads]
        self.conv = ShortConv(sum(self.sizes) * self.head_dim, kernel)

    def project(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Return queries (B, T, H, E), keys and values (B, T, K, E)."""
        x = torch.cat(super().project(inputs), dim=2).flatten(-2)  # (B, T, (H + 2 K) E)
        past = None if inputs.cache is None else inputs.cache.state[0]
        x = self.conv(x, inputs.ctx, past)
        return x.unflatten(-1, (-1, self.head_dim)).split(self.sizes, dim=2)

    def cached_state(self, capacity: int) -> list[Shape]:
        """The last inputs of the convolution."""
        return [(self.conv.kernel - 1, len(self.conv.taps))]

    def attention_flops(self, context: int) -> float:
        return super().attention_flops(context) + self.conv.flops
