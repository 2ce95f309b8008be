"""Differential attention: what a second softmax sees too is taken away as noise. Ye et al., 2410.05258."""

from math import exp

import torch
from torch import Tensor, nn

from model.attention.softmax import SoftmaxAttention
from model.layers import rms


class DifferentialAttention(SoftmaxAttention):
    """Head h and head h + H/2 make a pair: (softmax of one - lambda x softmax of the other) x the values of both.

    Takes the knobs of SoftmaxAttention. Raises ValueError where heads or kv_heads are odd.
    """

    def __init__(self, dim: int, heads: int, context: int, layer: int, depth: int, **knobs):
        super().__init__(dim, heads, context, layer, depth, **knobs)
        if self.kv_heads % 2:
            given = f"{heads=} kv_heads={self.kv_heads}"
            raise ValueError(
                f"differential attention pairs its heads: kv_heads must be even ({given}). fix: change one"
            )
        self.least = 0.8 - 0.6 * exp(-0.3 * layer)
        self.pairs = nn.Parameter(torch.empty(4, self.head_dim))  # q1, k1, q2, k2

    def read(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        halves = [
            super(DifferentialAttention, self).read(q, k, x.repeat(1, 1, 2, 1), visible) for x in v.chunk(2, dim=2)
        ]
        seen, noise = torch.cat(halves, dim=-1).chunk(2, dim=2)  # (B, T, H/2, 2 D)
        q1, k1, q2, k2 = self.pairs.double()
        share = ((q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.least).type_as(seen)
        return (1 - self.least) * rms(seen - share * noise)

    def initial(self, name: str) -> Tensor:
        if name != "pairs":
            return super().initial(name)
        return 0.1 * torch.randn(4, self.head_dim, generator=torch.Generator().manual_seed(0))
