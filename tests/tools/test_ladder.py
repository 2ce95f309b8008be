"""The trend over model sizes: slope, interval and false positive rate."""

import math
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from tests.tools.pages import table, text_run
from tools.compare import report
from tools.compare.ladder import CANNOT_TELL, Rung, compute_factor, fit_power_law, judge_trends

DIMS = {64: 1e12, 96: 4e12, 128: 13e12, 192: 64e12}  # FLOPs per run


def simulate(draw, numbers, spreads, lead=lambda flops: 0.0, variants="abcd", wide=None):
    """Simulate rungs with these numbers of seeds and deviations.

    Variant a has a `lead`, and the deviation of variant `wide` is three times as large.
    """
    rungs = []
    for (dim, flops), number, spread in zip(DIMS.items(), numbers, spreads, strict=True):
        samples = {}
        for name in ("base", *variants):
            mean = 2.0 * (flops / 1e12) ** -0.06 - (lead(flops) if name == "a" else 0.0)
            deviation = 3 * spread if name == wide else spread
            samples[name] = list(draw.normal(mean, deviation, number))
        rungs.append(Rung(dim, flops, samples))
    return rungs


def test_the_trend_is_the_slope_of_a_line_fitted_to_the_differences():
    rungs = simulate(np.random.default_rng(0), (6, 6, 4, 2), [0.01] * 4)
    trend = judge_trends(rungs, "base")["b"]
    logs = [math.log10(flops) for flops in DIMS.values()]
    differences = [np.mean(rung.samples["b"]) - np.mean(rung.samples["base"]) for rung in rungs]
    assert trend.slope == pytest.approx(np.polyfit(logs, differences, 1)[0], rel=1e-9)
    assert trend.low < trend.slope < trend.high


def test_one_variant_at_two_sizes_gives_the_wider_interval_of_two_interaction_tests():
    """These are t-tests for a change of (a - base) with the size, with and without pooling."""
    draw = np.random.default_rng(1)
    rungs = simulate(draw, (5, 5, 5, 5), [0.01] * 4, variants="a")[:2]
    trend = judge_trends(rungs, "base")["a"]
    span = math.log10(4)
    (a0, b0), (a1, b1) = ((each.samples["a"], each.samples["base"]) for each in rungs)
    slope = (np.mean(a1) - np.mean(b1) - np.mean(a0) + np.mean(b0)) / span
    parts = [np.var(sample, ddof=1) / 5 / span**2 for sample in (a0, b0, a1, b1)]
    pairs = [parts[0] + parts[1], parts[2] + parts[3]]
    separate = sum(parts) ** 2 / sum(part**2 / 4 for part in parts)
    pooled = sum(pairs) ** 2 / sum(pair**2 / 8 for pair in pairs)
    half = math.sqrt(sum(parts)) * stats.t.ppf(0.975, min(separate, pooled))
    assert (trend.slope, trend.low, trend.high) == pytest.approx(
        (slope, slope - half, slope + half)
    )


@pytest.mark.parametrize(
    ("lead", "text"),
    [
        (lambda flops: 0.1 * math.log10(flops / 1e11), "lead grows"),
        (lambda flops: 0.1 * math.log10(1e15 / flops), "lead shrinks"),
        (lambda flops: -0.1 * math.log10(flops / 1e11), "deficit grows"),
        (lambda flops: -0.1 * math.log10(1e15 / flops), "deficit shrinks"),
        (lambda flops: 0.1, CANNOT_TELL),
    ],
)
def test_trends_are_described_as_growing_or_shrinking(lead, text):
    rungs = simulate(np.random.default_rng(2), (6, 6, 4, 2), [0.003] * 4, lead)
    trends = judge_trends(rungs, "base")
    assert trends["a"].text == text
    assert [trends[name].text for name in "bcd"] == [CANNOT_TELL] * 3


def test_one_seed_per_size_gives_no_trend():
    rungs = simulate(np.random.default_rng(3), (1, 1, 1, 1), [0.01] * 4)
    trends = judge_trends(rungs, "base")
    assert {trend.text for trend in trends.values()} == {CANNOT_TELL}
    assert all(math.isnan(trend.low) for trend in trends.values())


def test_the_spread_of_another_variant_may_widen_the_interval():
    """Variances of a, b and base are pooled, and the interval is for two variants."""
    draw = np.random.default_rng(6)
    rungs = simulate(draw, (5, 5, 5, 5), [0.01] * 4, variants="ab", wide="b")[:2]
    trend = judge_trends(rungs, "base")["a"]
    parts = []
    for rung in rungs:
        pooled = np.mean([np.var(values, ddof=1) for values in rung.samples.values()])
        parts.append(pooled * 2 / 5 / math.log10(4) ** 2)
    freedom = sum(parts) ** 2 / sum(part**2 / 12 for part in parts)
    half = math.sqrt(sum(parts)) * stats.t.ppf(1 - 0.05 / 4, freedom)
    assert (trend.high - trend.low) / 2 == pytest.approx(half)


def test_one_seed_at_a_single_size_gives_no_trend():
    rungs = simulate(np.random.default_rng(5), (4, 4, 4, 2), [0.01] * 4)
    rungs[-1].samples["a"] = rungs[-1].samples["a"][:1]
    trends = judge_trends(rungs, "base")
    assert trends["a"].text == CANNOT_TELL and math.isnan(trends["a"].low)
    assert trends["b"].low < trends["b"].high


def test_the_compute_factor_inverts_the_fitted_power_law():
    samples = {dim: {"a": [3.0 * flops**-0.07] * 2} for dim, flops in DIMS.items()}
    law = fit_power_law([Rung(dim, DIMS[dim], each) for dim, each in samples.items()], "a")
    assert (law.scale, law.exponent) == pytest.approx((3.0, 0.07))
    flops = DIMS[192]
    factor = compute_factor(-0.05, law.loss(flops), law)
    assert law.loss(factor * flops) == pytest.approx(law.loss(flops) - 0.05)
    assert factor > 1 and compute_factor(0.05, law.loss(flops), law) < 1


def test_a_report_on_several_sizes_describes_the_trend(tmp_path):
    runs = []
    for dim, lead in ((64, 0.01), (96, 0.05)):
        for name in ("gqa", "kda"):
            for seed in range(4):
                loss = 1.2 - 0.001 * dim + 0.001 * seed**2 - lead * (name == "kda")
                run = text_run(name, seed, loss)
                run.settings["model"]["dim"] = dim
                runs.append(run)
    summary = report.write_report(tmp_path, runs, {}, margin=0.01)
    assert summary.startswith(
        "At dim 96, the largest size, kda's loss is lower than gqa's by 0.050 bits per byte.\n"
    )
    assert "The lead of kda grows with the size." in summary
    rows = table((tmp_path / "report.html").read_text(encoding="utf-8"), 0)
    assert rows["kda"]["trend"] == "lead grows" and rows["gqa"]["verdict there"] == "baseline"
    ElementTree.parse(tmp_path / "text-ladder.svg")


@pytest.mark.long
@pytest.mark.parametrize("wide", [None, "a", "base"])
@pytest.mark.parametrize(
    "spreads", [(0.01, 0.01, 0.01, 0.01), (0.02, 0.01, 0.005, 0.0025), (0.003, 0.006, 0.009, 0.012)]
)
def test_equal_variants_rarely_show_a_trend(spreads, wide):
    """At most 5 % of 500 tables with equal variants have a trend.

    If one variant's spread is three times as large, the limit is 5 % plus the sampling error.
    """
    draw = np.random.default_rng(4)
    false = 0
    for _ in range(500):
        trends = judge_trends(simulate(draw, (6, 6, 4, 2), spreads, wide=wide), "base")
        false += any(trend.text != CANNOT_TELL for trend in trends.values())
    print(f"{spreads}, wide {wide}: {false} of 500")
    assert false <= (stats.binom.ppf(0.975, 500, 0.05) if wide else 25)
