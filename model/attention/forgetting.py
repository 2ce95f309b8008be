"""Forgetting Transformer: each token's gate lowers the scores of all earlier keys.

Lin et al., 2503.02130: score(i, j) + log f_(j+1) + ... + log f_i, with forget gates f per head.
"""

import torch.nn.functional as F
from torch import Tensor

from model.attention.base import LayerSpec, Shared
from model.attention.kernels.definition import TokenBias
from model.attention.softmax import SoftmaxAttention
from model.cache import LayerCache, Shape
from model.context import ForwardContext
from model.layers import Linear, fp32


class ForgettingAttention(SoftmaxAttention):
    """Softmax attention with forget gates, f = sigmoid(forget_proj(x)).

    Takes SoftmaxAttention's options. The cache also holds the running sum of log f.
    """

    def __init__(self, spec: LayerSpec, **options):
        super().__init__(spec, **options)
        self.forget_proj = Linear(spec.dim, self.heads, bias=True)

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        q, k, v = self.project_qkv(x, ctx)

        # log f_1 + ... + log f_t per head, continued from the newest cached token.
        log_f = F.logsigmoid(fp32(self.forget_proj(x)))[..., None]  # (B, T, H, 1)
        log_f = log_f.masked_fill(ctx.positions[..., None, None] < 0, 0.0)
        sum_log_f = log_f.cumsum(dim=1)
        if cache is not None:
            sum_log_f = sum_log_f + cache.last_stored("sum_log_f", ctx).type_as(sum_log_f)
        kv, mask = self.extend_cache(cache, ctx, k=k, v=v, sum_log_f=sum_log_f)

        # log f_(j+1) + ... + log f_i: the difference of the sums at the query and at the key.
        query_sum = sum_log_f.squeeze(-1).transpose(1, 2)  # (B, H, T)
        key_sum = kv["sum_log_f"].squeeze(-1).transpose(1, 2)  # (B, H, S)
        decay = TokenBias(query_sum, -key_sum)
        y = self.kernel(q, kv["k"], kv["v"], mask, sink=self.sink, token_bias=decay)
        return self.project_out(y, x), shared

    def cache_shapes(self) -> dict[str, Shape]:
        return super().cache_shapes() | {"sum_log_f": (self.heads, 1)}
