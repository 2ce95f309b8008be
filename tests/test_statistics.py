"""Better or worse is said only where that is more than chance."""

import numpy as np
import pytest
from scipy import stats

from tools.compare.statistics import estimate, holm, verdicts


def test_tests_are_those_of_scipy():
    draw = np.random.default_rng(0)
    ours, theirs = draw.normal(1, 0.01, (2, 5))
    (verdict,) = verdicts(dict(enumerate(ours)), {"x": dict(enumerate(theirs))}).values()
    assert verdict.p == pytest.approx(stats.ttest_rel(theirs, ours).pvalue)
    low, high = stats.ttest_rel(theirs, ours).confidence_interval()
    found = estimate([*(theirs - ours)])
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))


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
        found = verdicts(losses[0], {str(n): each for n, each in enumerate(losses[1:])})
        called += any(verdict.said in ("better", "worse") for verdict in found.values())
    assert called <= 70


def test_a_difference_is_seen():
    draw, seen = np.random.default_rng(0), 0
    for _ in range(200):
        shared = draw.normal(1, 0.05, 3)
        base, other = (
            dict(enumerate(shared + more + draw.normal(0, 0.001, 3))) for more in (0, 0.02)
        )
        seen += verdicts(base, {"x": other})["x"].said == "worse"
    assert seen >= 190


def test_seeds_that_are_shared_are_pairs():
    base, other = {0: 5.0, 2: 2.0, 3: 3.0}, {1: 9.0, 2: 2.1, 3: 3.2}
    found = verdicts(base, {"x": other})["x"]
    assert found.difference.mean == pytest.approx(0.15) and found.pairs == 2


def test_other_seeds_are_paired_in_order():
    base, other = {0: 1.0, 1: 2.0, 2: 3.0}, {3: 1.1, 4: 2.2, 5: 3.1}
    assert verdicts(base, {"x": other})["x"].difference.mean == pytest.approx(0.4 / 3)
    assert verdicts({0: 1.0, 1: 2.0}, {"x": {0: 1.0, 1: 2.0}})["x"].said == "not distinguishable"
    assert verdicts({0: 1.0, 1: 2.0}, {"x": {0: 0.5, 1: 1.5}})["x"].said == "better"
