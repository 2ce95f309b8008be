"""Attention with linear biases: the farther a key, the lower its score, at a slope for each head.

Press et al., 2108.12409. There are no other positions, so a model can read on past its context.
"""

import torch
from torch import Tensor

from model.attention.base import Attention, CrossLayer, LayerSpec, validate_knobs
from model.cache import KVCache
from model.context import ForwardContext
from model.layers import Linear, fp32


class ALiBi(Attention):
    """Raises ValueError where heads do not divide dim. `steepness`: of H heads, the last has 2^-steepness."""

    def __init__(self, spec: LayerSpec, *, kv_heads: int, steepness: float):
        super().__init__()
        validate_knobs(kv_heads=kv_heads)
        dim = spec.dim
        heads = spec.heads
        if dim % heads or heads % kv_heads:
            values = f"{dim=} {heads=} {kv_heads=}"
            raise ValueError(
                f"heads divide dim, and kv_heads heads (got {values}). fix: change one"
            )
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = dim // heads
        self.q_proj = Linear(dim, dim)
        self.k_proj = Linear(dim, kv_heads * self.head_dim)
        self.v_proj = Linear(dim, kv_heads * self.head_dim)
        self.o_proj = Linear(dim, dim)
        exponents = torch.arange(1, heads + 1) * (-steepness / heads)
        self.register_buffer("slopes", exponents.exp2(), persistent=False)  # (H,)

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: KVCache | None, carry: CrossLayer
    ) -> tuple[Tensor, CrossLayer]:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))  # (B, T, H, D)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, -1))  # (B, T, K, D)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1))

        # Which keys there are, their positions, and which of them are visible.
        key_positions = ctx.positions  # (B, T)
        if cache is None:
            mask = ctx.causal_mask(None, None)
        else:
            (k, v), mask = cache.update(ctx, k, v)  # (B, S, K, D)
            key_positions = torch.arange(k.shape[1], device=x.device)[None]  # p is in slot p
        distance = ctx.positions[:, None, :, None] - key_positions[:, None, None, :]  # (B, 1, T, S)
        if mask is None:
            mask = distance >= 0

        # Softmax of scores with biases, in fp32.
        groups = self.heads // self.kv_heads
        q = q.transpose(1, 2)  # (B, H, T, D)
        k = k.transpose(1, 2).repeat_interleave(groups, dim=1)  # (B, H, S, D)
        v = v.transpose(1, 2).repeat_interleave(groups, dim=1)
        scores = fp32(q @ k.mT) * self.head_dim**-0.5
        scores = scores - self.slopes[:, None, None] * distance
        weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        y = (weights.type_as(v) @ v).transpose(1, 2).flatten(-2)  # (B, T, H * D)
        return self.o_proj(y), carry

    def new_cache(
        self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCache:
        feature = (self.kv_heads, self.head_dim)
        return KVCache(batch, capacity, None, None, feature, feature, dtype=dtype, device=device)

    def attention_flops(self, context: int) -> float:
        return 4 * self.heads * self.head_dim * (context + 1) / 2
