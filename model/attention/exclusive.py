"""Exclusive self-attention: an output without its component along the token's own value.

2603.09078.
"""

import torch.nn.functional as F
from torch import Tensor

from model.attention.base import CrossLayer
from model.attention.softmax import Inputs, Seen, SoftmaxAttention
from model.layers import fp32


class ExclusiveAttention(SoftmaxAttention):
    """Softmax attention whose output is orthogonal to the token's own value in every head.

    Takes the knobs of SoftmaxAttention.
    """

    def attend(self, inputs: Inputs, q: Tensor, seen: Seen) -> tuple[Tensor, CrossLayer]:
        """q (B, T, H, E) -> (B, T, H, E), carry"""
        y, carry = super().attend(inputs, q, seen)
        own_v = own_feature(inputs, seen, 1)  # (B, T, K, E)
        direction = F.normalize(fp32(own_v), dim=-1).type_as(y)
        direction = direction.repeat_interleave(self.heads // self.kv_heads, dim=2)
        return y - (y * direction).sum(dim=-1, keepdim=True) * direction, carry


def own_feature(inputs: Inputs, seen: Seen, index: int) -> Tensor:
    """The new tokens' feature of this index, as the cache has stored it, which may be in int8."""
    cache = inputs.cache
    stored = seen.features[index]
    if cache is None or stored.shape[1] != cache.size:
        return seen.new[index]
    slots = inputs.ctx.cache_slots(cache.size)
    return stored.take_along_dim(slots[..., None, None], dim=1)
