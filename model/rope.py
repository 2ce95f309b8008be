"""RoPE frequency scalings, which extend the context beyond the length used in training.

A scaling is called with the frequencies (R/2,) of R = `dim` rotated features, and with RoPE's base.
It returns new frequencies and a factor for cos and sin. `context` is the original training context,
in tokens. Scalings are compared by value, so layers with equal scalings can share cos and sin.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from run.ranges import NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Base class of the scalings, which make the context `factor` times as long."""

    factor: PositiveFloat

    def interpolate(self, frequency: Tensor, unscaled: Tensor) -> Tensor:
        """Divide frequencies by `factor` where `unscaled` (R/2,) is 0; keep them where it is 1.

        In between, blend the two.
        """
        return frequency * (unscaled + (1 - unscaled) / self.factor)


@dataclass(frozen=True, kw_only=True)
class LinearScaling(Scaling):
    """Divide every position by `factor`. Chen et al., 2306.15595."""

    def __call__(self, frequency: Tensor, dim: int, base: float) -> tuple[Tensor, float]:
        return frequency / self.factor, 1.0


@dataclass(frozen=True, kw_only=True)
class Llama3(Scaling):
    """Divide low frequencies by `factor`, and keep high ones. Llama 3, 2407.21783.

    Frequencies are low with fewer than `low` rotations in the context, and high with more than
    `high`. In between, the scaling fades linearly with the number of rotations.
    """

    low: NonNegativeFloat
    high: NonNegativeFloat
    context: PositiveInt

    def __call__(self, frequency: Tensor, dim: int, base: float) -> tuple[Tensor, float]:
        rotations = self.context * frequency / (2 * math.pi)
        width = self.high - self.low
        unscaled = ((rotations - self.low) / width).clamp(0, 1)
        return self.interpolate(frequency, unscaled), 1.0


@dataclass(frozen=True, kw_only=True)
class YaRN(Scaling):
    """Divide low frequencies by `factor`, and keep high ones. Peng et al., 2309.00071.

    Frequencies are low with fewer than `slow` rotations in the context, and high with more than
    `fast`. In between, the scaling grows linearly with the index of the feature pair.
    """

    fast: PositiveFloat
    slow: PositiveFloat
    context: PositiveInt

    def __call__(self, frequency: Tensor, dim: int, base: float) -> tuple[Tensor, float]:
        # The ramp begins at the pair with `fast` rotations and ends at the pair with `slow`.
        fast_pair = self.pair_at(self.fast, dim, base)
        slow_pair = self.pair_at(self.slow, dim, base)
        first = max(math.floor(fast_pair), 0)
        last = min(math.ceil(slow_pair), dim - 1)
        width = max(last - first, 1e-3)
        pair = torch.arange(len(frequency), device=frequency.device)
        unscaled = 1 - ((pair - first) / width).clamp(0, 1)

        magnitude = 0.1 * math.log(self.factor) + 1
        return self.interpolate(frequency, unscaled), magnitude

    def pair_at(self, rotations: float, dim: int, base: float) -> float:
        """Return the real-valued index of the pair that makes `rotations` turns in the context."""
        # Pair i rotates by base^(-2 i / dim) radians per token.
        inverse_frequency = self.context / (rotations * 2 * math.pi)
        return dim * math.log(inverse_frequency) / (2 * math.log(base))
