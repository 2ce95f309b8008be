"""Softmax attention: a reference implementation, equivalent kernels, and the choice of a kernel.

The kernels are blockwise attention, FlexAttention and torch's fused kernels.

Functions take q (B, H, T, E), k (B, K, S, E), v (B, K, S, F) and mask (B, 1, T, S), and return
(B, H, T, F); `AttentionKernel` takes and returns them with tokens before heads. H is a multiple of
K. True in the mask means visible; a mask that differs between heads is (B, H, T, S). mask=None
means plain causal attention with T = S, which needs no mask in memory.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from model.context import MaskRule, Visibility
from model.layers import apply_softcap, fp32

# (row, head, query, key) -> the score's bias; the arguments are index tensors that broadcast.
ScoreBias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK_SIZE = 128  # minimum number of queries in a block of `blockwise_attention`
FLEX_BLOCK_SIZE = 128  # number of queries and keys in a block of FlexAttention's block mask
MIN_FLEX_WIDTH = 16  # of heads; Inductor refuses narrower ones (kernel/flex/flex_attention.py)
# Compile time grows with the number of blocks, so compiled code uses larger blocks for long texts.
MAX_BLOCKS = 8
# The largest size of a head, in bytes, at which FlexAttention fits into the shared memory of any
# GPU since Ampere: a width of 128 in bf16, or 64 in fp32. A block takes 114,688 bytes at a width of
# 192 in bf16 (backward), and 134,144 at 128 in fp32 (forward); consumer GPUs have 101,376.
MAX_SMALL_HEAD = 256
MAX_FP32_WIDTH = 128  # a block takes 362,496 bytes at 136 in fp32, and an H100 has 232,448
LARGE_SHARED_MEMORY = 120_000  # bytes per block: A100 has 166,912
BIAS_COLUMNS = 8  # columns that `append_token_bias` adds; a multiple of 8 keeps rows aligned
BIAS_UNIT = 16.0  # scale of the parts of a bias, which keeps them within fp16's range
# Up to this many tokens, compiled `blockwise_attention` replaces the fused kernel on a CPU in bf16,
# because it is faster there (in fp32, it is not). For longer texts, the T^2 exponentials that it
# saves per head take too much memory, and with AMX, the fused kernel is faster (docs/speed.md).
MAX_COMPILED_TOKENS = 1024 if torch.cpu._is_amx_tile_supported() else 2048


class TokenBias(NamedTuple):
    """Biases in fp32: one per query and one per key, added to all scores of that query or key."""

    query: Tensor  # (B, H, T)
    key: Tensor  # (B, H, S)


class ScoreOptions(NamedTuple):
    """The steps from q . k to scores and from scores to weights, in order."""

    scale: float
    softcap: float | None = None  # bounds the scores
    bias: ScoreBias | None = None  # added to the scores
    token_bias: TokenBias | None = None  # added to the scores
    sink: Tensor | None = None  # (H,), the score of an additional key without a value
    dropout: float = 0.0  # dropout rate of the weights


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: ScoreOptions
) -> Tensor:
    """Compute attention by its definition; every other kernel must match the result.

    This is the reference implementation, for tests only.
    """
    weights = F.dropout(attention_weights(q, k, mask, options), options.dropout)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (B, H, S, F)
    return weights.type_as(v) @ v


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, options: ScoreOptions) -> Tensor:
    """Return the attention weights (B, H, T, S), before dropout, in fp32."""
    length = q.shape[2]
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, E)

    scores = fp32(q @ k.mT) * options.scale  # (B, H, T, S)
    scores = apply_softcap(scores, options.softcap)
    scores = add_bias(scores, options)
    scores = scores.masked_fill(~mask, -torch.inf)
    if options.sink is not None:
        column = fp32(options.sink).view(-1, 1, 1).expand(len(q), -1, length, 1)
        scores = torch.cat((scores, column), dim=-1)  # (B, H, T, S + 1)
    return scores.softmax(dim=-1)[..., : k.shape[2]]


def blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: ScoreOptions
) -> Tensor:
    """Compute causal attention in blocks of queries; a block skips the keys that come after it.

    With a mask, all queries form a single block.
    """
    if mask is not None:
        return attend_block(q, k, v, mask, options)
    length = q.shape[2]
    block_size = BLOCK_SIZE
    if torch.compiler.is_compiling():
        block_size = max(BLOCK_SIZE, math.ceil(length / MAX_BLOCKS))
    positions = torch.arange(length, device=q.device)
    blocks = []
    for start in range(0, length, block_size):
        end = min(start + block_size, length)
        mask = positions[:end] <= positions[start:end, None]
        blocks.append(
            attend_block(
                q[:, :, start:end], k[:, :, :end], v[:, :, :end], mask[None, None], options, start
            )
        )
    return torch.cat(blocks, dim=2)


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: ScoreOptions, first: int = 0
) -> Tensor:
    """Compute attention with an explicit softmax; except in fp16, it is normalized after the
    product with v.

    `first` is the index of the block's first query among all T queries, for the bias.
    The backward uses the saved exponentials, in the dtype of v, instead of fp32 scores.
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    matmul = torch.matmul
    if q.shape[2] == 1 and torch.compiler.is_compiling():
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
    """e^x in `dtype`; only this result is saved for the backward."""

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


def flex_attention_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    options: ScoreOptions,
    rule: MaskRule | None = None,
) -> Tensor:
    """Compute attention with FlexAttention, which skips blocks without a visible key. 2412.05496.

    Given the `rule` that the mask was computed from, the kernel evaluates the rule instead of
    reading the mask, so a model that is compiled as a whole stores no mask. It supports neither
    dropout nor a token bias combined with a soft-cap.
    """
    if options.token_bias is not None:
        # A `score_mod` that reads tensors with gradients would accumulate the gradients one score
        # at a time, in arbitrary order, which is slow and not deterministic.
        assert options.softcap is None
        q, k = append_token_bias(q, k, options)
        v = expand_heads(v, q)

    # A gradient through `lse`, which a sink needs, is wrong in torch 2.11 on an H200 unless the
    # length is a multiple of the block size, so queries and keys are padded (docs/gpu.md). The
    # padding comes last, so no token attends to it; the outputs of padding are discarded below.
    length = q.shape[2]
    padding = 0
    if options.sink is not None:
        assert k.shape[2] == length, (q.shape, k.shape)
        padding = -length % FLEX_BLOCK_SIZE
    if padding > 0:
        q, k, v = [F.pad(x, (0, 0, 0, padding)) for x in (q, k, v)]

    mask_shape = (1, 1) if mask is None else mask.shape[:2]  # rows and heads
    if mask is not None and rule is None:
        # Inductor stores the result of `as_strided`. Otherwise it would compute the mask inside the
        # attention kernel, from other tensors, and fail if the layout of one is not fixed yet.
        mask = mask.as_strided(mask.shape, mask.stride())
        # Let mask_mod index the mask by row and head. A literal index 0, for an axis of size 1,
        # would be copied to the GPU.
        mask = mask.expand(*q.shape[:2], -1, -1)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if mask is None:
            return j <= i
        tokens = [x.clamp(max=length - 1) if padding > 0 else x for x in (i, j)]
        is_visible = mask[b, h, *tokens] if rule is None else rule.at(b, *tokens)
        if padding > 0:  # no token attends to padding, which attends to everything
            is_visible = (is_visible & (j < length)) | (i >= length)
        return is_visible

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = apply_softcap(score, options.softcap)
        if options.bias is not None:
            if padding > 0:  # padding has no bias
                i = i.clamp(max=length - 1)
                j = j.clamp(max=length - 1)
            score = score + options.bias(b, h, i, j)
        return score

    block_mask = create_block_mask(
        mask_mod, *mask_shape, q.shape[2], k.shape[2], device=q.device, BLOCK_SIZE=FLEX_BLOCK_SIZE
    )
    # Below 128 queries, Inductor would choose its decoding kernel, whose blocks have at most 128
    # rows, one for each query in each of the query heads that share a key head.
    attend = partial(
        flex_attention,
        q,
        k,
        v,
        score_mod,
        block_mask,
        options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    if options.sink is None:
        return attend()
    y, aux = attend(return_aux=AuxRequest(lse=True))
    # The sink adds an exponential to the sum: y * sum / (sum + exp(sink)).
    y = y[:, :, :length]
    lse = aux.lse[:, :, :length]
    fraction = (lse - fp32(options.sink)[:, None]).sigmoid()  # (B, H, T)
    return y * fraction[..., None].type_as(y)


def fused_attention_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: ScoreOptions
) -> Tensor:
    """Compute attention with torch's fused kernels, which support no soft-cap, bias or sink."""
    width = v.shape[-1]
    if options.token_bias is not None:
        # FlashAttention needs values of the same width as queries and keys.
        q, k = append_token_bias(q, k, options)
        v = F.pad(expand_heads(v, q), (0, q.shape[-1] - width))
    elif q.shape[2] == 1 and mask is not None:
        # A decode step. The query heads of a key head become the rows of one matrix product.
        folded_q, folded_mask = fold_query_heads(q, k, mask)
        y = F.scaled_dot_product_attention(
            folded_q, k, v, folded_mask, options.dropout, scale=options.scale
        )
        return y.flatten(1, 2).unsqueeze(2)
    elif q.is_cuda and not can_flash_attention(q, mask, options.dropout):
        # Without FlashAttention, grouped heads would run in a kernel that stores all scores.
        k = expand_heads(k, q)
        v = expand_heads(v, q)
    y = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=options.dropout,
        is_causal=mask is None,
        scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y[..., :width]


def can_flash_attention(q: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether FlashAttention supports these queries: fp16 or bf16, no mask, Ampere or newer.

    On GPUs with little shared memory, its backward pass does not support some wide heads
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    gpu = torch.cuda.get_device_properties(q.device)
    width = q.shape[-1]
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    is_small = gpu.major == 12 or (gpu.major == 8 and gpu.minor >= 6)
    is_wide = 192 < width <= 224 or (width > 224 and dropout > 0)
    is_supported = width <= 256 and not (is_small and is_wide)
    return is_half and mask is None and gpu.major >= 8 and is_supported


def can_flex_attention(widths: list[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the GPU supports FlexAttention with queries and values of these widths.

    Wide heads need much shared memory.
    """
    gpu = torch.cuda.get_device_properties(device)
    if gpu.major < 8 or min(widths) < MIN_FLEX_WIDTH:
        return False
    if max(widths) * dtype.itemsize <= MAX_SMALL_HEAD:
        return True
    if dtype == torch.float32 and max(widths) > MAX_FP32_WIDTH:
        return False
    # torch for ROCm does not report the shared memory of a block.
    return getattr(gpu, "shared_memory_per_block_optin", 0) > LARGE_SHARED_MEMORY


def fold_query_heads(q: Tensor, k: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Treat the query heads of a key head as queries: q (B, H, 1, E) -> (B, K, H / K, E).

    A kernel can then read keys and values (B, K, S, E) in place, without a copy for each query
    head. The mask (B or 1, H or 1, 1, S) becomes (B or 1, K or 1, H / K or 1, S).
    """
    num_key_heads = k.shape[1]
    if mask.shape[1] > 1:
        mask = mask.unflatten(1, (num_key_heads, -1)).squeeze(3)
    return q.unflatten(1, (num_key_heads, -1)).squeeze(3), mask


def expand_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, K, S, E) -> (B, H, S, E), repeated for the heads of q (B, H, T, E)."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def append_token_bias(q: Tensor, k: Tensor, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    """Append columns to queries and keys, so that their products include the token bias.

    q (B, H, T, E), k (B, K, S, E) -> (B, H, T, E + 8), (B, H, S, E + 8). The new columns of q are
    the three parts of the query's bias, three copies of BIAS_UNIT and padding; the new columns of k
    are three copies of BIAS_UNIT, the three parts of the key's bias and padding.
    """
    # Without a sink, a query's bias does not change the softmax, so its exact gradient is 0. Its
    # computed gradient consists of rounding errors, which partly cancel those of the key's
    # gradient. Both biases are computed from the same gates, so this gradient makes the gradient of
    # the gates more accurate.
    unit_scale = 1 / (options.scale * BIAS_UNIT)
    query_parts = SplitInThree.apply(options.token_bias.query * unit_scale).type_as(q)
    key_parts = SplitInThree.apply(options.token_bias.key * unit_scale).type_as(k)
    query_units = torch.full_like(query_parts, BIAS_UNIT)
    key_units = torch.full_like(key_parts, BIAS_UNIT)
    padding = BIAS_COLUMNS - 2 * query_parts.shape[-1]
    q = torch.cat((q, F.pad(torch.cat((query_parts, query_units), -1), (0, padding))), -1)
    k = expand_heads(k, q)
    k = torch.cat((k, F.pad(torch.cat((key_units, key_parts), -1), (0, padding))), -1)
    return q, k


class SplitInThree(torch.autograd.Function):
    """x (...) in fp32 -> three numbers (..., 3) that sum to x and are each exact in bf16.

    Each has 8 of the 24 bits of x, so products in bf16, fp16 or TF32 that accumulate in fp32 keep
    all 24 bits.
    """

    # Mask the bits, because Inductor would simplify x.bfloat16().float() to x.
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rest = x.float()
        parts = []
        for _ in range(3):
            part = (rest.view(torch.int32) & -65536).view(torch.float32)
            parts.append(part)
            rest = rest - part
        return torch.stack(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad[..., 0]  # all parts have the same gradient


def add_bias(scores: Tensor, options: ScoreOptions, first: int = 0) -> Tensor:
    """Add the biases to scores (B, H, T, S); `first` is the index of the first query."""
    if options.token_bias is not None:
        query_bias = options.token_bias.query[:, :, first : first + scores.shape[2], None]
        key_bias = options.token_bias.key[:, :, None, : scores.shape[3]]
        scores = scores + (query_bias + key_bias)
    if options.bias is None:
        return scores
    row, head, query, key = [torch.arange(size, device=scores.device) for size in scores.shape]
    query = query + first
    bias = options.bias(row[:, None, None, None], head[:, None, None], query[:, None], key)
    return scores + bias


class AttentionKernel(nn.Module):
    """Softmax attention with the fastest kernel for the shapes and the device, eager or compiled.

    It has no parameters; it is a module so that a forward hook can see its arguments.
    """

    def __init__(self, softcap: float | None = None, dropout: float = 0.0):
        super().__init__()
        self.softcap = softcap
        self.dropout = dropout

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Visibility,
        *,
        sink: Tensor | None = None,
        score_bias: ScoreBias | None = None,
        token_bias: TokenBias | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """q (B, T, H, E), k (B, S, K, E), v (B, S, K, F) -> (B, T, H, F).

        `scale` is 1 / sqrt(E) unless given.
        """
        assert q.shape[2] % k.shape[2] == 0 and q.shape[3] == k.shape[3], (q.shape, k.shape)
        assert k.shape[:3] == v.shape[:3], (k.shape, v.shape)
        mask = visible.mask
        if mask is None:
            assert q.shape[1] == k.shape[1], (q.shape, k.shape)
        else:
            assert mask.shape[2:] == (q.shape[1], k.shape[1]), (mask.shape, q.shape, k.shape)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        length = q.shape[2]
        if scale is None:
            scale = q.shape[-1] ** -0.5
        # Read `training` only if there is dropout, because reading it makes evaluation recompile.
        dropout = self.dropout if self.dropout > 0 and self.training else 0.0
        options = ScoreOptions(scale, self.softcap, score_bias, token_bias, sink, dropout)
        is_compiling = torch.compiler.is_compiling()
        is_fusable = self.softcap is None and sink is None and score_bias is None
        if token_bias is not None:
            # Only a GPU folds the token bias into the products, and only for several queries: for a
            # single query, this would copy all keys. A CPU adds the bias to the scores, which is
            # exact in any dtype.
            is_fusable = is_fusable and q.is_cuda and length > 1

        # FlexAttention must be compiled, has no dropout, and is unused for plain causal attention.
        is_plain = is_fusable and mask is None
        can_flex = is_compiling and q.is_cuda and length == k.shape[2] and dropout == 0
        can_flex = can_flex and (token_bias is None or self.softcap is None)
        widths = [q.shape[-1], v.shape[-1]]
        if token_bias is not None:
            widths[0] += BIAS_COLUMNS
        if can_flex and not is_plain and can_flex_attention(widths, q.dtype, q.device):
            y = flex_attention_kernel(q, k, v, mask, options, visible.rule)
            return y.transpose(1, 2)

        # The fused kernel supports no soft-cap, bias or sink. If compiled, blockwise attention is
        # faster for a single query on a GPU, where it needs no matrix product, and for short causal
        # sequences in bf16 on a CPU. It also computes a single query on a CPU if keys and values
        # differ in width, because torch's fused CPU kernel does not support that.
        is_cpu = q.device.type == "cpu"
        if length == 1:
            prefers_blocks = not is_cpu or q.shape[-1] != v.shape[-1]
        else:
            is_short = mask is None and length <= MAX_COMPILED_TOKENS
            prefers_blocks = is_cpu and v.dtype == torch.bfloat16 and is_short
        prefers_blocks = prefers_blocks and is_compiling
        if is_fusable and not prefers_blocks:
            y = fused_attention_kernel(q, k, v, mask, options)
        else:
            y = blockwise_attention(q, k, v, mask, options)
        return y.transpose(1, 2)
