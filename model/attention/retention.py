"""Retention: attention without a softmax, whose weights decay with distance. Sun, 2307.08621.

    S_t = a S_{t-1} + k_t v_t',   output S_t' q_t,   with a decay a for each head

The cache holds the state S (D, E), whatever the length. In this file D is the width of a head's
queries and keys, E that of its values, C the tokens of a chunk, N the number of chunks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.base import Attention, CrossLayer, LayerSpec, validate_knobs
from model.attention.gated_delta import FORGET_ALL
from model.cache import LayerCache
from model.context import ForwardContext
from model.layers import Linear, apply_rope, fp32, no_autocast, rms


class Retention(Attention):
    """Values are `expansion` times as wide as keys. `chunk` tokens are computed at once.

    Queries and keys are rotated by RoPE. Raises ValueError for sizes below 1 and for an odd head
    width.
    """

    def __init__(self, spec: LayerSpec, *, rope_base: float, expansion: int, chunk: int):
        super().__init__()
        validate_knobs(rope_base, expansion=expansion, chunk=chunk)
        dim = spec.dim
        heads = spec.heads
        head_dim = dim // heads
        if dim % heads or head_dim % 2:
            raise ValueError(
                f"heads must divide dim into even parts, whose pairs rotate ({dim=} {heads=}). "
                "fix: model.heads=4"
            )
        self.heads = heads
        self.head_dim = head_dim
        self.value_dim = expansion * head_dim
        self.chunk = chunk
        self.norm_eps = spec.norm_eps
        self.rotary = (head_dim, rope_base)  # which tables of cos and sin

        self.q_proj = Linear(dim, dim)
        self.k_proj = Linear(dim, dim)
        self.v_proj = Linear(dim, expansion * dim)
        self.gate_proj = Linear(dim, expansion * dim)
        self.o_proj = Linear(expansion * dim, dim)
        # Log decays (H,): a = 1 - 2^-5, 1 - 2^-6, ...
        log_decay = torch.log1p(-(2.0 ** -(5 + torch.arange(heads))))
        self.register_buffer("log_decay", log_decay, persistent=False)

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, carry: CrossLayer
    ) -> tuple[Tensor, CrossLayer]:
        """x (B, T, D) -> (B, T, D)"""
        # Project to (B, T, H, D) or (B, T, H, E), and rotate.
        q = fp32(self.q_proj(x))
        k = fp32(self.k_proj(x))
        v = fp32(self.v_proj(x))
        per_head = (self.heads, -1)
        q = q.unflatten(-1, per_head)
        k = k.unflatten(-1, per_head)
        v = v.unflatten(-1, per_head)
        cos, sin = ctx.rotary(*self.rotary)
        q = apply_rope(q, cos, sin)
        k = apply_rope(k, cos, sin)
        k = k * self.head_dim**-0.5

        # Log decays g (B, T, H). Padding writes and forgets nothing: S_t = S_{t-1}.
        positions = ctx.positions[:, :, None]
        is_padding = positions < 0
        batch, length, _ = x.shape
        g = self.log_decay.type_as(q)
        g = g.expand(batch, length, -1)
        g = g.masked_fill(positions == 0, FORGET_ALL)
        g = g.masked_fill(is_padding, 0.0)
        k = k.masked_fill(is_padding[..., None], 0.0)

        # Run the recurrence from the cached state.
        if cache is None:
            state = q.new_zeros(batch, self.heads, self.head_dim, self.value_dim)
        else:
            state = cache.buffers[0].type_as(q)
        with no_autocast(x.device):
            y, state = retain(q, k, v, g, state, self.chunk)
        if cache is not None:
            cache.buffers[0].copy_(state)

        # Normalize each head, gate and project back.
        y = rms(y, self.norm_eps).type_as(x)
        gate = F.silu(self.gate_proj(x))
        return self.o_proj(gate * y.flatten(-2)), carry

    def new_cache(
        self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> LayerCache:
        # The state is at least fp32, because it accumulates over all tokens.
        dtype = torch.promote_types(dtype, torch.float32)
        shape = (batch, self.heads, self.head_dim, self.value_dim)
        state = torch.zeros(shape, dtype=dtype, device=device)
        return LayerCache(state)

    def attention_flops(self, context: int) -> float:
        # Of each head: scores and their product with values in a chunk, state written and read.
        in_chunk = 2 * (self.head_dim + self.value_dim) * min(self.chunk, context)
        return self.heads * (in_chunk + 4 * self.head_dim * self.value_dim)


def retain(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over chunks of tokens, from `state` (B, H, D, E).

    q, k (B, T, H, D), v (B, T, H, E) and log decay g (B, T, H) -> output (B, T, H, E), next state.
    """
    q = q.transpose(1, 2)  # (B, H, T, D)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    g = g.transpose(1, 2)
    outputs = []
    for start in range(0, q.shape[2], chunk):
        end = start + chunk
        q_n = q[:, :, start:end]
        k_n = k[:, :, start:end]
        v_n = v[:, :, start:end]

        # G_i = g_1 + ... + g_i, and M_ij = exp(G_i - G_j): what remains at token i of token j <= i.
        # The first tril keeps exp from overflowing above the diagonal.
        g_sum = g[:, :, start:end, None].cumsum(dim=2)  # (B, H, C, 1)
        decay_mask = (g_sum - g_sum.mT).tril()  # (B, H, C, C)
        decay_mask = decay_mask.exp().tril()

        # o_i = sum_{j<=i} M_ij (q_i . k_j) v_j + exp(G_i) S' q_i
        scores = (q_n @ k_n.mT) * decay_mask
        from_state = g_sum.exp() * (q_n @ state)
        outputs.append(scores @ v_n + from_state)

        # S_next = exp(G_last) S + sum_j M_last,j k_j v_j'
        remaining = decay_mask[:, :, -1, :, None]
        decay = g_sum[:, :, -1:].exp()
        k_n = k_n * remaining
        state = decay * state + k_n.mT @ v_n
    y = torch.cat(outputs, dim=2)
    return y.transpose(1, 2), state
