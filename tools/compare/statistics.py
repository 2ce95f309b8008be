"""Simultaneous tests of all variants against a baseline: better, worse, as good, cannot tell."""

import math
from functools import cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.optimize import brentq

LEVEL = 0.05  # probability that one or more intervals in a table miss the true difference
# If the p-value of Bartlett's test is below this, spreads are assumed to differ. With a threshold
# of 0.01, spreads of 1 to 3 among 19 variants with 5 seeds went undetected so often that 11% of the
# tables had a false verdict; with this threshold, 8% had one.
UNEQUAL = 0.1
POWER = 0.8  # probability of finding a detectable difference
Samples = dict[str, list[float]]  # each variant's values, one per seed


class Verdict(NamedTuple):
    """The difference between the means of a variant and the baseline, and its verdict.

    `low` and `high` are the bounds of a simultaneous interval: with a probability of 95%, the
    intervals of all variants contain the true differences. A difference of `detectable` would be
    found with probability POWER. These three are NaN if the baseline or the variant has no spread.
    """

    difference: float
    low: float
    high: float
    detectable: float
    text: str


def judge(
    baseline: list[float], variants: Samples, margin: float, level: float = LEVEL
) -> dict[str, Verdict]:
    """Judge each variant by comparing its values with the baseline's values; lower is better.

    A variant is as good as the baseline if the upper bound of its interval is within `margin`. The
    intervals come from Dunnett's many-to-one test, J. Am. Stat. Assoc. 50 (1955), with the variance
    pooled over all samples; if `spreads_differ`, they come from Welch's t-tests with Bonferroni's
    correction. Seeds are not paired: equal seeds do not make the losses of two variants more
    similar.
    """
    judged = {name: values for name, values in variants.items() if has_spread(values)}
    if not has_spread(baseline):
        judged = {}
    samples = [baseline, *judged.values()]
    sizes = tuple(len(each) for each in samples)
    pooled = 0.0
    if judged:
        pooled = sum(np.var(each) * len(each) for each in samples) / (sum(sizes) - len(sizes))
    is_unequal = spreads_differ(baseline, judged)

    verdicts = {}
    for name, values in variants.items():
        difference = fmean(values) - fmean(baseline)
        if name not in judged:
            reason = "one seed" if min(len(baseline), len(values)) < 2 else "no spread"
            text = f"cannot tell: {reason}"
            verdicts[name] = Verdict(difference, math.nan, math.nan, math.nan, text)
            continue
        if is_unequal:
            welch = stats.ttest_ind(values, baseline, equal_var=False)
            error = math.hypot(stats.sem(values), stats.sem(baseline))
            half = error * stats.t.ppf(1 - level / len(judged) / 2, welch.df)
        else:
            error = math.sqrt(pooled * (1 / len(values) + 1 / len(baseline)))
            half = error * critical_value(sizes, level)
        low = difference - half
        high = difference + half
        detectable = half + stats.norm.ppf(POWER) * error
        text = text_of(low, high, margin)
        verdicts[name] = Verdict(difference, low, high, detectable, text)
    return verdicts


@cache
def critical_value(sizes: tuple[int, ...], level: float) -> float:
    """Return Dunnett's critical value for samples of these `sizes`, beginning with the baseline.

    If all means are equal, the largest |t| exceeds it with probability `level`. scipy.stats.dunnett
    runs the same test, but its search for the intervals does not always converge.
    """
    baseline, *others = sizes
    df = sum(sizes) - len(sizes)
    # The statistics are correlated because they share the baseline's mean.
    factors = np.sqrt([size / (size + baseline) for size in others])
    correlation = np.outer(factors, factors)
    np.fill_diagonal(correlation, 1.0)
    joint = stats.multivariate_t(shape=correlation, df=df)
    corner = np.ones(len(others))

    def excess(value: float) -> float:
        # The points of the numerical integration are the same in each call.
        inside = joint.cdf(value * corner, lower_limit=-value * corner, random_state=0)
        return inside - (1 - level)

    # The value lies between a single test's critical value and Bonferroni's critical value.
    low = stats.t.ppf(1 - level / 2, df)
    high = stats.t.ppf(1 - level / len(others) / 2, df)
    if len(others) == 1:
        return float(low)
    return float(brentq(excess, 0.95 * low, 1.05 * high, xtol=1e-4))


def solves_more_often(
    solved: int, total: int, baseline_solved: int, baseline_total: int, num_variants: int
) -> bool:
    """Whether significantly more seeds of a variant than of the baseline solve a task.

    Uses Fisher's exact test, with Bonferroni's correction for `num_variants` variants.
    """
    table = [[solved, total - solved], [baseline_solved, baseline_total - baseline_solved]]
    pvalue = stats.fisher_exact(table).pvalue
    is_more = solved / total > baseline_solved / baseline_total
    return is_more and bool(pvalue * num_variants < LEVEL)


def seeds_to_decide(num_variants: int) -> int:
    """Return the fewest seeds at which "all solve" is significantly better than "none do"."""
    seeds = 1
    while not solves_more_often(seeds, seeds, 0, seeds, num_variants):
        seeds += 1
    return seeds


def spreads_differ(baseline: list[float], variants: Samples) -> bool:
    """Whether the samples have different variances, by Bartlett's test."""
    samples = [values for values in (baseline, *variants.values()) if has_spread(values)]
    return len(samples) > 1 and bool(stats.bartlett(*samples).pvalue < UNEQUAL)


def has_spread(values: list[float]) -> bool:
    """Whether a variance can be estimated: the values are finite and not all equal."""
    return len(set(values)) > 1 and bool(np.isfinite(values).all())


def text_of(low: float, high: float, margin: float) -> str:
    """Return the verdict for a difference, given its interval; lower is better."""
    if high < 0:
        return "better"
    if high <= margin:
        return "as good"
    if low > 0:
        return "worse"
    return "cannot tell"


def with_interval(difference: float, low: float, high: float) -> str:
    """Format a difference, with its interval if there is one."""
    text = f"{difference:+z.4f}"
    if not math.isnan(low):
        text += f" [{low:+z.4f}, {high:+z.4f}]"
    return text
