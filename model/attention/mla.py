"""Multi-head latent attention: keys and values are projected from a latent.

DeepSeek-V2, 2405.04434.
For each token, the cache holds a latent of width `rank` and a rotary key of width `rope_dim`, which
all heads share. With a cache, a few new tokens attend directly to the latents: the key and value
projections are absorbed, that is, applied to the T new tokens instead of all S tokens.
"""

import torch
from torch import Tensor

from model.attention.base import Attention, LayerSpec, Shared
from model.attention.kernels.choose import AttentionKernel
from model.cache import LayerCache, Shape
from model.context import AttentionMask, ForwardContext
from model.layers import Linear, RMSNorm, apply_rope, split_heads
from model.rope import Scaling
from run.ranges import AboveOne, BelowOne, PositiveInt

NORM_EPS = 1e-6  # for the latents' norms, as in DeepSeek's code; independent of the model's eps


class LatentAttention(Attention):
    """A key has `head_dim` features without RoPE and `rope_dim` features with it (R in shapes).

    Values are head_dim + rope_dim wide (E), because fused kernels need them as wide as keys. With
    `query_rank`, queries are also projected from a latent. Without a `rope_base`, there is no RoPE,
    and the part of width `rope_dim` is shared but not rotated. Raises ValueError if the latent is
    wider than the keys and values computed from it, or if `rope_dim` is odd or below 2.
    """

    def __init__(
        self,
        spec: LayerSpec,
        *,
        rank: PositiveInt | None,
        head_dim: PositiveInt | None,
        rope_dim: PositiveInt | None,
        rope_base: AboveOne | None,
        query_rank: PositiveInt | None = None,
        rope_scaling: Scaling | None = None,
        dropout: BelowOne = 0.0,
        bias: bool = False,
    ):
        super().__init__()
        dim = spec.dim
        heads = spec.heads
        if head_dim is None:
            head_dim = dim // heads
        if rank is None:
            rank = 2 * head_dim
        if rope_dim is None:
            rope_dim = head_dim // 2
        if rope_dim < 2 or rope_dim % 2:
            raise ValueError(
                "RoPE rotates pairs, so attention.rope_dim must be even and at least 2 "
                f"(got {rope_dim}). fix: attention.rope_dim={max(2, rope_dim + 1)}"
            )
        if rank > heads * (2 * head_dim + rope_dim):
            raise ValueError(
                "the latent is wider than the keys and values computed from it "
                f"(attention.rank={rank}). fix: attention.rank={heads * (2 * head_dim + rope_dim)}"
            )
        self.heads = heads
        self.rank = rank
        self.head_dim = head_dim
        self.rope_dim = rope_dim
        self.key_dim = head_dim + rope_dim
        self.value_dim = self.key_dim
        self.rope_base = rope_base
        self.rope_scaling = rope_scaling

        # Queries, projected through their own latent if there is a `query_rank`.
        self.q_down_proj = None
        self.q_down_norm = None
        if query_rank is not None:
            self.q_down_proj = Linear(dim, query_rank, bias)
            self.q_down_norm = RMSNorm(query_rank, NORM_EPS)
        self.q_proj = Linear(query_rank or dim, heads * (head_dim + rope_dim))

        # The latent for keys and values, and the rotary key that all heads share.
        self.latent_proj = Linear(dim, rank, bias)
        self.latent_norm = RMSNorm(rank, NORM_EPS)
        self.rope_proj = Linear(dim, rope_dim, bias)
        self.kv_proj = Linear(rank, heads * (head_dim + self.value_dim))
        self.o_proj = Linear(heads * self.value_dim, dim, bias)
        self.kernel = AttentionKernel(dropout=dropout)

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        # Queries: a part without RoPE (B, T, H, head_dim) and a part with it (B, T, H, R).
        q_input = x
        if self.q_down_proj is not None:
            q_input = self.q_down_norm(self.q_down_proj(x))
        q = split_heads(self.q_proj(q_input), self.heads)
        q, q_rope = q.split([self.head_dim, self.rope_dim], dim=-1)
        k_rope = self.rope_proj(x).unsqueeze(2)
        if self.rope_base is not None:
            cos, sin = ctx.rotary(self.rope_dim, self.rope_base, self.rope_scaling)
            q_rope = apply_rope(q_rope, cos, sin)
            k_rope = apply_rope(k_rope, cos, sin)

        # A token's cache entry: its latent and its rotary key, as one head.
        latent = self.latent_norm(self.latent_proj(x)).unsqueeze(2)
        entry = torch.cat((latent, k_rope), dim=-1)  # (B, T, 1, rank + R)
        features, mask = self.extend_cache(cache, ctx, entry=entry)
        entries = features["entry"]  # (B, S, 1, rank + R)

        # Multiplications per cached token and head, roughly: T (2 rank + R) absorbed,
        # 2 rank head_dim + T (2 head_dim + R) expanded. Absorbing is therefore cheaper if
        # T (rank - head_dim) < rank head_dim, as in a decode step or for a short prompt.
        num_new = x.shape[1]
        absorbing_is_cheaper = num_new * (self.rank - self.head_dim) < self.rank * self.head_dim
        if cache is not None and absorbing_is_cheaper:
            y = self.attend_absorbed(q, q_rope, entries, mask)
        else:
            y = self.attend_expanded(q, q_rope, entries, mask)
        return self.o_proj(y.flatten(-2)), shared

    def attend_expanded(
        self, q: Tensor, q_rope: Tensor, entries: Tensor, mask: AttentionMask
    ) -> Tensor:
        """entries (B, S, 1, rank + R) -> (B, T, H, E), expanding keys and values for each head."""
        latent, k_rope = entries.split([self.rank, self.rope_dim], dim=-1)
        kv = split_heads(self.kv_proj(latent.squeeze(2)), self.heads)
        k, v = kv.split([self.head_dim, self.value_dim], dim=-1)
        k_rope = k_rope.expand(-1, -1, self.heads, -1)
        k = torch.cat((k, k_rope), dim=-1)  # (B, S, H, head_dim + R)
        q = torch.cat((q, q_rope), dim=-1)  # (B, T, H, head_dim + R)
        return self.kernel(q, k, v, mask)

    def attend_absorbed(
        self, q: Tensor, q_rope: Tensor, entries: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Compute the same as `attend_expanded`, with the entries as keys and values of all heads.

        For a latent c, q . (W_k c) = (W_k^T q) . c, and a weighted sum of W_v c is W_v times the
        weighted sum of c. Scores keep the scale of expanded keys; the rotary part of the weighted
        sum is dropped.
        """
        weight = self.kv_proj.weight.unflatten(0, (self.heads, -1))  # (H, head_dim + E, rank)
        w_k, w_v = weight.split([self.head_dim, self.value_dim], dim=1)
        q = torch.einsum("bthd,hdc->bthc", q, w_k)  # (B, T, H, rank)
        q = torch.cat((q, q_rope), dim=-1)  # (B, T, H, rank + R)
        y = self.kernel(q, entries, entries, mask, scale=self.key_dim**-0.5)
        return torch.einsum("bthc,hec->bthe", y[..., : self.rank], w_v)

    def cache_shapes(self) -> dict[str, Shape]:
        return {"entry": (1, self.rank + self.rope_dim)}

    def attention_flops(self, context: int) -> float:
        return 2 * self.heads * self.value_dim * (context + 1)
