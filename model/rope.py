"""Ways to stretch rotary positions over a longer context than a model was trained on.

Each maps the frequencies (D/2,) of `dim` rotary dimensions to new ones, and says by what to multiply cos and sin.
`context` is the one before stretching, in tokens. They are plain values: layers that agree share their tables.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Every position divided by `factor`. Chen et al., 2306.15595."""

    factor: float

    def __post_init__(self):
        if not self.factor >= 1:
            raise ValueError(
                f"rope_scaling.factor must be from 1 (got {self.factor!r}). fix: change it"
            )

    def __call__(self, frequency: Tensor, dim: int, base: float) -> tuple[Tensor, float]:
        return frequency / self.factor, 1.0


@dataclass(frozen=True, kw_only=True)
class Llama3:
    """Waves that turn fewer than `low` times in the context are divided, those above `high` are not. 2407.21783."""

    factor: float
    low: float
    high: float
    context: int

    def __post_init__(self):
        if not (self.factor >= 1 and 0 < self.low < self.high and self.context > 0):
            raise ValueError(
                f"rope_scaling needs factor >= 1, 0 < low < high, context > 0 (got {self}). fix: change one"
            )

    def __call__(self, frequency: Tensor, dim: int, base: float) -> tuple[Tensor, float]:
        turns = self.context * frequency / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / self.factor), 1.0


@dataclass(frozen=True, kw_only=True)
class YaRN:
    """The same by dimension, in a ramp from `fast` turns in the context to `slow`. Peng et al., 2309.00071."""

    factor: float
    fast: float
    slow: float
    context: int

    def __post_init__(self):
        if not (self.factor >= 1 and 0 < self.slow < self.fast and self.context > 0):
            raise ValueError(
                f"rope_scaling needs factor >= 1, 0 < slow < fast, context > 0 (got {self}). fix: change one"
            )

    def __call__(self, frequency: Tensor, dim: int, base: float) -> tuple[Tensor, float]:
        def turning(turns: float) -> float:
            """The dimension pair that turns so often in the context."""
            return dim * math.log(self.context / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = (
            max(math.floor(turning(self.fast)), 0),
            min(math.ceil(turning(self.slow)), dim - 1),
        )
        pair = torch.arange(len(frequency), device=frequency.device)
        kept = 1 - ((pair - first) / max(last - first, 1e-3)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / self.factor), 0.1 * math.log(self.factor) + 1
