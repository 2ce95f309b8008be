"""Softmax attention with a short convolution over queries, keys and values.

As in Canon layers (2512.17351), the causal convolution follows the projections and precedes norm
and RoPE.
"""

import torch
from torch import Tensor

from model.attention.base import LayerSpec, Shared
from model.attention.short_conv import ShortConv
from model.attention.softmax import SoftmaxAttention
from model.cache import LayerCache, Shape
from model.context import ForwardContext
from model.layers import project, split_heads
from run.ranges import PositiveInt


class ConvAttention(SoftmaxAttention):
    """Softmax attention whose queries, keys and values are convolved over `kernel` tokens.

    Also takes SoftmaxAttention's options.
    """

    def __init__(self, spec: LayerSpec, *, kernel: PositiveInt, **options):
        super().__init__(spec, **options)
        num_heads = self.heads + 2 * self.kv_heads
        self.conv = ShortConv(num_heads * self.head_dim, kernel)

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        # Project and convolve.
        qkv = torch.cat([*project(x, self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        past = None if cache is None else cache.states["conv"]
        qkv = split_heads(self.conv(qkv, ctx, past), self.heads + 2 * self.kv_heads)

        # Normalize and rotate.
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        q = self.norm_and_rope(q, self.q_norm, ctx)
        k = self.norm_and_rope(k, self.k_norm, ctx)

        # Attend, gate and project back.
        kv, mask = self.extend_cache(cache, ctx, k=k, v=v)
        y = self.attend(q, kv["k"], kv["v"], mask)
        return self.project_out(y, x), shared

    def state_shapes(self, capacity: int) -> dict[str, Shape]:
        return {"conv": self.conv.state_shape}

    def attention_flops(self, context: int) -> float:
        return super().attention_flops(context) + self.conv.flops
