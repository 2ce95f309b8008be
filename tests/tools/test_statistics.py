"""Better or worse is said only where that is more than chance."""

import math
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy import stats

from tools.compare.statistics import Verdict, compare_to_baseline, estimate, holm


def compare(baseline, other, **options) -> Verdict:
    """The verdict on values by seed, or in the order of their seeds, beside those of a baseline."""
    if not isinstance(baseline, dict):
        baseline, other = dict(enumerate(baseline)), dict(enumerate(other))
    return compare_to_baseline(baseline, {"x": other}, **options)["x"]


def test_tests_are_paired():
    ours, theirs = np.random.default_rng(0).normal(1, 0.01, (2, 5))
    verdict = compare(ours, theirs)
    test = stats.ttest_rel(theirs, ours)
    assert verdict.p == pytest.approx(test.pvalue, abs=1e-12)
    low, high = test.confidence_interval()
    mean, ci95, _ = verdict.difference
    assert (mean - ci95, mean + ci95) == pytest.approx((low, high), abs=1e-12)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_estimates_are_those_of_the_formula(count):
    """Student's t for the mean of `count` values, of which some are far from zero and some near."""
    draw = np.random.default_rng(count)
    for scale in (1e-6, 1e-3, 1.0):
        values = draw.normal(draw.choice([0.0, 1e-3, 5.0]), scale, count).tolist()
        error = stdev(values) / math.sqrt(count)
        ci95 = stats.t.ppf(0.975, count - 1) * error
        p = 2 * stats.t.sf(abs(fmean(values)) / error, count - 1)
        assert estimate(values) == pytest.approx((fmean(values), ci95, p), abs=1e-12)


def test_estimates_without_a_spread_are_certain():
    assert estimate([0.0, 0.0]) == (0.0, 0.0, 1.0)
    assert estimate([-0.5, -0.5, -0.5]) == (-0.5, 0.0, 0.0)
    assert estimate([0.1 + 0.2, 0.3]) == pytest.approx((0.3, 0.0, 0.0), abs=1e-12)
    assert estimate([0.5]) == pytest.approx((0.5, math.nan, math.nan), nan_ok=True)


def test_holm_by_hand():
    assert holm({"a": 0.04, "b": 0.01, "c": float("nan"), "d": 0.03}) == pytest.approx(
        {"a": 0.06, "b": 0.03, "c": float("nan"), "d": 0.06}, nan_ok=True
    )


@pytest.mark.parametrize(
    "kind, others, seeds",
    [("loss", 1, 2), ("loss", 16, 3), ("slice", 8, 5), ("accuracy", 1, 2), ("accuracy", 8, 5)],
)
def test_chance_is_rarely_called_a_difference(kind, others, seeds):
    """1,000 comparisons of variants that are equal: losses of two noises, and accuracies."""
    draw = np.random.default_rng(0)
    num_called = 0
    for _ in range(1000):
        shared = draw.normal(1, 0.01, seeds)  # what a seed does to all
        values = shared + draw.normal(0, 0.005, (others + 1, seeds))
        if kind == "slice":
            values = 2 * values + draw.standard_t(4, values.shape) * 0.02
        if kind == "accuracy":
            values = draw.binomial(2048, np.clip(1.85 - values, 0, 1)) / 2048
        baseline, *variants = [dict(enumerate(row)) for row in values.tolist()]
        least_spread = 0.005 if kind == "accuracy" else 0.0
        found = compare_to_baseline(baseline, dict(enumerate(variants)), least_spread=least_spread)
        num_called += any(verdict.text in ("better", "worse") for verdict in found.values())
    assert num_called < 70


def test_a_difference_is_seen():
    draw = np.random.default_rng(0)
    num_seen = 0
    for _ in range(200):
        shared = draw.normal(1, 0.05, 3)
        base, other = [shared + more + draw.normal(0, 0.001, 3) for more in (0, 0.02)]
        num_seen += compare(base, other).text == "worse"
    assert num_seen >= 190


def test_seeds_that_are_shared_are_pairs():
    verdict = compare({0: 5.0, 2: 2.0, 3: 3.0}, {1: 9.0, 2: 2.1, 3: 3.2})
    assert verdict.difference.mean == pytest.approx(0.15) and verdict.pairs == 2


def test_other_seeds_are_paired_in_order():
    verdict = compare({0: 1.0, 1: 2.0, 2: 3.0}, {3: 1.1, 4: 2.2, 5: 3.1})
    assert verdict.difference.mean == pytest.approx(0.4 / 3)
    assert compare([1.0, 2.0], [1.0, 2.0]).text == "not distinguishable"
    assert compare([1.0, 2.0], [0.5, 1.5]).text == "better"


def test_more_is_better_or_worse_as_the_measure_says():
    low, high = [0.5, 0.51, 0.52], [0.9, 0.92, 0.91]
    assert compare(low, high).text == "worse"
    assert compare(low, high, higher_is_better=True).text == "better"
    assert compare(high, low, higher_is_better=True).text == "worse"


def test_counts_that_tie_by_chance_are_no_difference():
    one, other = [0.990, 0.988], [0.992, 0.990]
    assert compare(one, other).text == "worse"
    verdict = compare(one, other, higher_is_better=True, least_spread=0.005)
    assert verdict.text == "not distinguishable"
