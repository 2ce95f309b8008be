"""Forgetting Transformer: a gate of each token lowers the scores of all keys before it.

Lin et al., 2503.02130: score(i, j) + log f_(j+1) + ... + log f_i, with forget gates f of each head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.base import CrossLayer, LayerSpec
from model.attention.kernels import ScoreBias
from model.attention.softmax import Features, Inputs, Seen, SoftmaxAttention
from model.cache import Shape
from model.layers import Linear, fp32


class ForgettingAttention(SoftmaxAttention):
    """Softmax attention with forget gates, f = sigmoid(forget_proj(x)), instead of positions.

    Takes the knobs of SoftmaxAttention. The cache holds the sum of log f of all tokens up to each.
    """

    def __init__(self, spec: LayerSpec, **knobs):
        super().__init__(spec, **knobs)
        self.forget_proj = Linear(spec.dim, self.heads, bias=True)

    def features(self, inputs: Inputs, k: Tensor, v: Tensor) -> tuple[Features, CrossLayer]:
        kv, carry = super().features(inputs, k, v)
        ctx = inputs.ctx
        gates = F.logsigmoid(fp32(self.forget_proj(inputs.x)))  # (B, T, H)
        gates = gates.masked_fill(ctx.positions[..., None] < 0, 0.0)
        total = gates.cumsum(dim=1)
        if inputs.cache is not None:
            # Go on from the newest cached token.
            stored = inputs.cache.buffers[2].squeeze(-1)  # (B, size, H)
            rows = torch.arange(len(stored), device=stored.device)
            newest = stored[rows, (ctx.cached_lengths - 1) % inputs.cache.size]
            is_first = ctx.cached_lengths[:, None] == 0
            total = total + newest.masked_fill(is_first, 0.0).type_as(total)[:, None]
        return (*kv, total.unsqueeze(-1)), carry

    def score_bias(self, seen: Seen) -> ScoreBias:
        """The sums of log f over the tokens after a key, up to the query."""
        query_total = seen.new[2].squeeze(-1)  # (B, T, H)
        key_total = seen.features[2].squeeze(-1)  # (B, S, H)
        return lambda row, head, query, key: (
            query_total[row, query, head] - key_total[row, key, head]
        )

    def cached_features(self) -> list[Shape]:
        return [*super().cached_features(), (self.heads, 1)]
