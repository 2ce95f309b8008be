"""The verdicts "better", "worse" and "as good" have small error rates."""

import math

import numpy as np
import pytest
from scipy import stats

from tools.compare.statistics import (
    judge,
    seeds_to_decide,
    solves_more_often,
    spreads_differ,
    text_of,
)

SPREAD = [1.0, 1.1, 1.2]


def interval(verdict) -> tuple[float, float]:
    return verdict.low, verdict.high


def test_intervals_for_many_variants_match_scipy():
    draw = np.random.default_rng(0)
    baseline, *variants = [draw.normal(0, 1, size) for size in (6, 4, 5, 4, 5, 6, 7, 4, 5)]
    assert not spreads_differ(baseline, dict(enumerate(variants)))
    test = stats.dunnett(*variants, control=baseline, rng=np.random.default_rng(0))
    verdicts = judge(baseline, dict(enumerate(variants)), 0.01).values()
    # scipy computes the intervals iteratively, with a tolerance.
    for verdict, *expected in zip(verdicts, *test.confidence_interval(), strict=True):
        assert interval(verdict) == pytest.approx(tuple(expected), abs=0.003 * np.ptp(expected))


@pytest.mark.parametrize("sizes", [(2, 3), (8, 8)])
def test_the_interval_for_one_variant_matches_a_t_test(sizes):
    draw = np.random.default_rng(sum(sizes))
    baseline, other = (draw.normal(1, 1e-3, size) for size in sizes)
    assert not spreads_differ(baseline, {"x": other})
    verdict = judge(baseline, {"x": other}, 0.01)["x"]
    expected = stats.ttest_ind(other, baseline).confidence_interval(0.95)
    assert interval(verdict) == pytest.approx(tuple(expected))


def test_unequal_variances_use_welch_intervals():
    """Computes Welch's formula directly, with a Bonferroni correction for two variants."""
    draw = np.random.default_rng(0)
    baseline = draw.normal(0, 1, 6)
    variants = {"a": draw.normal(0, 30, 8), "b": draw.normal(3, 1, 5)}
    assert spreads_differ(baseline, variants)
    for name, verdict in judge(baseline, variants, 0.01).items():
        squares = [x.var(ddof=1) / len(x) for x in (variants[name], baseline)]
        sizes = np.array([len(variants[name]), 6])
        freedom = sum(squares) ** 2 / np.sum(np.square(squares) / (sizes - 1))
        half = stats.t.ppf(1 - 0.025 / 2, freedom) * math.sqrt(sum(squares))
        mean = variants[name].mean() - baseline.mean()
        assert interval(verdict) == pytest.approx((mean - half, mean + half))


@pytest.mark.parametrize(
    "low, high, text",
    [
        (-2.0, -1e-9, "better"),
        (-2.0, 0.5, "as good"),
        (0.1, 0.5, "as good"),
        (0.1, 0.51, "worse"),
        (0.0, 0.51, "cannot tell"),
    ],
)
def test_verdicts_compare_the_interval_with_zero_and_the_margin(low, high, text):
    assert text_of(low, high, margin=0.5) == text


@pytest.mark.parametrize(
    "baseline, other, reason",
    [
        ([1.0], SPREAD, "one seed"),
        (SPREAD, [2.0], "one seed"),
        ([1.0] * 3, [0.5] * 3, "no spread"),
        (SPREAD, [0.5, 0.6, math.inf], "no spread"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_comparison_without_a_spread_gets_no_verdict(baseline, other, reason):
    """The verdict on a second variant is the same as without the first one."""
    variants = {"x": other, "rest": [1.0, 1.15, 1.3]}
    verdicts = judge(baseline, variants, 0.01)
    assert verdicts["x"].text == f"cannot tell: {reason}"
    assert all(map(math.isnan, interval(verdicts["x"])))
    assert verdicts["rest"] == judge(baseline, {"rest": variants["rest"]}, 0.01)["rest"]


@pytest.mark.parametrize("scales", [(1, 1), (1, 10, 10)])
def test_a_detectable_difference_is_found_in_four_of_five_cases(scales):
    """Shifting a variant by the difference shifts its interval by the same amount."""
    draw = np.random.default_rng(0)
    num_found = 0
    for _ in range(200):
        baseline, *variants = [draw.normal(0, scale, 8) for scale in scales]
        verdict = judge(baseline, dict(enumerate(variants)), 0.01)[0]
        num_found += verdict.high - verdict.detectable < 0
    assert 140 <= num_found <= 180


def test_a_difference_in_seeds_that_solve_a_task_must_be_significant():
    # All of n seeds against none: p = 2 / C(2n, n), which is 2 / 20 for 3 and 2 / 70 for 4 seeds.
    assert not solves_more_often(3, 3, 0, 3, num_variants=1)
    assert solves_more_often(4, 4, 0, 4, num_variants=1)
    assert not solves_more_often(4, 4, 0, 4, num_variants=2)
    assert not solves_more_often(0, 4, 4, 4, num_variants=1)
    # 12 / 252 and 14 / 252 for 5 seeds.
    assert [seeds_to_decide(number) for number in (1, 2, 6, 7)] == [4, 5, 5, 6]
