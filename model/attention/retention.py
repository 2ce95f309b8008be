"""Retention: attention without a softmax, whose weights decay with distance. Sun, 2307.08621.

S_t = a S_{t-1} + k_t v_t',   output S_t' q_t,   with one decay a per head
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.base import LayerSpec, Shared
from model.attention.recurrent import RecurrentAttention, to_product_dtype
from model.cache import LayerCache
from model.context import ForwardContext
from model.layers import Linear, apply_rope, fp32, project, rms, split_heads
from run.ranges import AboveOne, PositiveInt


class Retention(RecurrentAttention):
    """Values are `expansion` times as wide as keys. `chunk` is explained in recurrent.py.

    Queries and keys are rotated by RoPE. Raises ValueError unless dim / heads is an even integer.
    """

    def __init__(
        self, spec: LayerSpec, *, rope_base: AboveOne, expansion: PositiveInt, chunk: PositiveInt
    ):
        dim = spec.dim
        heads = spec.heads
        head_dim = dim // heads
        if dim % heads or head_dim % 2:
            raise ValueError(
                f"RoPE rotates pairs, so dim / heads must be an even integer ({dim=} {heads=}). "
                f"fix: model.dim={2 * heads * (head_dim // 2 + 1)}"
            )
        super().__init__(heads, head_dim, expansion * head_dim, chunk)
        self.norm_eps = spec.norm_eps
        self.rope_base = rope_base

        self.q_proj = Linear(dim, dim)
        self.k_proj = Linear(dim, dim)
        self.v_proj = Linear(dim, expansion * dim)
        self.gate_proj = Linear(dim, expansion * dim)
        self.o_proj = Linear(expansion * dim, dim)
        # Log decays (H, 1): a = 1 - 2^-5, 1 - 2^-6, ...
        log_decay = torch.log1p(-(2.0 ** -(5 + torch.arange(heads))))
        self.register_buffer("log_decay", log_decay[:, None], persistent=False)

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        # Project to (B, T, H, E) or (B, T, H, F), and rotate.
        qkv = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = [split_heads(to_product_dtype(y), self.heads) for y in qkv]
        cos, sin = ctx.rotary(self.head_dim, self.rope_base)
        q = apply_rope(q, cos, sin)
        k = apply_rope(k, cos, sin)
        k = k * self.head_dim**-0.5

        # Run the recurrence, normalize each head, gate and project back.
        g = self.log_decay.type_as(fp32(q)).expand(*q.shape[:3], 1)
        y = self.recur(q, k, v, None, g, ctx, cache)
        y = rms(y, self.norm_eps).type_as(x)
        gate = F.silu(self.gate_proj(x))
        return self.o_proj(gate * y.flatten(-2)), shared
