"""Softmax attention: `heads` queries share `kv_heads` keys and values. Vaswani, 1706.03762; Ainslie, 2305.13245.

kv_heads = heads is multi-head attention, kv_heads = 1 is multi-query, all between is grouped-query. With a
`window`, a token sees that many positions, itself included, and the cache holds no more (Beltagy, 2004.05150).
"""

import torch
from torch import Tensor

from model.attention.base import Attention, attend
from model.cache import KVCache
from model.layers import Linear, RMSNorm, rotate
from model.positions import Positions


class SoftmaxAttention(Attention):
    """`qk_norm` is null, or before_rope: queries and keys are normalised within each head, with a weight (Qwen3).

    Raises ValueError where heads do not divide dim, kv_heads do not divide heads, or a head has an odd dimension.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        context: int,
        layer: int,
        depth: int,
        *,
        kv_heads: int,
        rope_base: float,
        qk_norm: str | None,
        window: int | None,
    ):
        super().__init__()
        if dim % heads or heads % kv_heads:
            raise ValueError(
                f"heads must divide dim, and kv_heads heads (got {dim=} {heads=} {kv_heads=}). fix: change one of them"
            )
        if dim // heads % 2:
            raise ValueError(
                f"RoPE needs an even head dimension (got {dim=} / {heads=} = {dim // heads}). fix: change one of them"
            )
        if qk_norm not in (None, "before_rope"):
            raise ValueError(f"attention.qk_norm is unknown (got {qk_norm!r}). fix: null or before_rope")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.rope_base, self.window = rope_base, window
        self.q_proj = Linear(dim, dim)
        self.k_proj = Linear(dim, kv_heads * self.head_dim)
        self.v_proj = Linear(dim, kv_heads * self.head_dim)
        self.o_proj = Linear(dim, dim)
        self.q_norm = RMSNorm(self.head_dim) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim) if qk_norm else None

    def mix(self, x: Tensor, positions: Positions, cache: KVCache | None) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))  # (B, T, H, D)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, -1))  # (B, T, K, D)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1))  # (B, T, K, D)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        rotary = positions.rotary(self.head_dim, self.rope_base)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        if cache is None:
            visible = positions.visible(self.window)
        else:
            (k, v), visible = cache.extend(positions, k, v)  # (B, S, K, D)
        return self.o_proj(attend(q, k, v, visible).flatten(-2))

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str) -> KVCache:
        feature = (self.kv_heads, self.head_dim)
        return KVCache(batch, capacity, self.window, feature, feature, dtype=dtype, device=device)

    def cache_bytes(self, capacity: int, itemsize: int) -> int:
        slots = capacity if self.window is None else min(capacity, self.window)
        return (slots + 1) * 2 * self.kv_heads * self.head_dim * itemsize

    def score_flops(self, context: int) -> float:
        window = context if self.window is None else min(context, self.window)
        seen = window - window * (window - 1) / (2 * context)  # positions a token sees, averaged over the context
        return 4 * self.heads * self.head_dim * seen
