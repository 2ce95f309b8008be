"""Exclusive self-attention removes the output's component along the token's own value.

2603.09078.
"""

import torch.nn.functional as F
from torch import Tensor

from model.attention.base import Shared
from model.attention.softmax import SoftmaxAttention
from model.cache import LayerCache
from model.context import ForwardContext
from model.layers import fp32


class ExclusiveAttention(SoftmaxAttention):
    """Softmax attention whose output is orthogonal to the token's own value in every head.

    Takes SoftmaxAttention's options.
    """

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        q, k, v = self.project_qkv(x, ctx)
        kv, mask = self.extend_cache(cache, ctx, k=k, v=v)
        y = self.attend(q, kv["k"], kv["v"], mask)

        # Subtract the component along the value that attention used for the token itself.
        own_v = self.own_feature(cache, ctx, new=v, extended=kv["v"])  # (B, T, K, E)
        direction = F.normalize(fp32(own_v), dim=-1).type_as(y)
        direction = direction.repeat_interleave(self.heads // self.kv_heads, dim=2)
        y = y - (y * direction).sum(dim=-1, keepdim=True) * direction
        return self.project_out(y, x), shared
