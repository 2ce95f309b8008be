"""Better, worse, as good, or not known: all variants beside one baseline, judged together."""

import math
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.05  # chance that any interval of a table misses the true difference
UNEQUAL = 0.01  # p of Bartlett's test below which spreads are taken to differ
POWER = 0.8  # chance with which a detectable difference is found
Samples = dict[str, list[float]]  # what was measured of each variant, a value a seed


class Verdict(NamedTuple):
    """The difference of a variant's mean to the baseline's, and what can be said about it.

    `low` and `high` end its simultaneous interval: with a chance of 95 %, the intervals of all
    variants hold the true differences. A difference of `detectable` would be found with a chance
    of POWER. These three are NaN where the baseline or the variant has a single value.
    """

    difference: float
    low: float
    high: float
    detectable: float
    text: str


def judge(
    baseline: list[float], variants: Samples, margin: float, level: float = LEVEL
) -> dict[str, Verdict]:
    """Judge each variant by its values beside those of the baseline, where less is better.

    A variant is as good if the bad end of its interval is within `margin`. The intervals are those
    of Dunnett's many-to-one test, J. Am. Stat. Assoc. 50 (1955), with the variance pooled over all
    samples; where `spreads_differ`, of Welch's t-tests with Bonferroni's correction. Seeds are not
    paired: they explain none of the variance of a loss after training (docs/results.md).
    """
    means = {name: fmean(values) - fmean(baseline) for name, values in variants.items()}
    verdicts = {}
    for name, mean in means.items():
        verdicts[name] = Verdict(mean, math.nan, math.nan, math.nan, "cannot tell: one seed")
    judged = {name: values for name, values in variants.items() if len(values) > 1}
    if not judged or len(baseline) < 2:
        return verdicts

    samples = [*judged.values()]
    if spreads_differ(baseline, judged):
        tests = [stats.ttest_ind(values, baseline, equal_var=False) for values in samples]
        intervals = [test.confidence_interval(1 - level / len(tests)) for test in tests]
        lows, highs = np.transpose(intervals)
    else:
        # The distribution is integrated numerically, with points that are the same in each call.
        test = stats.dunnett(*samples, control=baseline, rng=np.random.default_rng(0))
        lows, highs = test.confidence_interval(1 - level)
    for name, values, low, high in zip(judged, samples, lows, highs, strict=True):
        half = (high - low) / 2
        error = math.hypot(stats.sem(values), stats.sem(baseline))
        detectable = half + stats.norm.ppf(POWER) * error
        verdicts[name] = Verdict(means[name], low, high, detectable, text_of(low, high, margin))
    return verdicts


def spreads_differ(baseline: list[float], variants: Samples) -> bool:
    """Whether the samples have different variances, by Bartlett's test."""
    samples = [values for values in (baseline, *variants.values()) if len(values) > 1]
    return len(samples) > 1 and bool(stats.bartlett(*samples).pvalue < UNEQUAL)


def text_of(low: float, high: float, margin: float) -> str:
    """The verdict that an interval of a difference allows, where less is better."""
    if high < 0:
        return "better"
    if high <= margin:
        return "as good"
    return "worse" if low > 0 else "cannot tell"
