"""Better, worse, or not distinguishable: paired t-tests over seeds, corrected for their number."""

import math
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.special import stdtr, stdtrit

LEVEL = 0.05  # chance that any of all tests together reports a difference where there is none
Values = dict[int, float]  # what was measured of one variant, by the seed of the run


class Estimate(NamedTuple):
    """A mean, half of its 95 % confidence interval, and the p-value of a true mean of zero.

    The last two are NaN for a single value.
    """

    mean: float
    ci95: float
    p: float

    def text(self, sign: str = "") -> str:
        mean = f"{self.mean:{sign}z.4f}"  # z: never -0.0000
        return mean if math.isnan(self.ci95) else f"{mean} ± {self.ci95:.4f}"


class Verdict(NamedTuple):
    """The difference to the baseline over `pairs` pairs of runs, and what a test says about it.

    `p` is corrected for the number of tests; it is NaN where there are not two pairs.
    """

    difference: Estimate
    pairs: int
    p: float
    text: str


def compare_to_baseline(
    baseline: Values,
    variants: dict[str, Values],
    *,
    higher_is_better: bool = False,
    least_spread: float = 0.0,
) -> dict[str, Verdict]:
    """Tests each variant, named by its key, against the baseline.

    `least_spread` is the smallest standard deviation that differences are believed to have.
    """
    pairs = {}
    p_values = {}
    for name, values in variants.items():
        # Runs of one seed, which share batches and first weights, are a pair. Where no seed is
        # shared, the order of the seeds pairs them, and runs without a partner are left out.
        shared = sorted(baseline.keys() & values.keys())
        seeds = zip(shared or sorted(baseline), shared or sorted(values), strict=False)
        pairs[name] = [values[seed] - baseline[baseline_seed] for baseline_seed, seed in seeds]
        p_values[name] = estimate(pairs[name], least_spread).p

    # Judge by p-values that are corrected for all tests together.
    verdicts = {}
    for name, p in holm(p_values).items():
        difference = estimate(pairs[name], least_spread)
        text = "not distinguishable"
        if math.isnan(p):
            text = "n/a"
        elif p <= LEVEL:
            is_better = (difference.mean > 0) == higher_is_better
            text = "better" if is_better else "worse"
        verdicts[name] = Verdict(difference, len(pairs[name]), p, text)
    return verdicts


def estimate(values: list[float], least_spread: float = 0.0) -> Estimate:
    """Estimates the mean of the values: Student, Biometrika 6 (1908).

    For the differences of pairs, this is the paired t-test. Values that count, such as the answers
    that are right, tie by chance: their standard deviation is taken to be `least_spread` at least.
    """
    count = len(values)
    mean = fmean(values)
    if count < 2:
        return Estimate(mean, math.nan, math.nan)

    # Values that are equal up to rounding have no spread to divide by: the mean is certain.
    is_equal = math.isclose(min(values), max(values), rel_tol=1e-13)
    if is_equal and least_spread == 0:
        return Estimate(values[0], 0.0, float(values[0] == 0))

    spread = max(stdev(values), least_spread)
    standard_error = spread / math.sqrt(count)
    ci95 = standard_error * stdtrit(count - 1, 1 - LEVEL / 2)
    p = 2 * stdtr(count - 1, -abs(mean) / standard_error)
    return Estimate(mean, float(ci95), float(p))


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
