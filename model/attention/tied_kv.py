"""Keys and values from one projection, cached once, as in Gemma 4's full-attention layers."""

from torch import Tensor

from model.attention.base import LayerSpec, Shared
from model.attention.softmax import SoftmaxAttention
from model.cache import LayerCache, Shape
from model.context import ForwardContext
from model.layers import rms, split_heads


class TiedAttention(SoftmaxAttention):
    """Keys are the normalized, rotated projection; values are the projection divided by its RMS.

    Takes SoftmaxAttention's options. The cache stores only the projection, which halves the cache;
    norm and RoPE are applied when the projection is read.
    """

    def __init__(self, spec: LayerSpec, **options):
        super().__init__(spec, **options)
        self.v_proj = None

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        q = self.project_q(x, ctx)
        kv = split_heads(self.k_proj(x), self.kv_heads)
        features, mask = self.extend_cache(cache, ctx, kv=kv)

        # Keys and values of all S tokens, cached and new, (B, S, K, E).
        kv = features["kv"]
        k = self.norm_and_rope(kv, self.k_norm, ctx, mask.key_positions)
        v = rms(kv, self.norm_eps)

        y = self.attend(q, k, v, mask)
        return self.project_out(y, x), shared

    def cache_shapes(self) -> dict[str, Shape]:
        return {"kv": (self.kv_heads, self.head_dim)}
