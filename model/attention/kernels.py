"""Attention kernels: (q, k, v, mask) -> (B, T, H, D)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from model.layers import apply_softcap, fp32

BLOCK, DENSE = 128, 1024  # queries of a block; tokens up to which scores may lie in memory


watched: list[Tensor] | None = None


@contextmanager
def watching() -> Iterator[list[Tensor]]:
    """Inside, every `attend` adds its weights (B, H, T, S) to the list."""
    global watched
    watched = []
    try:
        yield watched
    finally:
        watched = None


def attention(
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
        watched.append(eager_attention(q, k, each, visible, softcap, sink, 0.0, scale))
    compiled, plain = torch.compiler.is_compiling(), softcap is None and sink is None
    if (
        compiled
        and q.is_cuda
        and q.shape[2] == k.shape[2]
        and not (plain and visible is None)
        and dropout == 0
    ):
        return flex(q, k, v, visible, softcap, sink, scale).transpose(1, 2)
    dense = (
        compiled
        and q.device.type == "cpu"
        and (q.shape[2] == 1 or (visible is None and q.shape[2] <= DENSE))
    )
    if plain and not dense:
        causal, gqa = visible is None, q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(
            q, k, v, visible, dropout, causal, scale=scale, enable_gqa=gqa
        )
    else:
        y = eager_attention(q, k, v, visible, softcap, sink, dropout, scale)
    return y.transpose(1, 2)


def flex(
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
        return apply_softcap(score, softcap)

    batch = None if every is None else q.shape[0]
    mask = create_block_mask(seen, batch, None, q.shape[2], k.shape[2], device=q.device)
    how = {"block_mask": mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    how["score_mod"] = None if softcap is None else bent
    if sink is None:
        return flex_attention(q, k, v, **how)
    y, extra = flex_attention(q, k, v, **how, return_aux=AuxRequest(lse=True))
    # the sink is one more exponential in the sum
    return y * (extra.lse - fp32(sink)[:, None]).sigmoid()[..., None].type_as(y)


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
        return fp32(grad) * fp32(y), None


def eager_attention(
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
            blocks.append(eager_attention(*parts, seen, softcap, sink, dropout, scale))
        return torch.cat(blocks, dim=2)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    product = vector_matmul if q.shape[2] == 1 and torch.compiler.is_compiling() else torch.matmul
    scores = apply_softcap(
        fp32(product(q * (q.shape[-1] ** -0.5 if scale is None else scale), k.mT)), softcap
    )
    scores = scores.masked_fill(~visible, -torch.inf)
    highest, total = scores.detach().amax(dim=-1, keepdim=True), 0.0
    if sink is not None:  # one more score, of nothing
        extra = fp32(sink).view(-1, 1, 1)
        highest = highest.maximum(extra.detach())
        total = (extra - highest).exp()
    weights = Exponential.apply(scores - highest, v.dtype)
    total = total + fp32(weights).sum(dim=-1, keepdim=True)
    y = product(F.dropout(weights, dropout), v)
    return (y / total).type_as(v)  # so the backward sums over features alone


def vector_matmul(row: Tensor, matrix: Tensor) -> Tensor:
    """(..., 1, N) x (..., N, M), which the compiler makes one loop of, without a call."""
    return (fp32(row).mT * fp32(matrix)).sum(dim=-2, keepdim=True)
