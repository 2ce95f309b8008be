"""FlexAttention: compiled attention on a GPU, with functions for mask and scores. 2412.05496."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from model.attention.kernels import fused
from model.attention.kernels.definition import Case, expand_heads
from model.attention.kernels.token_bias import BIAS_COLUMNS, append_token_bias
from model.layers import apply_softcap, fp32

BLOCK_SIZE = 128  # number of queries and keys in a block of the block mask
MIN_WIDTH = 16  # of heads; Inductor refuses narrower ones (kernel/flex/flex_attention.py)
# Heads of up to this many bytes per token fit into the shared memory of every GPU from Ampere on: a
# width of 128 in bf16, or 64 in fp32. A block takes 114,688 bytes at a width of 192 in bf16
# (backward), and 134,144 at 128 in fp32 (forward); consumer GPUs have 101,376.
MAX_HEAD_BYTES_ANY_GPU = 256
MAX_FP32_WIDTH = 128  # a block takes 362,496 bytes at 136 in fp32, and an H100 has 232,448
LARGE_SHARED_MEMORY = 120_000  # bytes per block, more than consumer GPUs have; an A100 has 166,912


def supports(case: Case) -> bool:
    """Whether this is compiled code on a GPU, with T = S, no dropout, and supported head widths.

    A token bias cannot be combined with a soft-cap.
    """
    has_cache = case.q.shape[2] != case.k.shape[2]
    if not case.is_compiled or not case.q.is_cuda or has_cache or case.options.dropout > 0:
        return False
    widths = [case.q.shape[-1], case.v.shape[-1]]
    if case.options.token_bias is not None:
        widths[0] += BIAS_COLUMNS
        if case.options.softcap is not None:
            return False
    return fits_gpu(widths, case.q.dtype, case.q.device)


def prefers(case: Case) -> bool:
    """Whether there is a mask, or the case is not supported by `fused`, which is faster."""
    return case.mask is not None or not fused.supports(case)


def run(case: Case) -> Tensor:
    """Compute attention with FlexAttention, which skips blocks without a visible key.

    Given the `rule` that the mask was computed from, the kernel evaluates the rule instead of
    reading the mask, so a model that is compiled as a whole stores no mask.
    """
    q, k, v, mask, options, rule, _ = case
    if options.token_bias is not None:
        # A `score_mod` that reads tensors with gradients would accumulate the gradients one score
        # at a time, in arbitrary order, which is slow and not deterministic.
        assert options.softcap is None
        q, k = append_token_bias(q, k, options)
        v = expand_heads(v, q)

    # A gradient through the log-sum-exp, which a sink needs, was wrong in torch 2.11 on an H200 if
    # the block size did not divide the length, so q, k and v are padded (docs/dev/gpu.md). The
    # padding comes last, so no token attends to it; the outputs of padding are discarded below.
    length = q.shape[2]
    padding = 0
    if options.sink is not None:
        assert k.shape[2] == length, (q.shape, k.shape)
        padding = -length % BLOCK_SIZE
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
        is_visible = mask[b, h, *tokens] if rule is None else rule.is_visible_at(b, *tokens)
        if padding > 0:  # no token attends to padding, which attends to everything
            is_visible = (is_visible & (j < length)) | (i >= length)
        return is_visible

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = apply_softcap(score, options.softcap)
        if options.bias is not None:
            if padding > 0:  # the bias is not defined for padding
                i = i.clamp(max=length - 1)
                j = j.clamp(max=length - 1)
            score = score + options.bias(b, h, i, j)
        return score

    block_mask = create_block_mask(
        mask_mod, *mask_shape, q.shape[2], k.shape[2], device=q.device, BLOCK_SIZE=BLOCK_SIZE
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


def fits_gpu(widths: list[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the GPU supports FlexAttention with queries and values of these widths.

    Wide heads need a lot of shared memory.
    """
    gpu = torch.cuda.get_device_properties(device)
    if gpu.major < 8 or min(widths) < MIN_WIDTH:
        return False
    if max(widths) * dtype.itemsize <= MAX_HEAD_BYTES_ANY_GPU:
        return True
    if dtype == torch.float32 and max(widths) > MAX_FP32_WIDTH:
        return False
    # torch for ROCm does not report the shared memory of a block.
    return getattr(gpu, "shared_memory_per_block_optin", 0) > LARGE_SHARED_MEMORY
