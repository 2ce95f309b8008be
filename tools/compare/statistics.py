"""Better, worse, or not distinguishable: paired t-tests over seeds, corrected for how many they are."""

import math
from statistics import mean, stdev
from typing import NamedTuple

from scipy.stats import t as student

LEVEL = 0.05  # how often one of all tests together may see a difference where there is none


class Estimate(NamedTuple):
    """A mean, and half of its 95 % interval: NaN for a single value."""

    mean: float
    half: float


class Verdict(NamedTuple):
    """`difference` to the baseline over so many `pairs`; `p` after the correction, NaN where there are no two."""

    difference: Estimate
    pairs: int
    p: float
    said: str


def estimate(values: list[float]) -> Estimate:
    count = len(values)
    half = math.nan
    if count > 1:
        half = float(student.ppf(1 - LEVEL / 2, count - 1)) * stdev(values) / math.sqrt(count)
    return Estimate(mean(values), half)


def verdicts(baseline: dict[int, float], others: dict[str, dict[int, float]]) -> dict[str, Verdict]:
    """Losses by seed, of the baseline and of each variant, to a verdict on each.

    Runs of one seed, which share batches and first weights, are a pair; where no seed is shared, the order pairs them.
    """
    differences = {name: paired(baseline, values) for name, values in others.items()}
    corrected = holm({name: p_value(each) for name, each in differences.items()})
    found = {}
    for name, p in corrected.items():
        difference = estimate(differences[name])
        said = "not distinguishable" if p > LEVEL else "worse" if difference.mean > 0 else "better"
        found[name] = Verdict(
            difference, len(differences[name]), p, "n/a" if math.isnan(p) else said
        )
    return found


def paired(baseline: dict[int, float], values: dict[int, float]) -> list[float]:
    seeds = sorted(baseline.keys() & values.keys())
    pairs = zip(seeds or sorted(baseline), seeds or sorted(values), strict=False)
    return [values[theirs] - baseline[ours] for ours, theirs in pairs]


def p_value(differences: list[float]) -> float:
    """How likely a mean so far from zero is by chance: Student, Biometrika 6 (1908). NaN for a single difference."""
    if len(differences) < 2:
        return math.nan
    error = stdev(differences) / math.sqrt(len(differences))
    if error == 0:
        return float(mean(differences) == 0)
    return float(2 * student.sf(abs(mean(differences)) / error, len(differences) - 1))


def holm(ps: dict[str, float]) -> dict[str, float]:
    """Each p as large as that many tests make it: Holm, Scand. J. Statist. 6 (1979). NaN is no test."""
    tests, largest = sorted((p, name) for name, p in ps.items() if not math.isnan(p)), 0.0
    corrected = dict(ps)
    for rank, (p, name) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - rank) * p))
        corrected[name] = largest
    return corrected
