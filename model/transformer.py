"""The decoder: embed, `depth` x (attention, feed-forward), normalise, predict. Touvron et al., 2302.13971."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention.base import Attention, CrossLayer
from model.cache import Cache, LayerCache
from model.context import ForwardContext
from model.layers import Embedding, Linear, RMSNorm, SwiGLU, apply_softcap


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + ffn(norm(x))."""

    feed_forward = SwiGLU

    def __init__(self, dim: int, hidden: int, attention: Attention):
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = attention
        self.ffn_norm = RMSNorm(dim)
        self.ffn = self.feed_forward(dim, hidden)

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, handed: CrossLayer
    ) -> tuple[Tensor, CrossLayer]:
        y, handed = self.attention(self.attention_norm(x), ctx, cache, handed)
        x = x + y
        return x + self.ffn(self.ffn_norm(x)), handed


class Transformer(nn.Module):
    """With `tied`, the embedding is the head too; `softcap` bounds the logits; `norm_eps` keeps norms from 0."""

    block = Block

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        depth: int,
        heads: int,
        hidden: int,
        context: int,
        tied: bool,
        attention: Callable[..., Attention],
        softcap: float | None = None,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        if softcap is not None and not 0 < softcap < math.inf:
            raise ValueError(f"model.softcap must be a number above 0 (got {softcap!r}). fix: null")
        if not 0 <= norm_eps < 1:
            raise ValueError(
                f"model.norm_eps must be from 0 to below 1 (got {norm_eps!r}). fix: 1e-6"
            )
        self.context, self.softcap = context, softcap
        self.embed = Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(
            self.block(dim, hidden, attention(dim, heads, context, layer, depth))
            for layer in range(depth)
        )
        self.norm = RMSNorm(dim)
        self.head = None if tied else Linear(dim, vocab_size)
        for module in self.modules():
            if hasattr(module, "eps"):
                module.eps = norm_eps

    def forward(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        valid: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, T) -> logits (B, T, V). With a cache, the tokens that follow those it has seen.

        `valid` (B, T) is false on padding, wherever it is; `documents` (B, T) numbers what is packed in a row.
        """
        return self.logits(self.hidden(tokens, cache, valid, documents))

    def hidden(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        valid: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, T) -> (B, T, D), ready for the head."""
        ctx = ForwardContext(tokens, None if cache is None else cache.lengths, valid, documents)
        x, handed = self.enter(tokens)
        layers = [None] * len(self.blocks) if cache is None else cache.layers
        for block, layer in zip(self.blocks, layers, strict=True):
            x, handed = block(x, ctx, layer, handed)
        if cache is not None:
            cache.lengths.copy_(ctx.lengths)
        return self.norm(x)

    def enter(self, tokens: Tensor) -> tuple[Tensor, CrossLayer]:
        """What the first block gets: tokens (B, T) -> (B, T, D), and what else the layers may need of them."""
        return self.embed(tokens), {}

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V)"""
        predicted = F.linear(hidden, self.embed.weight) if self.head is None else self.head(hidden)
        return apply_softcap(predicted, self.softcap)

    @property
    def unembedding(self) -> Tensor:
        """(V, D)"""
        return self.embed.weight if self.head is None else self.head.weight

    def new_cache(
        self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> Cache:
        """Room for `capacity` tokens in each of `batch` rows."""
        lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        return Cache(
            lengths,
            [block.attention.new_cache(batch, capacity, dtype, device) for block in self.blocks],
        )

    def cache_bytes(self, capacity: int, dtype: torch.dtype) -> int:
        """What a row of the cache costs, by arithmetic alone."""
        return sum(block.attention.cache_bytes(capacity, dtype) for block in self.blocks)

    def training_flops(self) -> float:
        """Floating-point operations a token costs to train on at full context: forward, and twice that backward.

        Matrices count 2 a weight (embeddings are lookups), attention scores their causal half.
        """
        lookups = [module.weight for module in self.modules() if isinstance(module, nn.Embedding)]
        matrices = sum(p.numel() for p in self.parameters() if p.ndim == 2) - sum(
            p.numel() for p in lookups
        )
        matrices += self.embed.weight.numel() if self.head is None else 0
        return 3 * (
            2 * matrices + sum(block.attention.score_flops(self.context) for block in self.blocks)
        )
