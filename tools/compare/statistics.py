"""Better, worse, or not distinguishable: paired t-tests over seeds, corrected for their number."""

import math
from typing import NamedTuple

from scipy.stats import ttest_1samp

LEVEL = 0.05  # chance that any of all tests together reports a difference where there is none
Losses = dict[int, float]  # final losses of one variant, by the seed of the run


class Estimate(NamedTuple):
    """A mean, half of its 95 % confidence interval, and the p-value of a true mean of zero.

    The last two are NaN for a single value.
    """

    mean: float
    ci95: float
    p: float


class Verdict(NamedTuple):
    """The difference to the baseline over `pairs` pairs of runs, and what a test says about it.

    `p` is corrected for the number of tests; it is NaN where there are not two pairs.
    """

    difference: Estimate
    pairs: int
    p: float
    text: str


def compare_to_baseline(baseline: Losses, variants: dict[str, Losses]) -> dict[str, Verdict]:
    """Tests each variant, named by its key, against the baseline."""
    num_pairs = {}
    differences = {}
    p_values = {}
    for name, losses in variants.items():
        values = paired_differences(baseline, losses)
        num_pairs[name] = len(values)
        differences[name] = estimate(values)
        p_values[name] = differences[name].p

    # Judge by p-values that are corrected for all tests together.
    verdicts = {}
    for name, p in holm(p_values).items():
        text = verdict_text(differences[name].mean, p)
        verdicts[name] = Verdict(differences[name], num_pairs[name], p, text)
    return verdicts


def paired_differences(baseline: Losses, losses: Losses) -> list[float]:
    """Subtracts the baseline's loss from the variant's, pair by pair.

    Runs of one seed, which share batches and first weights, are a pair. Where no seed is shared,
    the order of the seeds pairs them, and runs without a partner are left out.
    """
    shared = sorted(baseline.keys() & losses.keys())
    if shared:
        return [losses[seed] - baseline[seed] for seed in shared]
    pairs = zip(sorted(baseline), sorted(losses), strict=False)
    return [losses[seed] - baseline[baseline_seed] for baseline_seed, seed in pairs]


def estimate(values: list[float]) -> Estimate:
    """Estimates the mean of the values: Student, Biometrika 6 (1908).

    For the differences of pairs, this is the paired t-test.
    """
    if len(values) < 2:
        return Estimate(values[0], math.nan, math.nan)

    # Without a spread beyond rounding the mean is certain; scipy would divide by a spread of zero.
    if math.isclose(min(values), max(values), rel_tol=1e-13):
        return Estimate(values[0], 0.0, float(values[0] == 0))

    test = ttest_1samp(values, 0)
    low, high = test.confidence_interval(1 - LEVEL)
    mean = float(low + high) / 2
    ci95 = float(high - low) / 2
    return Estimate(mean, ci95, float(test.pvalue))


def verdict_text(difference: float, p: float) -> str:
    if math.isnan(p):
        return "n/a"
    if p > LEVEL:
        return "not distinguishable"
    return "worse" if difference > 0 else "better"


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Corrects p-values so that all tests together err as rarely as one. NaN stands for no test.

    Holm, Scand. J. Statist. 6 (1979): the smallest is multiplied by the number of tests, the next
    by one less, and so on, and none becomes smaller than the one before it.
    """
    tests = sorted((p, name) for name, p in p_values.items() if not math.isnan(p))
    corrected = dict(p_values)
    largest = 0.0
    for index, (p, name) in enumerate(tests):
        scaled = min(1.0, (len(tests) - index) * p)
        largest = max(largest, scaled)
        corrected[name] = largest
    return corrected
