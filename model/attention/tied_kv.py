"""Keys and values from one projection, which the cache holds once: the full layers of Gemma 4."""

from torch import Tensor

from model.attention.base import CrossLayer, LayerSpec
from model.attention.softmax import Features, Inputs, Seen, SoftmaxAttention
from model.cache import Shape
from model.layers import rms


class TiedAttention(SoftmaxAttention):
    """Keys are the projection, normalized and rotated; values are the projection / its rms.

    Takes the knobs of SoftmaxAttention. Norm and RoPE are applied on reading, so that the cache has
    half the bytes.
    """

    def __init__(self, spec: LayerSpec, **knobs):
        super().__init__(spec, **knobs)
        self.v_proj = None

    def features(self, inputs: Inputs, k: Tensor, v: Tensor) -> tuple[Features, CrossLayer]:
        return (k,), inputs.carry

    def attend(self, inputs: Inputs, q: Tensor, seen: Seen) -> tuple[Tensor, CrossLayer]:
        """q (B, T, H, E) -> (B, T, H, E), carry"""
        (kv,) = seen.features
        positions = seen.visible.key_positions
        if positions is inputs.ctx.positions:
            positions = None  # those of new tokens, whose tables the queries have
        k = self.norm_and_rope(kv, self.k_norm, inputs.ctx, positions)
        v = rms(kv, self.norm_eps)
        return super().attend(inputs, q, seen._replace(features=(k, v)))

    def cached_features(self) -> list[Shape]:
        return [(self.kv_heads, self.head_dim)]
