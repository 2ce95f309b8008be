"""Attention with linear biases: scores fall linearly with distance, with a slope per head.

Press et al., 2108.12409. In the paper, the biases are the only position information, so that a
model can be used beyond its training context.
"""

import math

import torch
from torch import Tensor

from model.attention.base import LayerSpec, Shared
from model.attention.softmax import SoftmaxAttention
from model.cache import LayerCache
from model.context import AttentionMask, ForwardContext, positions_at


class ALiBi(SoftmaxAttention):
    """Softmax attention with -slope x distance added to its scores.

    Takes SoftmaxAttention's options; the paper uses no RoPE.
    """

    def __init__(self, spec: LayerSpec, **options):
        super().__init__(spec, **options)
        self.register_buffer("slopes", alibi_slopes(spec.heads), persistent=False)  # (H,)

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        q, k, v = self.project_qkv(x, ctx)
        kv, mask = self.extend_cache(cache, ctx, k=k, v=v)

        def bias(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return -self.slopes[head] * distance(mask, row, query, key)

        y = self.attend(q, kv["k"], kv["v"], mask, bias)
        return self.project_out(y, x), shared


def distance(mask: AttentionMask, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the query's position minus the key's, given the index of each within the row."""
    query_position = positions_at(mask.query_positions, row, query)
    return query_position - positions_at(mask.key_positions, row, key)


def alibi_slopes(heads: int) -> Tensor:
    """Return slopes (H,): a geometric sequence from 2^(-8 / H) to 2^-8.

    If H is not a power of two, these are the slopes for P heads, where P is the largest power of
    two below H, followed by the first, third, fifth and so on of the slopes for 2 P heads.
    """
    power = 2 ** int(math.log2(heads))
    exponents = torch.arange(1, power + 1) * (-8 / power)
    between = torch.arange(1, 2 * power, 2) * (-4 / power)
    exponents = torch.cat((exponents, between[: heads - power]))
    return exponents.exp2()
