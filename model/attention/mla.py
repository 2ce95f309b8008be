"""Multi-head latent attention: keys and values are read out of one small latent. DeepSeek-V2, 2405.04434.

Only the latent (`rank`) and one rotary key (`rope_dim`) are cached, for all heads together. Few new tokens meet the
latents themselves (absorbed): the read-out matrices move from the S cached tokens to the T new ones.
"""

import torch
from torch import Tensor

from model.attention.base import Attention, validate_knobs
from model.attention.kernels import attention
from model.cache import KVCache, slot_bytes
from model.context import ForwardContext, Scaling
from model.layers import Linear, RMSNorm, apply_rope


class LatentAttention(Attention):
    """`head_dim` is the part of a key without position; values are head_dim + rope_dim wide, as fused kernels ask.

    With `query_rank`, queries come out of a latent too. Raises ValueError for an odd `rope_dim`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        context: int,
        layer: int,
        depth: int,
        *,
        rank: int | None,
        head_dim: int | None,
        rope_dim: int | None,
        rope_base: float,
        query_rank: int | None = None,
        rope_scaling: Scaling | None = None,
        dropout: float = 0.0,
        bias: bool = False,
    ):
        super().__init__()
        validate_knobs(
            rope_base,
            dropout,
            rank=rank,
            head_dim=head_dim,
            rope_dim=rope_dim,
            query_rank=query_rank,
        )
        head_dim = dim // heads if head_dim is None else head_dim
        rank = 2 * head_dim if rank is None else rank
        rope_dim = head_dim // 2 if rope_dim is None else rope_dim
        if rope_dim % 2:
            raise ValueError(
                f"RoPE turns pairs, so attention.rope_dim must be even (got {rope_dim}). fix: change it"
            )
        self.heads, self.rank, self.head_dim, self.rope_dim, self.dropout = (
            heads,
            rank,
            head_dim,
            rope_dim,
            dropout,
        )
        self.value_dim = head_dim + rope_dim
        self.rotary = rope_dim, rope_base, rope_scaling
        self.q_down_proj = None if query_rank is None else Linear(dim, query_rank, bias)
        self.q_down_norm = None if query_rank is None else RMSNorm(query_rank)
        self.q_proj = Linear(query_rank or dim, heads * (head_dim + rope_dim))
        self.latent_proj = Linear(dim, rank, bias)
        self.latent_norm = RMSNorm(rank)
        self.rope_proj = Linear(dim, rope_dim, bias)
        self.kv_proj = Linear(rank, heads * (head_dim + self.value_dim))
        self.o_proj = Linear(heads * self.value_dim, dim, bias)

    def mix(self, x: Tensor, ctx: ForwardContext, cache: KVCache | None) -> Tensor:
        tables = ctx.rotary(*self.rotary)
        q = self.q_proj(x if self.q_down_proj is None else self.q_down_norm(self.q_down_proj(x)))
        q, q_rope = q.unflatten(-1, (self.heads, -1)).split(
            [self.head_dim, self.rope_dim], dim=-1
        )  # (B, T, H, D), R
        q_rope = apply_rope(q_rope, *tables)
        k_rope = apply_rope(self.rope_proj(x).unsqueeze(2), *tables)
        latent = torch.cat(
            (self.latent_norm(self.latent_proj(x)).unsqueeze(2), k_rope), dim=-1
        )  # (B, T, 1, rank+R)
        if cache is None:
            return self.o_proj(
                self.expanded(q, q_rope, latent, ctx.causal_mask(None, None)).flatten(-2)
            )
        (latent,), visible = cache.update(ctx, latent)
        # multiplications a cached token and head cost: T (2 rank + R) absorbed, 2 rank D + T (2 D + R) expanded
        few = x.shape[1] * (self.rank - self.head_dim) < self.rank * self.head_dim
        y = (
            self.absorbed(q, q_rope, latent, visible)
            if few
            else self.expanded(q, q_rope, latent, visible)
        )
        return self.o_proj(y.flatten(-2))

    def expanded(self, q: Tensor, q_rope: Tensor, latent: Tensor, visible: Tensor | None) -> Tensor:
        """latent (B, S, 1, rank+R) -> (B, T, H, D+R), through keys and values of every head."""
        latent, k_rope = latent.split([self.rank, self.rope_dim], dim=-1)
        both = self.kv_proj(latent.squeeze(2)).unflatten(-1, (self.heads, -1))
        k, v = both.split([self.head_dim, self.value_dim], dim=-1)
        k = torch.cat((k, k_rope.expand(-1, -1, self.heads, -1)), dim=-1)  # (B, S, H, D+R)
        dropout = self.dropout if self.dropout and self.training else 0.0
        return attention(torch.cat((q, q_rope), dim=-1), k, v, visible, dropout=dropout)

    def absorbed(self, q: Tensor, q_rope: Tensor, latent: Tensor, visible: Tensor) -> Tensor:
        """The same, with the latents as one key and value for all heads."""
        readout = self.kv_proj.weight.unflatten(0, (self.heads, -1))  # (H, D+E, rank)
        to_key, to_value = readout.split([self.head_dim, self.value_dim], dim=1)
        q = torch.cat(
            (torch.einsum("bthd,hdr->bthr", q, to_key), q_rope), dim=-1
        )  # (B, T, H, rank+R)
        y = attention(q, latent, latent, visible, scale=self.value_dim**-0.5)[..., : self.rank]
        return torch.einsum("bthr,her->bthe", y, to_value)

    def new_cache(
        self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCache:
        return KVCache(
            batch, capacity, None, None, (1, self.rank + self.rope_dim), dtype=dtype, device=device
        )

    def cache_bytes(self, capacity: int, dtype: torch.dtype) -> int:
        return (capacity + 1) * slot_bytes(dtype, (1, self.rank + self.rope_dim))

    def score_flops(self, context: int) -> float:
        return 2 * self.heads * self.value_dim * (context + 1)
