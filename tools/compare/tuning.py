"""Find the best learning rate of a variant from its losses at a few learning rates."""

import math
from collections import defaultdict
from statistics import fmean
from typing import NamedTuple

import numpy as np

from tools.compare.runs import Run

FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)  # factors that multiply all learning rates in the settings
FARTHEST = 64.0  # the range is not extended beyond this factor, nor below its inverse
Losses = dict[float, float]  # by factor of the learning rates, a power of two; inf if diverged


class Optimum(NamedTuple):
    """The best factor for the learning rates.

    If `is_inside` is false, it is the lowest or highest one tried, and a better factor may lie
    outside.
    """

    factor: float
    is_inside: bool


def best_factor(losses: Losses) -> float:
    """Return the factor with the smallest loss; the smallest factor if all diverged."""
    return min(losses, key=lambda factor: (losses[factor], factor))


def next_factor(losses: Losses) -> float | None:
    """Return the next factor to try if the best factor is the lowest or highest one; else None.

    Also returns None if the range has reached its limit.
    """
    best = best_factor(losses)
    if best == max(losses) and best < FARTHEST:
        return 2 * best
    if best == min(losses) and best > 1 / FARTHEST:
        return best / 2
    return None


def find_optimum(losses: Losses) -> Optimum:
    """Fit a parabola over the log of the factor to the losses at factors within 4x of the best.

    Marin's sweeps of GQA and MLA do the same: github.com/marin-community/marin/issues/7381.
    Diverged runs are left out. The optimum is at most a factor of 2 from the best factor, and not
    toward a neighbor that diverged. Without a minimum inside the range, it is the best factor.
    """
    best = best_factor(losses)
    is_inside = min(losses) < best < max(losses)
    octaves = {}  # distance from the best factor in octaves -> loss
    for factor, loss in losses.items():
        distance = math.log2(factor / best)
        if abs(distance) <= 2 and math.isfinite(loss):
            octaves[distance] = loss
    if not is_inside or len(octaves) < 3:
        return Optimum(best, is_inside)

    curvature, slope, _ = np.polyfit(list(octaves), list(octaves.values()), 2)
    if curvature <= 0:  # only noise: the losses have no minimum
        return Optimum(best, is_inside)
    lowest = max(-1, min(octaves))
    highest = min(1, max(octaves))
    shift = float(np.clip(-slope / (2 * curvature), lowest, highest))
    return Optimum(best * 2**shift, is_inside)


def rate_losses(runs: list[Run]) -> Losses:
    """Return each factor's mean held-out loss over its seeds, in nats; inf if a seed diverged."""
    losses = defaultdict(list)
    for run in runs:
        losses[run.factor].append(math.inf if run.has_diverged else run.last["val_loss"])
    return {factor: fmean(values) for factor, values in losses.items()}
