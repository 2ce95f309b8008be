"""Exclusive self-attention: removes the output's component along the token's own value.

2603.09078.
"""

import torch.nn.functional as F
from torch import Tensor

from model.attention.base import CrossLayer
from model.attention.softmax import SoftmaxAttention
from model.cache import LayerCache
from model.context import ForwardContext
from model.layers import fp32


class ExclusiveAttention(SoftmaxAttention):
    """Softmax attention whose output is orthogonal to the token's own value in every head.

    Takes SoftmaxAttention's knobs.
    """

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, carry: CrossLayer
    ) -> tuple[Tensor, CrossLayer]:
        """x (B, T, D) -> (B, T, D)"""
        q, k, v = self.project_qkv(x, ctx)
        kv, visible = self.extend_cache(cache, ctx, k=k, v=v)
        y = self.attend(q, kv["k"], kv["v"], visible)

        # Subtract the component along the token's own value, as stored in the cache.
        own_v = self.own_feature(cache, ctx, new=v, in_reach=kv["v"])  # (B, T, K, E)
        direction = F.normalize(fp32(own_v), dim=-1).type_as(y)
        direction = direction.repeat_interleave(self.heads // self.kv_heads, dim=2)
        y = y - (y * direction).sum(dim=-1, keepdim=True) * direction
        return self.project_out(y, x), carry
