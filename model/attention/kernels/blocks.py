"""Attention in blocks of queries, written in torch's operations. It supports every case."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.kernels.definition import HAS_AMX, Case, add_bias, expand_heads
from model.layers import apply_softcap, fp32

BLOCK_SIZE = 128  # minimum number of queries in a block, except the last one
# Compile time grows with the number of blocks, so compiled code uses larger blocks for many tokens.
MAX_BLOCKS = 8
# Up to this many tokens, compiled blocks replace the fused kernel on a CPU in bf16, because they
# are faster there (in fp32, they are not). For longer sequences, the T^2 exponentials per head that
# they keep for the backward pass take too much memory, and with AMX, the fused kernel is faster
# (docs/dev/log.md).
MAX_COMPILED_TOKENS = 1024 if HAS_AMX else 2048


def supports(case: Case) -> bool:
    return True


def prefers(case: Case) -> bool:
    """Whether the case is compiled, and has one query or is a short sequence on a CPU in bf16.

    Here, a single query needs no matrix product. On a CPU, a single query uses this kernel only if
    keys and values differ in width, which torch's fused kernel for CPUs does not support. A short
    sequence must have a plain causal mask.
    """
    if not case.is_compiled:
        return False
    is_cpu = case.q.device.type == "cpu"
    length = case.q.shape[2]
    if length == 1:
        return not is_cpu or case.q.shape[-1] != case.v.shape[-1]
    is_short = case.mask is None and length <= MAX_COMPILED_TOKENS
    return is_cpu and case.v.dtype == torch.bfloat16 and is_short


def run(case: Case) -> Tensor:
    """Compute causal attention in blocks of queries; a block skips the keys that come after it.

    With a mask, all queries form a single block.
    """
    if case.mask is not None:
        return attend_block(case)
    length = case.q.shape[2]
    block_size = BLOCK_SIZE
    if case.is_compiled:
        block_size = max(BLOCK_SIZE, math.ceil(length / MAX_BLOCKS))
    positions = torch.arange(length, device=case.q.device)
    blocks = []
    for start in range(0, length, block_size):
        end = min(start + block_size, length)
        mask = positions[:end] <= positions[start:end, None]
        block = case._replace(
            q=case.q[:, :, start:end],
            k=case.k[:, :, :end],
            v=case.v[:, :, :end],
            mask=mask[None, None],
        )
        blocks.append(attend_block(block, start))
    return torch.cat(blocks, dim=2)


def attend_block(case: Case, first: int = 0) -> Tensor:
    """Compute attention with each step of the softmax in a separate operation.

    The exponentials are multiplied by v, and the product is divided by their sum. In fp16, this
    product may overflow, so the exponentials are divided first. The backward pass uses the saved
    exponentials, in the dtype of v, instead of fp32 scores. `first` is the index of the block's
    first query among all T queries.
    """
    q, k, v, mask, options, *_ = case
    k = expand_heads(k, q)
    v = expand_heads(v, q)
    matmul = torch.matmul
    if q.shape[2] == 1 and case.is_compiled:
        matmul = vector_matmul

    scores = fp32(matmul(q * options.scale, k.mT))
    scores = apply_softcap(scores, options.softcap)
    scores = add_bias(scores, options, first)
    scores = scores.masked_fill(~mask, -torch.inf)

    # Subtract the largest score, so that no exponential overflows.
    highest = scores.detach().amax(dim=-1, keepdim=True)
    total = 0.0
    if options.sink is not None:
        sink = fp32(options.sink).view(-1, 1, 1)
        highest = highest.maximum(sink.detach())
        total = (sink - highest).exp()
    weights = Exponential.apply(scores - highest, v.dtype)
    total = total + fp32(weights).sum(dim=-1, keepdim=True)
    if v.dtype == torch.float16:
        # The product of unnormalized weights and values may exceed the range of fp16.
        weights = (weights / total).type_as(v)
        return matmul(F.dropout(weights, options.dropout), v).type_as(v)
    y = matmul(F.dropout(weights, options.dropout), v)
    return (y / total).type_as(v)


class Exponential(torch.autograd.Function):
    """e^x in `dtype`; only this result is saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        y = x.exp().to(dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return fp32(grad) * fp32(y), None


def vector_matmul(vector: Tensor, matrix: Tensor) -> Tensor:
    """(..., 1, N) x (..., N, M) -> (..., 1, M), in fp32; compiled to a loop, not a library call."""
    return (fp32(vector).mT * fp32(matrix)).sum(dim=-2, keepdim=True)
