"""Better or worse is said only where that is more than chance."""

import math
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy import stats

from tools.compare.statistics import compare_to_baseline, estimate, holm


def test_tests_are_paired():
    draw = np.random.default_rng(0)
    ours, theirs = draw.normal(1, 0.01, (2, 5))
    baseline, other = dict(enumerate(ours)), dict(enumerate(theirs))
    verdict = compare_to_baseline(baseline, {"x": other})["x"]
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


@pytest.mark.parametrize("others, seeds", [(1, 2), (1, 3), (7, 3), (16, 3), (8, 5)])
def test_chance_is_rarely_called_a_difference(others, seeds):
    draw, called = np.random.default_rng(0), 0
    for _ in range(1000):
        shared = draw.normal(1, 0.01, seeds)  # what a seed does to all
        losses = [dict(enumerate(shared + draw.normal(0, 0.005, seeds))) for _ in range(others + 1)]
        found = compare_to_baseline(losses[0], {str(n): each for n, each in enumerate(losses[1:])})
        called += any(verdict.text in ("better", "worse") for verdict in found.values())
    assert called <= 70


def test_a_difference_is_seen():
    draw, seen = np.random.default_rng(0), 0
    for _ in range(200):
        shared = draw.normal(1, 0.05, 3)
        base, other = (
            dict(enumerate(shared + more + draw.normal(0, 0.001, 3))) for more in (0, 0.02)
        )
        seen += compare_to_baseline(base, {"x": other})["x"].text == "worse"
    assert seen >= 190


def test_seeds_that_are_shared_are_pairs():
    base, other = {0: 5.0, 2: 2.0, 3: 3.0}, {1: 9.0, 2: 2.1, 3: 3.2}
    found = compare_to_baseline(base, {"x": other})["x"]
    assert found.difference.mean == pytest.approx(0.15) and found.pairs == 2


def test_other_seeds_are_paired_in_order():
    base, other = {0: 1.0, 1: 2.0, 2: 3.0}, {3: 1.1, 4: 2.2, 5: 3.1}
    assert compare_to_baseline(base, {"x": other})["x"].difference.mean == pytest.approx(0.4 / 3)
    assert (
        compare_to_baseline({0: 1.0, 1: 2.0}, {"x": {0: 1.0, 1: 2.0}})["x"].text
        == "not distinguishable"
    )
    assert compare_to_baseline({0: 1.0, 1: 2.0}, {"x": {0: 0.5, 1: 1.5}})["x"].text == "better"
