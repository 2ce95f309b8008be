"""Softmax attention as a combination of independent choices. Vaswani et al., 1706.03762.

Projections: `heads` query heads share `kv_heads` key-value heads (Ainslie et al., 2305.13245).
Positions: RoPE, or none (NoPE: Kazemnejad, 2305.19466).
QK-norm: none, before RoPE with a weight (Qwen3), or after it without one (Llama 4).
Mask: the whole past, a `window` (Beltagy, 2004.05150) or a `chunk` (Llama 4).
Scores: a soft-cap (Gemma 2), a learned sink (gpt-oss).
Output: plain or gated (Qiu et al., 2505.06708).
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from model.attention.base import Attention, LayerSpec, Shared
from model.attention.kernels.choose import AttentionKernel
from model.attention.kernels.definition import ScoreBias
from model.cache import LayerCache, Shape
from model.context import AttentionMask, ForwardContext
from model.layers import Linear, RMSNorm, apply_rope, project, rms, split_heads, take_along
from model.rope import Scaling
from run.ranges import AboveOne, BelowOne, NonNegativeFloat, PositiveFloat, PositiveInt


class SoftmaxAttention(Attention):
    """Softmax attention, with the options that configs/attention/gqa.yaml explains.

    With a window or a chunk, a row of the cache holds at most that many tokens. Raises ValueError
    for options that conflict.
    """

    def __init__(
        self,
        spec: LayerSpec,
        *,
        kv_heads: PositiveInt,
        rope_base: AboveOne | None,
        qk_norm: Literal["before_rope", "after_rope"] | None,
        head_dim: PositiveInt | None = None,
        rope_fraction: NonNegativeFloat = 1.0,
        rope_scaling: Scaling | None = None,
        window: PositiveInt | None = None,
        chunk: PositiveInt | None = None,
        softcap: PositiveFloat | None = None,
        sink: bool = False,
        gated: bool = False,
        dropout: BelowOne = 0.0,
        bias: bool = False,
    ):
        super().__init__()
        dim = spec.dim
        heads = spec.heads

        # Reject options that conflict.
        is_divisible = head_dim is not None or dim % heads == 0
        if not is_divisible or heads % kv_heads:
            fix = f"attention.kv_heads={math.gcd(heads, kv_heads)}"
            if not is_divisible:
                fix += f" model.dim={2 * heads * (dim // heads // 2 + 1)}"
            raise ValueError(
                "heads must divide dim unless head_dim is set, and kv_heads must divide heads "
                f"(got {dim=} {heads=} {kv_heads=}). fix: {fix}"
            )
        if head_dim is None:
            head_dim = dim // heads
        rotary_dim = int(head_dim * rope_fraction)
        if rope_base is not None and (rotary_dim % 2 or not 0 < rotary_dim <= head_dim):
            fix = "attention.rope_fraction=1.0"
            if head_dim % 2:
                fix = f"attention.head_dim={head_dim + 1}"
            raise ValueError(
                "RoPE needs an even number of rotated features per head, between 2 and head_dim "
                f"({dim=}; {head_dim=} times {rope_fraction=} is {head_dim * rope_fraction:g}). "
                f"fix: {fix}"
            )

        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.window = window
        self.chunk = chunk
        self.qk_norm = qk_norm
        self.norm_eps = spec.norm_eps
        self.rope_base = rope_base
        self.rope_scaling = rope_scaling
        self.rotary_dim = rotary_dim

        # Projections and their norms.
        self.q_proj = Linear(dim, heads * head_dim, bias)
        self.k_proj = Linear(dim, kv_heads * head_dim, bias)
        self.v_proj = Linear(dim, kv_heads * head_dim, bias)
        self.o_proj = Linear(heads * head_dim, dim, bias)
        self.gate_proj = Linear(dim, heads * head_dim, bias) if gated else None
        self.q_norm = None
        self.k_norm = None
        if qk_norm == "before_rope":
            self.q_norm = RMSNorm(head_dim, spec.norm_eps)
            self.k_norm = RMSNorm(head_dim, spec.norm_eps)

        # The softmax. A sink starts at 0 (init_param), like a key with score 0.
        self.sink = nn.Parameter(torch.empty(heads)) if sink else None
        self.kernel = AttentionKernel(softcap, dropout)

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        # Queries, keys and values of the T new tokens; then keys and values of all S tokens.
        q, k, v = self.project_qkv(x, ctx)
        kv, mask = self.extend_cache(cache, ctx, k=k, v=v)

        # Attend, gate and project back.
        y = self.attend(q, kv["k"], kv["v"], mask)
        return self.project_out(y, x), shared

    # Steps shared with other variants.

    def project_qkv(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, D) -> queries (B, T, H, E), keys and values (B, T, K, E).

        Queries and keys are normalized and rotated.
        """
        projected = project(x, self.q_proj, self.k_proj, self.v_proj)
        q = split_heads(next(projected), self.heads)
        q = self.norm_and_rope(q, self.q_norm, ctx)
        k = split_heads(next(projected), self.kv_heads)
        k = self.norm_and_rope(k, self.k_norm, ctx)
        v = split_heads(next(projected), self.kv_heads)
        return q, k, v

    def project_q(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x (B, T, D) -> queries (B, T, H, E), normalized and rotated."""
        q = split_heads(self.q_proj(x), self.heads)
        return self.norm_and_rope(q, self.q_norm, ctx)

    def norm_and_rope(
        self, x: Tensor, norm: RMSNorm | None, ctx: ForwardContext, positions: Tensor | None = None
    ) -> Tensor:
        """Normalize queries or keys (B, T, H, E), and apply RoPE at the new tokens' positions.

        If `positions` (B, T) are given, they replace the new tokens' positions.
        """
        if norm is not None:
            x = norm(x)
        x = self.rope(x, ctx, self.rotary_dim, positions)
        if self.qk_norm == "after_rope":
            x = rms(x, self.norm_eps)
        return x

    def rope(
        self, x: Tensor, ctx: ForwardContext, rotary_dim: int, positions: Tensor | None = None
    ) -> Tensor:
        """Rotate the first `rotary_dim` features of x (B, T, H, E) unless `rope_base` is None."""
        assert x.ndim == 4, x.shape
        if self.rope_base is None:
            return x
        cos, sin = ctx.rotary(rotary_dim, self.rope_base, self.rope_scaling, positions)
        return apply_rope(x, cos, sin)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        score_bias: ScoreBias | None = None,
    ) -> Tensor:
        """q (B, T, H, E), k and v (B, S, K, E) -> (B, T, H, E).

        `score_bias` is added to the scores; see kernels/definition.py.
        """
        return self.kernel(q, k, v, mask, sink=self.sink, score_bias=score_bias)

    def project_out(self, y: Tensor, x: Tensor) -> Tensor:
        """Gate the heads' outputs y (B, T, H, E) with x (B, T, D), if gated, and project to D."""
        y = y.flatten(-2)
        if self.gate_proj is not None:
            y = y * self.gate_proj(x).sigmoid()
        return self.o_proj(y)

    def own_feature(
        self, cache: LayerCache | None, ctx: ForwardContext, *, new: Tensor, extended: Tensor
    ) -> Tensor:
        """Return a feature (B, T, K, E) of the new tokens, exactly as attention uses it.

        `new` (B, T, K, E) was passed to `extend_cache`, which returned `extended` (B, S, K, E). If
        `extended` holds the cache's slots (S = size), the feature is read from them, because an
        int8 cache has rounded it. A ring that receives several tokens returns the new features
        unrounded, after its slots.
        """
        if cache is None or extended.shape[1] != cache.size:
            return new
        slots = ctx.cache_slots(cache.size)
        return take_along(extended, slots[..., None, None], dim=1)

    def cache_shapes(self) -> dict[str, Shape]:
        kv_shape = (self.kv_heads, self.head_dim)
        return {"k": kv_shape, "v": kv_shape}

    def attention_flops(self, context: int) -> float:
        # One product with a key and one with a value for each token attended to.
        window = context if self.window is None else self.window
        chunk = context if self.chunk is None else self.chunk
        visible = sum(min(position % chunk + 1, window) for position in range(context))
        return 4 * self.heads * self.head_dim * visible / context
