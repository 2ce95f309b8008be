"""torch's fused attention, F.scaled_dot_product_attention.

On a GPU, torch chooses FlashAttention, cuDNN or its memory-efficient kernel; for a CPU, it has one
kernel. They store no scores. Cases that they do not support, such as dropout on a CPU, run in
separate operations, which store all scores. Soft-caps, sinks and score biases are not supported.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.kernels.definition import Case, expand_heads, is_plain_softmax
from model.attention.kernels.token_bias import append_token_bias


def supports(case: Case) -> bool:
    """Whether this is a plain softmax; on a GPU, several queries may have a token bias.

    On a GPU, the token bias becomes part of the products, except with a single query, because this
    would copy all keys. Otherwise, `blocks` adds it to the scores, which is exact in any dtype.
    """
    options = case.options
    if case.q.is_cuda and case.q.shape[2] > 1:
        options = options._replace(token_bias=None)
    return is_plain_softmax(options)


def prefers(case: Case) -> bool:
    return True


def run(case: Case) -> Tensor:
    q, k, v, mask, options, *_ = case
    width = v.shape[-1]
    if options.token_bias is not None:
        # FlashAttention needs values of the same width as queries and keys.
        q, k = append_token_bias(q, k, options)
        v = F.pad(expand_heads(v, q), (0, q.shape[-1] - width))
    elif q.shape[2] == 1 and mask is not None:
        # A decode step. Query heads that share a key head become the rows of one matrix product.
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

    Heads may be at most 256 wide. On GPUs with little shared memory, the backward pass does not
    support some wide heads (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    gpu = torch.cuda.get_device_properties(q.device)
    width = q.shape[-1]
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    is_small = gpu.major == 12 or (gpu.major == 8 and gpu.minor >= 6)
    is_wide = 192 < width <= 224 or (width > 224 and dropout > 0)
    is_supported = width <= 256 and not (is_small and is_wide)
    return is_half and mask is None and gpu.major >= 8 and is_supported


def fold_query_heads(q: Tensor, k: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Treat query heads that share a key head as queries: q (B, H, 1, E) -> (B, K, H / K, E).

    A kernel can then read keys and values (B, K, S, E) in place, without a copy for each query
    head. The mask (B or 1, H or 1, 1, S) becomes (B or 1, K or 1, H / K or 1, S).
    """
    num_key_heads = k.shape[1]
    if mask.shape[1] > 1:
        mask = mask.unflatten(1, (num_key_heads, -1)).squeeze(3)
    return q.unflatten(1, (num_key_heads, -1)).squeeze(3), mask
