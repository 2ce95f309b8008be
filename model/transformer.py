"""The decoder: embed, `depth` x (attention, feed-forward), normalize, predict.

Touvron et al., 2302.13971.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from model.attention.base import Attention, AuxLoss, LayerSpec, Shared
from model.cache import Cache, LayerCache
from model.context import ForwardContext
from model.layers import Embedding, Linear, apply_softcap
from run.ranges import NonNegativeFloat, PositiveFloat, PositiveInt


class ResidualSum(torch.autograd.Function):
    """x (fp32) + y (bf16) -> fp32, with a gradient that is rounded to bf16.

    The backward pass reads and writes the gradient of the residual stream in each layer, and the
    products of the layer that computed y need it in bf16. The sum itself needs fp32
    (docs/dev/log.md).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        grad = grad.bfloat16()
        return grad.float(), grad


def add_to_residual(x: Tensor, y: Tensor) -> Tensor:
    """x (B, T, D) + y (B, T, D)"""
    # With ResidualSum, compiled code for a GPU moves less memory; other code gains nothing from it.
    is_mixed = (x.dtype, y.dtype) == (torch.float32, torch.bfloat16)
    if x.is_cuda and is_mixed and torch.compiler.is_compiling():
        return ResidualSum.apply(x, y)
    return x + y


class Block(nn.Module):
    """A pre-norm decoder layer: x + attention(norm(x)), then x + ffn(norm(x)) if it has an FFN."""

    def __init__(
        self,
        spec: LayerSpec,
        attention: Attention,
        ffn: nn.Module | None,
        norm: Callable[[int, float], nn.Module],
    ):
        super().__init__()
        self.attention_norm = norm(spec.dim, spec.norm_eps)
        self.attention = attention
        if ffn is not None:
            self.ffn_norm = norm(spec.dim, spec.norm_eps)
        self.ffn = ffn

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        """x (B, T, D) -> (B, T, D)"""
        y, shared = self.attention(self.attention_norm(x), ctx, cache, shared)
        x = add_to_residual(x, y)
        if self.ffn is not None:
            x = add_to_residual(x, self.ffn(self.ffn_norm(x)))
        return x, shared


class Transformer(nn.Module):
    """A decoder-only language model.

    `hidden` is the feed-forward's inner width, and `context` is the length of the longest training
    sequence, in tokens. With `tied`, the head shares the embedding's weight. `softcap` bounds the
    logits. `attention(spec)`, `ffn(dim, hidden)` and `norm(dim, norm_eps)` build the parts of a
    layer.
    """

    def __init__(
        self,
        *,
        vocab_size: PositiveInt,
        dim: PositiveInt,
        depth: PositiveInt,
        heads: PositiveInt,
        hidden: PositiveInt,
        context: PositiveInt,
        tied: bool,
        attention: Callable[[LayerSpec], Attention],
        ffn: Callable[[int, int], nn.Module | None],
        norm: Callable[[int, float], nn.Module],
        softcap: PositiveFloat | None = None,
        norm_eps: NonNegativeFloat = 1e-6,
    ):
        super().__init__()
        self.context = context
        self.softcap = softcap
        self.embed = Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList()
        for layer in range(depth):
            spec = LayerSpec(
                dim=dim, heads=heads, context=context, layer=layer, depth=depth, norm_eps=norm_eps
            )
            self.blocks.append(Block(spec, attention(spec), ffn(dim, hidden), norm))
        self.norm = norm(dim, norm_eps)
        self.head = None if tied else Linear(dim, vocab_size)

    def forward(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, T) -> logits (B, T, V). With a cache, the tokens follow the cached ones.

        `padding` (B,) is the number of padding tokens at the start of each row; `documents` (B, T)
        numbers the documents packed into a row.
        """
        hidden, _ = self.hidden_states(tokens, cache, padding, documents)
        return self.logits(hidden)

    def hidden_states(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, AuxLoss]]:
        """tokens (B, T) -> the head's input (B, T, D), and auxiliary losses (B, T) by name.

        With a cache, the tokens are appended to it. Losses are summed over layers; the dict is
        empty if no layer computes a loss, as in decoding.
        """
        assert tokens.ndim == 2, tokens.shape
        if cache is not None:
            num_rows, num_new = tokens.shape
            assert num_rows == len(cache.lengths), (tokens.shape, cache.lengths.shape)
            assert num_new <= cache.capacity, f"{num_new} tokens, {cache.capacity=}"
        cached_lengths = None if cache is None else cache.lengths
        layer_caches = [None] * len(self.blocks) if cache is None else cache.layers
        ctx = ForwardContext(tokens, cached_lengths, padding, documents)
        x = self.embed(tokens)
        shared: Shared = {}
        for block, layer_cache in zip(self.blocks, layer_caches, strict=True):
            x, shared = block(x, ctx, layer_cache, shared)
        if cache is not None:
            cache.lengths.copy_(ctx.lengths)
        return self.norm(x), shared.get("losses", {})

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V)"""
        logits = F.linear(hidden, self.embed.weight) if self.head is None else self.head(hidden)
        return apply_softcap(logits, self.softcap)

    @property
    def unembedding(self) -> Tensor:
        """The head's weight (V, D)."""
        return self.embed.weight if self.head is None else self.head.weight

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype, device: Device) -> Cache:
        """Allocate an empty cache for `capacity` tokens in each of `batch` rows."""
        lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        layers = []
        for block in self.blocks:
            layers.append(block.attention.new_cache(batch, capacity, dtype, device))
        return Cache(lengths, layers, capacity)

    def cache_bytes(self, capacity: int, dtype: torch.dtype) -> int:
        """Return the size of one cache row in bytes, without allocating it."""
        return self.new_cache(1, capacity, dtype, "meta").nbytes

    @property
    def loss_names(self) -> list[str]:
        """The names of the auxiliary losses of all layers."""
        return sorted({name for block in self.blocks for name in block.attention.losses})

    def num_parameters(self) -> int:
        """Return the number of parameters; a parameter shared by several modules counts once."""
        return sum(p.numel() for p in self.parameters())

    def training_flops(self, *, whole_attention: bool = False) -> float:
        """Return forward and backward FLOPs per token, averaged over a full context.

        A backward pass costs as much as two forward passes. In a forward pass, a matrix in the
        blocks or the head costs 2 FLOPs per weight; the embedding is a lookup. With
        `whole_attention`, attention costs as much for every token as for the last token of a
        context, as nanoGPT, nanochat and torchtitan count it.
        """
        weights = self.unembedding.numel()
        weights += sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2)
        flops = 2 * weights
        for block in self.blocks:
            attention_flops = block.attention.attention_flops
            mean = attention_flops(self.context)
            if whole_attention and self.context > 1:
                # FLOPs of all tokens in the context, minus the FLOPs of all tokens but the last.
                before = self.context - 1
                mean = self.context * mean - before * attention_flops(before)
            flops += mean
        return 3 * flops
