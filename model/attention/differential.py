"""Differential attention: what a second softmax sees too is taken away as noise. Ye et al., 2410.05258."""

from math import exp

import torch
from torch import Tensor, nn

from model.attention.softmax import SoftmaxAttention
from model.layers import fp32, rms


class DifferentialAttention(SoftmaxAttention):
    """Head h and head h + H/2 make a pair: (softmax of one - lambda x softmax of the other) x the values of both.

    Takes the knobs of SoftmaxAttention. Raises ValueError where kv_heads are odd, and for dropout: of
    which softmax, the paper does not say.
    """

    def __init__(self, dim: int, heads: int, context: int, layer: int, depth: int, **knobs):
        super().__init__(dim, heads, context, layer, depth, **knobs)
        if self.kv_heads % 2:
            raise ValueError(
                f"heads come in pairs: kv_heads must be even ({heads=} kv_heads={self.kv_heads}). fix: 2"
            )
        if self.dropout:
            given = f"dropout={self.dropout}, DifferentialAttention"
            raise ValueError(
                f"weights that are a difference have no dropout ({given}). fix: attention.dropout=0"
            )
        self.least = 0.8 - 0.6 * exp(-0.3 * layer)
        self.q1, self.k1, self.q2, self.k2 = (
            nn.Parameter(torch.empty(self.head_dim)) for _ in range(4)
        )

    def read(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        halves = [
            super(DifferentialAttention, self).read(x, q, k, w.repeat(1, 1, 2, 1), visible)
            for w in v.chunk(2, dim=2)
        ]
        seen, noise = torch.cat(halves, dim=-1).chunk(2, dim=2)  # (B, T, H/2, 2 D)
        q1, k1, q2, k2 = map(fp32, (self.q1, self.k1, self.q2, self.k2))
        share = ((q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.least).type_as(seen)
        return (1 - self.least) * rms(seen - share * noise, self.eps)

    def score_flops(self, context: int) -> float:
        return 1.5 * super().score_flops(context)  # values twice as wide

    def initial(self, name: str, generator: torch.Generator) -> Tensor:
        zero = super().initial(name, generator)
        return zero if name == "sink" else 0.1 * torch.randn(zero.shape, generator=generator)
