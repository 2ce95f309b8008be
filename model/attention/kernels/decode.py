"""Attention of a decode step on a CPU, in C++ (inference/matvec.cpp).

It reads keys and values once, in memory order, for all query heads that share them.
"""

import torch
from torch import Tensor

from model.attention.kernels.definition import HAS_AMX, HAS_AVX512, Case, is_plain_softmax

MIN_SHARED_SIZE = 200_000  # elements in the keys of all rows


def supports(case: Case) -> bool:
    """Whether each row has one query on a CPU, with a mask and a plain softmax in fp32 or bf16.

    Gradients and dropout are not supported. inference/quantize.py must have loaded the C++ code.
    """
    q, k, v, mask, options, *_ = case
    # The code has no backward pass.
    if torch.is_grad_enabled() or not hasattr(torch.ops.attend, "decode_attention"):
        return False
    is_single_on_cpu = q.device.type == "cpu" and q.shape[2] == 1 and mask is not None
    is_softmax = is_plain_softmax(options) and options.dropout == 0
    has_dtype = q.dtype in (torch.float32, torch.bfloat16) and q.dtype == k.dtype == v.dtype
    return is_single_on_cpu and is_softmax and has_dtype


def prefers(case: Case) -> bool:
    """Whether this kernel takes less time than torch's fused kernel (docs/dev/log.md).

    The fused kernel is faster in bf16 with AMX. With AVX-512, it is also faster if all query heads
    share one key head, as in MLA, and there are many keys.
    """
    if HAS_AMX and case.q.dtype == torch.bfloat16:
        return False
    key_heads = case.k.shape[1]
    is_shared = key_heads == 1 and case.k.numel() >= MIN_SHARED_SIZE
    return not (HAS_AVX512 and is_shared)


def run(case: Case) -> Tensor:
    q, k, v, mask, options, *_ = case
    mask = mask.squeeze(2).expand(*q.shape[:2], -1)  # (B, H, S)
    y = torch.ops.attend.decode_attention(
        q.squeeze(2), k.transpose(1, 2), v.transpose(1, 2), mask, options.scale
    )
    return y.unsqueeze(2)
