"""The contract of an attention variant, and the one kernel call they share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import LayerCache
from model.positions import Positions

Handed = dict[str, tuple[Tensor | None, ...]]  # what earlier layers of this forward hand to later ones


class Attention(nn.Module):
    """Maps (B, T, D) to (B, T, D); every token sees itself and its past.

    It is constructed with what its layer knows, then its own knobs:
    (dim, heads, context, layer, depth, *, ...). Projections, positions, mask and what to remember are its own affair.
    """

    def forward(
        self, x: Tensor, positions: Positions, cache: LayerCache | None, handed: Handed
    ) -> tuple[Tensor, Handed]:
        """A variant that takes from or gives to other layers overrides this; all others only `mix`."""
        return self.mix(x, positions, cache), handed

    def mix(self, x: Tensor, positions: Positions, cache: LayerCache | None) -> Tensor:
        raise NotImplementedError

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str) -> LayerCache:
        raise NotImplementedError

    def cache_bytes(self, capacity: int, itemsize: int) -> int:
        """What a row of the cache costs, by arithmetic alone."""
        raise NotImplementedError

    def score_flops(self, context: int) -> float:
        """Floating-point operations of one token's forward outside the weights, averaged over a full context."""
        raise NotImplementedError

    def initial(self, name: str) -> Tensor:
        """The first value of a parameter that belongs to no torch module."""
        raise NotImplementedError


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """q (B, T, H, D), k (B, S, K, D), v (B, S, K, E), visible (B, 1, T, S) -> (B, T, H, E).

    H is a multiple of K. visible=None is plain causal, T = S: no mask exists, the fused kernel knows.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, visible, is_causal=visible is None, enable_gqa=gqa)
    return y.transpose(1, 2)
