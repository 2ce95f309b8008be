"""A token bias as additional features of queries and keys, for kernels that add no bias."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.kernels.definition import ScoreOptions, expand_heads

BIAS_COLUMNS = 8  # features that `append_token_bias` adds; a multiple of 8 keeps rows aligned
BIAS_UNIT = 16.0  # scale of the parts of a bias, which keeps them within fp16's range


def append_token_bias(q: Tensor, k: Tensor, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    """Append columns to queries and keys, so that their products include the token bias.

    q (B, H, T, E), k (B, K, S, E) -> (B, H, T, E + 8), (B, H, S, E + 8). The new columns of q are
    the three parts of the query's bias, three copies of BIAS_UNIT and padding; the new columns of k
    are three copies of BIAS_UNIT, the three parts of the key's bias and padding.
    """
    # Without a sink, a query's bias does not change the softmax, so its exact gradient is 0. Its
    # computed gradient consists of rounding errors, which partly cancel the rounding errors in the
    # gradient of the key's bias. Both biases are computed from the same gates, so this gradient
    # makes the gradient of the gates more accurate.
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

    Each has 8 of the 24 bits of x, so products in bf16 or TF32 that accumulate in fp32 keep all 24
    bits. fp16 loses the last bits of small numbers.
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
