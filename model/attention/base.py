"""The contract of an attention variant, and the one kernel call they share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from model.cache import LayerCache
from model.layers import capped, precise
from model.positions import Positions

BLOCK, DENSE = 128, 1024  # queries of a block; tokens up to which scores may lie in memory
Handed = dict[str, tuple[Tensor | None, ...]]  # what earlier layers of this forward hand to later ones


watched: list[Tensor] | None = None


class Attention(nn.Module, ABC):
    """Maps (B, T, D) to (B, T, D); every token sees itself and its past.

    It is constructed with what its layer knows, then its own knobs:
    (dim, heads, context, layer, depth, *, ...). Projections, positions, mask and what to remember are its own affair.
    Its last map is called o_proj and begins at zero; its norms have `norm` in their names.
    A tensor that is no parameter is a buffer, which keeps its dtype whatever that of the parameters is:
    cast what is computed from it (`type_as`).
    """

    value_width: int | None = None  # width of the values that it takes from before it

    def forward(
        self, x: Tensor, positions: Positions, cache: LayerCache | None, handed: Handed
    ) -> tuple[Tensor, Handed]:
        """A variant that takes from or gives to other layers overrides this; all others only `mix`."""
        return self.mix(x, positions, cache), handed

    @abstractmethod
    def mix(self, x: Tensor, positions: Positions, cache: LayerCache | None) -> Tensor:
        """x (B, T, D) -> (B, T, D), with a cache also of what came before."""

    @abstractmethod
    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str) -> LayerCache:
        """Empty, with room for `capacity` tokens in each row.

        What a row holds before its first token is zero, or `initial` of the LayerCache.
        """

    @abstractmethod
    def cache_bytes(self, capacity: int, dtype: torch.dtype) -> int:
        """What a row of the cache costs, by arithmetic alone."""

    @abstractmethod
    def score_flops(self, context: int) -> float:
        """Floating-point operations of one token's forward outside the weights, averaged over a full context."""

    def initial(self, name: str, generator: torch.Generator) -> Tensor:
        """The first value of a parameter that belongs to no torch module: a sink weighs as much as a score of 0."""
        return torch.zeros(getattr(self, name).shape)


@contextmanager
def watching() -> Iterator[list[Tensor]]:
    """Inside, every `attend` adds its weights (B, H, T, S) to the list."""
    global watched
    watched = []
    try:
        yield watched
    finally:
        watched = None


def check(base: float | None = None, dropout: float = 0.0, **sizes: int | None) -> None:
    """Raises ValueError for a knob that no attention can have."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"attention.{name} must be a whole number from 1 (got {size!r}). fix: change it")
    if base is not None and not 1 < base < math.inf:
        raise ValueError(f"attention.rope_base must be above 1 (got {base!r}). fix: 10000")
    if not 0 <= dropout < 1:
        raise ValueError(f"attention.dropout must be from 0 to below 1 (got {dropout!r}). fix: 0.0")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    *,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """q (B, T, H, D), k (B, S, K, D), v (B, S, K, E), visible (B, 1, T, S), sink (H,) -> (B, T, H, E).

    H is a multiple of K. visible=None is plain causal, T = S: no mask exists, the fused kernel knows. Compiled for a
    CPU and up to `DENSE` tokens, plain products of a few query blocks take less time than that kernel, and so do sums
    for T = 1; compiled for CUDA, whatever is not plain and as long as its keys goes to FlexAttention.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if watched is not None:
        each = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:2], -1, -1)
        watched.append(by_scores(q, k, each, visible, softcap, sink, 0.0, scale))
    compiled, plain = torch.compiler.is_compiling(), softcap is None and sink is None
    if compiled and q.is_cuda and q.shape[2] == k.shape[2] and not (plain and visible is None) and dropout == 0:
        return by_flex(q, k, v, visible, softcap, sink, scale).transpose(1, 2)
    dense = compiled and q.device.type == "cpu" and (q.shape[2] == 1 or (visible is None and q.shape[2] <= DENSE))
    if plain and not dense:
        causal, gqa = visible is None, q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, visible, dropout, causal, scale=scale, enable_gqa=gqa)
    else:
        y = by_scores(q, k, v, visible, softcap, sink, dropout, scale)
    return y.transpose(1, 2)


def by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    softcap: float | None,
    sink: Tensor | None,
    scale: float | None,
) -> Tensor:
    """The same, q (B, H, T, D) and so on, skipping blocks that nobody sees, with no score in memory. 2412.05496."""
    every = None if visible is None else visible.expand(q.shape[0], -1, -1, -1)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i if every is None else every[b, 0, i, j]

    def bent(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return capped(score, softcap)

    batch = None if every is None else q.shape[0]
    mask = create_block_mask(seen, batch, None, q.shape[2], k.shape[2], device=q.device)
    how = {"block_mask": mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    how["score_mod"] = None if softcap is None else bent
    if sink is None:
        return flex_attention(q, k, v, **how)
    y, extra = flex_attention(q, k, v, **how, return_aux=AuxRequest(lse=True))
    # the sink is one more exponential in the sum
    return y * (extra.lse - precise(sink)[:, None]).sigmoid()[..., None].type_as(y)


class Exponential(torch.autograd.Function):
    """e^x as `dtype`, which is all that stays in memory for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        y = x.exp().to(dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return precise(grad) * precise(y), None


def by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    softcap: float | None,
    sink: Tensor | None,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """The same, q (B, H, T, D) and so on, with scores in memory: none that a whole block of queries does not see."""
    if visible is None:
        time, blocks = torch.arange(q.shape[2], device=q.device), []
        for start in range(0, q.shape[2], BLOCK):
            end = min(start + BLOCK, q.shape[2])
            seen = (time[:end] <= time[start:end, None])[None, None]
            parts = q[:, :, start:end], k[:, :, :end], v[:, :, :end]
            blocks.append(by_scores(*parts, seen, softcap, sink, dropout, scale))
        return torch.cat(blocks, dim=2)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    product = summed if q.shape[2] == 1 and torch.compiler.is_compiling() else torch.matmul
    scores = capped(precise(product(q * (q.shape[-1] ** -0.5 if scale is None else scale), k.mT)), softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    highest, total = scores.detach().amax(dim=-1, keepdim=True), 0.0
    if sink is not None:  # one more score, of nothing
        extra = precise(sink).view(-1, 1, 1)
        highest = highest.maximum(extra.detach())
        total = (extra - highest).exp()
    weights = Exponential.apply(scores - highest, v.dtype)
    total = total + precise(weights).sum(dim=-1, keepdim=True)
    y = product(F.dropout(weights, dropout), v)
    return (y / total).type_as(v)  # so the backward sums over features alone


def summed(row: Tensor, matrix: Tensor) -> Tensor:
    """(..., 1, N) x (..., N, M), which the compiler makes one loop of, without a call."""
    return (precise(row).mT * precise(matrix)).sum(dim=-2, keepdim=True)
