"""Softmax attention as a product of independent choices. Vaswani et al., 1706.03762.

Projections: `heads` queries share `kv_heads` keys and values (Ainslie et al., 2305.13245).
Positions: RoPE, or none (NoPE: Kazemnejad, 2305.19466).
QK-norm: none, before RoPE with a weight (Qwen3), or after it without one (Llama 4).
Mask: the whole past, a `window` (Beltagy, 2004.05150) or a `chunk` (Llama 4).
Scores: a soft-cap (Gemma 2), a learned sink (gpt-oss).
Output: plain or gated (Qiu et al., 2505.06708).
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.types import Device

from model.attention.base import Attention, CrossLayer, LayerSpec, validate_knobs
from model.attention.kernels import AttentionKernel, ScoreBias
from model.cache import KVCache, Shape
from model.context import ForwardContext, Visibility
from model.layers import Linear, RMSNorm, apply_rope, rms
from model.rope import Scaling

# Keys, values and what else a mechanism needs of each token: tensors (B, T, ...).
Features = Sequence[Tensor]


class Inputs(NamedTuple):
    """What the layer is called with; see `Attention.forward`."""

    x: Tensor
    ctx: ForwardContext
    cache: KVCache | None
    carry: CrossLayer


class Seen(NamedTuple):
    """What the new tokens attend to, which are some or all of the tokens in reach."""

    new: Features  # of the T new tokens
    features: Features  # of all S tokens in reach
    visible: Visibility  # which of the new attends to which of all


class SoftmaxAttention(Attention):
    """Softmax attention; a preset is a combination of these options.

    `rope_base` null means no positions. `head_dim` null means dim / heads; with another value, the
    heads together are wider or narrower than x. A token sees at most the `window` newest tokens,
    itself included, and the tokens of its own `chunk`, and the cache holds only those.
    Raises ValueError for options that contradict each other.
    """

    def __init__(
        self,
        spec: LayerSpec,
        *,
        kv_heads: int,
        rope_base: float | None,
        qk_norm: Literal["before_rope", "after_rope"] | None,
        head_dim: int | None = None,
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
        dim = spec.dim
        heads = spec.heads

        # Refuse options that are out of range or contradict each other.
        validate_knobs(rope_base, dropout)
        is_divisible = head_dim is not None or dim % heads == 0
        if not is_divisible or heads % kv_heads:
            fix = f"attention.kv_heads={math.gcd(heads, kv_heads)}"
            if not is_divisible:
                fix += f" model.dim={2 * heads * (dim // heads // 2 + 1)}"
            raise ValueError(
                "heads must divide dim, and kv_heads must divide heads "
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
                f"RoPE needs an even part of the head dimension ({dim=} {head_dim=} x "
                f"{rope_fraction=} is {head_dim * rope_fraction:g}). fix: {fix}"
            )

        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.window = window
        self.chunk = chunk
        self.qk_norm = qk_norm
        self.norm_eps = spec.norm_eps
        self.rope_base = rope_base
        self.rotary = (rotary_dim, rope_base, rope_scaling)  # which tables of cos and sin

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

        # The softmax. A sink starts at 0: it weighs as much as a key with that score.
        self.sink = nn.Parameter(torch.empty(heads)) if sink else None
        self.kernel = AttentionKernel(softcap, dropout)

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: KVCache | None, carry: CrossLayer
    ) -> tuple[Tensor, CrossLayer]:
        """x (B, T, D) -> (B, T, D)"""
        inputs = Inputs(x, ctx, cache, carry)
        q, k, v = self.project(inputs)
        q = self.norm_and_rope(q, self.q_norm, ctx)
        seen, carry = self.see(inputs, k, v)

        # Attend, gate and project back.
        y, carry = self.attend(inputs._replace(carry=carry), q, seen)
        y = y.flatten(-2)  # (B, T, H E)
        if self.gate_proj is not None:
            y = y * self.gate_proj(x).sigmoid()
        return self.o_proj(y), carry

    def project(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, T, H, E), keys and values (B, T, K, E), before norm and RoPE.

        Without `v_proj`, values are these keys.
        """
        x = inputs.x
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, -1))
        v = k
        if self.v_proj is not None:
            v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1))
        return q, k, v

    def see(self, inputs: Inputs, k: Tensor, v: Tensor) -> tuple[Seen, CrossLayer]:
        """Return what the new tokens attend to, once they are in the cache, and carry."""
        new, carry = self.features(inputs, k, v)
        if inputs.cache is None:
            return Seen(new, new, inputs.ctx.visible(self.window, self.chunk)), carry
        return Seen(new, *inputs.cache.update(inputs.ctx, *new)), carry

    def features(self, inputs: Inputs, k: Tensor, v: Tensor) -> tuple[Features, CrossLayer]:
        """Return what the cache is to hold of the new tokens (`cached_features`), and carry."""
        return (self.norm_and_rope(k, self.k_norm, inputs.ctx), v), inputs.carry

    def norm_and_rope(
        self, x: Tensor, norm: RMSNorm | None, ctx: ForwardContext, positions: Tensor | None = None
    ) -> Tensor:
        """Normalize queries or keys (B, T, H, E), and rotate them to the positions of new tokens.

        `positions` (B, T) are those of other tokens.
        """
        if norm is not None:
            x = norm(x)
        if self.rope_base is not None:
            cos, sin = ctx.rotary(*self.rotary, positions)
            x = apply_rope(x, cos, sin)
        if self.qk_norm == "after_rope":
            x = rms(x, self.norm_eps)
        return x

    def attend(self, inputs: Inputs, q: Tensor, seen: Seen) -> tuple[Tensor, CrossLayer]:
        """q (B, T, H, E) -> (B, T, H, E), carry"""
        k, v = seen.features[:2]
        bias = self.score_bias(seen)
        return self.kernel(q, k, v, seen.visible, sink=self.sink, score_bias=bias), inputs.carry

    def score_bias(self, seen: Seen) -> ScoreBias | None:
        """Return what is added to the scores, a function of indices; it may depend on features."""
        return None

    def cached_features(self) -> list[Shape]:
        """The shapes of what the cache holds of a token: keys, values."""
        return [(self.kv_heads, self.head_dim), (self.kv_heads, self.head_dim)]

    def cached_state(self, capacity: int) -> list[Shape]:
        """The shapes of what the cache holds of a row whatever its length; in `cache.state`."""
        return []

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype, device: Device) -> KVCache:
        shapes = (self.cached_features(), self.cached_state(capacity))
        return KVCache(batch, capacity, self.window, self.chunk, *shapes, dtype, device)

    def attention_flops(self, context: int) -> float:
        # A product with a key and one with a value, for each token that a token sees.
        window = context if self.window is None else self.window
        chunk = context if self.chunk is None else self.chunk
        visible = sum(min(position % chunk + 1, window) for position in range(context))
        return 4 * self.heads * self.head_dim * visible / context
