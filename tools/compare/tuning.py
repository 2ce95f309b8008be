"""Find the best learning rate of a variant from its losses at a few rates."""

import math
from collections import defaultdict
from statistics import fmean
from typing import NamedTuple

import numpy as np

from tools.compare.runs import Run

FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)  # of the rates in the settings, all together
FARTHEST = 64.0  # the range is not extended beyond this factor, nor below its inverse
Losses = dict[float, float]  # by the factor of the rates, in steps of two; inf: it diverged


class Optimum(NamedTuple):
    """The best factor of the rates, and by how much a rate off by two raises the loss there.

    Where the best factor is not `inside` of what was tried, a better one may lie outside.
    """

    factor: float
    sensitivity: float
    is_inside: bool


def best_factor(losses: Losses) -> float:
    """The factor with the smallest loss; where all diverged, the smallest factor."""
    return min(losses, key=lambda factor: (losses[factor], factor))


def next_factor(losses: Losses) -> float | None:
    """The factor to try next: beyond the best if that is at an edge. None: nothing is left."""
    best = best_factor(losses)
    if best == max(losses) and best < FARTHEST:
        return 2 * best
    if best == min(losses) and best > 1 / FARTHEST:
        return best / 2
    return None


def find_optimum(losses: Losses) -> Optimum:
    """Fit a parabola in the log of the rate to the best factor and those within 4 times of it.

    As of Marin's sweeps of GQA and MLA, github.com/marin-community/marin/issues/7381. Runs that
    diverged are left out. The optimum stays within a step of the best factor, and does not come
    nearer to one that diverged.
    """
    best = best_factor(losses)
    is_inside = min(losses) < best < max(losses)
    octaves = {}  # from the best factor -> loss
    for factor, loss in losses.items():
        distance = math.log2(factor / best)
        if abs(distance) <= 2 and math.isfinite(loss):
            octaves[distance] = loss
    if not is_inside or len(octaves) < 3:
        return Optimum(best, math.nan, is_inside)

    curvature, slope, _ = np.polyfit(list(octaves), list(octaves.values()), 2)
    if curvature <= 0:  # noise: the losses have no minimum
        return Optimum(best, math.nan, is_inside)
    lowest = max(-1, min(octaves))
    highest = min(1, max(octaves))
    shift = float(np.clip(-slope / (2 * curvature), lowest, highest))
    return Optimum(best * 2**shift, float(curvature), is_inside)


def rate_losses(runs: list[Run]) -> Losses:
    """The mean held-out loss over the seeds of each factor, in nats; inf where one diverged."""
    losses = defaultdict(list)
    for run in runs:
        losses[run.factor].append(math.inf if run.has_diverged else run.last["val_loss"])
    return {factor: fmean(values) for factor, values in losses.items()}
