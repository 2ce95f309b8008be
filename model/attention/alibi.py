"""Attention with linear biases: scores fall linearly with distance, with a slope per head.

Press et al., 2108.12409. The biases are the only position information, so a model can be used
beyond its training context.
"""

import math

import torch
from torch import Tensor

from model.attention.base import CrossLayer, LayerSpec
from model.attention.softmax import SoftmaxAttention
from model.cache import LayerCache
from model.context import ForwardContext, Visibility, at_tokens


class ALiBi(SoftmaxAttention):
    """Softmax attention with -slope x distance added to its scores.

    Takes SoftmaxAttention's knobs; the paper uses no RoPE with the biases.
    """

    def __init__(self, spec: LayerSpec, **knobs):
        super().__init__(spec, **knobs)
        self.register_buffer("slopes", alibi_slopes(spec.heads), persistent=False)  # (H,)

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, carry: CrossLayer
    ) -> tuple[Tensor, CrossLayer]:
        """x (B, T, D) -> (B, T, D)"""
        q, k, v = self.project_qkv(x, ctx)
        kv, visible = self.extend_cache(cache, ctx, k=k, v=v)

        def bias(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return -self.slopes[head] * distance(visible, row, query, key)

        y = self.attend(q, kv["k"], kv["v"], visible, bias)
        return self.project_out(y, x), carry


def distance(visible: Visibility, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the query's position minus the key's, given the index of each within the row."""
    query_position = at_tokens(visible.query_positions, row, query)
    return query_position - at_tokens(visible.key_positions, row, key)


def alibi_slopes(heads: int) -> Tensor:
    """Return slopes (H,): a geometric sequence from 2^(-8 / H) to 2^-8.

    If H is not a power of two, use the slopes for P heads, where P is the largest power of two
    below H, followed by every second slope for 2 P heads.
    """
    power = 2 ** int(math.log2(heads))
    exponents = torch.arange(1, power + 1) * (-8 / power)
    between = torch.arange(1, 2 * power, 2) * (-4 / power)
    exponents = torch.cat((exponents, between[: heads - power]))
    return exponents.exp2()
