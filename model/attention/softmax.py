"""Softmax attention as a product of independent choices. Vaswani et al., 1706.03762.

Projections: `heads` queries share `kv_heads` keys and values (grouped queries: Ainslie, 2305.13245). Positions: RoPE,
or none (NoPE: Kazemnejad, 2305.19466). QK-norm: none, before RoPE with a weight (Qwen3), after it without (Llama 4).
Mask: the whole past, a `window` (Beltagy, 2004.05150) or a `chunk` (Llama 4). Scores: a soft-cap (Gemma 2), a learned
sink (gpt-oss). Output: plain or gated (2505.06708).
"""

import torch
from torch import Tensor, nn

from model.attention.base import Attention, validate_knobs
from model.attention.kernels import attention
from model.cache import KVCache, slot_bytes
from model.context import ForwardContext, Scaling
from model.layers import Linear, RMSNorm, apply_rope, rms


class SoftmaxAttention(Attention):
    """Raises ValueError for choices that do not go together.

    `rope_base` null: no positions. `window` and `chunk` are in tokens: a token sees the `window` newest, itself
    included, or those of its own chunk; a cache holds no more.
    """

    eps = 1e-6  # of norms without a weight

    def __init__(
        self,
        dim: int,
        heads: int,
        context: int,
        layer: int,
        depth: int,
        *,
        kv_heads: int,
        rope_base: float | None,
        qk_norm: str | None,
        rope_fraction: float = 1.0,
        rope_scaling: Scaling | None = None,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        sink: bool = False,
        gated: bool = False,
        dropout: float = 0.0,
        bias: bool = False,
    ):
        super().__init__()
        head_dim = dim // heads
        if rope_base is None and rope_scaling is not None:
            raise ValueError(
                f"there is no RoPE to scale ({rope_base=} {rope_scaling=}). fix: one of them"
            )
        validate_knobs(rope_base, dropout, kv_heads=kv_heads, window=window, chunk=chunk)
        if softcap is not None and not softcap > 0:
            raise ValueError(f"attention.softcap must be above 0 (got {softcap!r}). fix: null")
        if dim % heads or heads % kv_heads:
            raise ValueError(
                f"heads divide dim, and kv_heads heads (got {dim=} {heads=} {kv_heads=}). fix: change one"
            )
        rotary_dim = int(head_dim * rope_fraction)
        if rope_base is not None and (rotary_dim % 2 or not 0 < rotary_dim <= head_dim):
            given = f"{dim=} / {heads=} x {rope_fraction=} is {head_dim * rope_fraction:g}"
            raise ValueError(
                f"RoPE needs an even part of the head dimension ({given}). fix: change one of them"
            )
        if qk_norm not in (None, "before_rope", "after_rope"):
            raise ValueError(
                f"attention.qk_norm is unknown (got {qk_norm!r}). fix: null, before_rope or after_rope"
            )
        if window is not None and chunk is not None:
            raise ValueError(
                f"a layer has a window or a chunk, not both ({window=} {chunk=}). fix: one of them null"
            )
        self.rotary = rotary_dim, rope_base, rope_scaling
        self.heads, self.kv_heads, self.head_dim, self.qk_norm = heads, kv_heads, head_dim, qk_norm
        self.rope_base, self.window, self.chunk, self.softcap, self.dropout = (
            rope_base,
            window,
            chunk,
            softcap,
            dropout,
        )
        self.q_proj = Linear(dim, dim, bias)
        self.k_proj = Linear(dim, kv_heads * head_dim, bias)
        self.v_proj = Linear(dim, kv_heads * head_dim, bias)
        self.o_proj = Linear(dim, dim, bias)
        self.gate_proj = Linear(dim, dim, bias) if gated else None
        self.q_norm = RMSNorm(head_dim) if qk_norm == "before_rope" else None
        self.k_norm = RMSNorm(head_dim) if qk_norm == "before_rope" else None
        self.sink = nn.Parameter(torch.empty(heads)) if sink else None

    def mix(self, x: Tensor, ctx: ForwardContext, cache: KVCache | None) -> Tensor:
        k, v = self.keys_values(x, ctx)
        return self.answer(x, ctx, *self.remember(k, v, ctx, cache))

    def keys_values(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """x (B, T, D) -> k and v (B, T, K, D/H)"""
        k, v = (proj(x).unflatten(-1, (self.kv_heads, -1)) for proj in (self.k_proj, self.v_proj))
        return self.place(k, self.k_norm, ctx), v

    def remember(
        self, k: Tensor, v: Tensor, ctx: ForwardContext, cache: KVCache | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """All that may be seen, k and v (B, S, K, D/H), and what sees what."""
        if cache is None:
            return k, v, ctx.causal_mask(self.window, self.chunk)
        (k, v), visible = cache.update(ctx, k, v)
        return k, v, visible

    def answer(
        self, x: Tensor, ctx: ForwardContext, k: Tensor, v: Tensor, visible: Tensor | None
    ) -> Tensor:
        """What the tokens x (B, T, D) find there."""
        q = self.place(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), self.q_norm, ctx)
        y = self.read(x, q, k, v, visible).flatten(-2)
        return self.o_proj(y if self.gate_proj is None else y * self.gate_proj(x).sigmoid())

    def read(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """q (B, T, H, D/H) -> (B, T, H, D/H)"""
        dropout = self.dropout if self.dropout and self.training else 0.0
        return attention(q, k, v, visible, softcap=self.softcap, sink=self.sink, dropout=dropout)

    def place(self, x: Tensor, norm: RMSNorm | None, ctx: ForwardContext) -> Tensor:
        """Queries or keys (B, T, H, D), normalised and turned to their positions."""
        x = x if norm is None else norm(x)
        x = x if self.rope_base is None else apply_rope(x, *ctx.rotary(*self.rotary))
        return rms(x, self.eps) if self.qk_norm == "after_rope" else x

    def new_cache(
        self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCache:
        feature = (self.kv_heads, self.head_dim)
        return KVCache(
            batch, capacity, self.window, self.chunk, feature, feature, dtype=dtype, device=device
        )

    def cache_bytes(self, capacity: int, dtype: torch.dtype) -> int:
        slots = min(n for n in (capacity, self.window, self.chunk) if n is not None)
        return (slots + 1) * slot_bytes(dtype, *[(self.kv_heads, self.head_dim)] * 2)

    def score_flops(self, context: int) -> float:
        if self.chunk is None:
            most = context if self.window is None else min(context, self.window)
            pairs = most * (most + 1) / 2 + (context - most) * most
        else:
            whole, rest = divmod(context, self.chunk)
            pairs = whole * self.chunk * (self.chunk + 1) / 2 + rest * (rest + 1) / 2
        return 4 * self.heads * self.head_dim * pairs / context
