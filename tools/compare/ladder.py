"""Judge whether differences from the baseline grow or shrink with model size."""

import math
from collections import defaultdict
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy import stats

from tools.compare.comparison import Comparison, judge_measure
from tools.compare.measures import with_interval
from tools.compare.page import Page
from tools.compare.plots import draw_ladder
from tools.compare.statistics import LEVEL, Samples, Verdict, has_spread

CANNOT_TELL = "cannot tell"
CLAUSES = {
    "lead grows": "The lead of {names} grows with the size.",
    "lead shrinks": "The lead of {names} shrinks with the size.",
    "deficit grows": "The deficit of {names} grows with the size.",
    "deficit shrinks": "The deficit of {names} shrinks with the size.",
    CANNOT_TELL: "It is undecided whether the difference of {names} grows or shrinks.",
}
LADDER = """
Each size has its own verdicts further down. The trend is the slope of a straight line fitted to the
differences against the logarithm of the training compute. A lead or a deficit grows or shrinks if
the 95 % interval of the slope excludes zero. The intervals are simultaneous over all variants
(Bonferroni correction). A trend describes only these sizes, and may not continue beyond them.
"""
COMPUTE = """
For each variant, a power law, loss = a x FLOPs ^ -exponent, is fitted to all runs. The baseline's
power law gives the compute that the baseline would need to reach the variant's loss at the largest
size, as a multiple of the baseline's own compute at that size. This assumes that parameters and
tokens grow in the same proportion.
"""


class Rung(NamedTuple):
    """One model size, with the losses of each variant, including the baseline."""

    dim: int
    flops: float  # training FLOPs of a run of the baseline
    samples: Samples

    def difference(self, name: str, baseline: str) -> float:
        """Return the mean loss of a variant minus the mean loss of the baseline."""
        return fmean(self.samples[name]) - fmean(self.samples[baseline])


class Trend(NamedTuple):
    """How a variant's difference from the baseline changes with the training compute.

    `slope` is the change in the difference when compute grows tenfold; `low` and `high` are the
    bounds of its interval. With a probability of at least 95%, the intervals of all variants
    contain the true slopes. The bounds are NaN if, at any size, the variant or the baseline has no
    spread, such as a single seed.
    """

    slope: float
    low: float
    high: float
    text: str


class PowerLaw(NamedTuple):
    """loss = scale * flops ** -exponent, fitted to all runs of a variant.

    `low` and `high` are the bounds of the 95% interval of the exponent.
    """

    scale: float
    exponent: float
    low: float
    high: float

    def loss(self, flops: float) -> float:
        return self.scale * flops**-self.exponent


def add_ladder(page: Page, comparisons: list[Comparison], margin: float) -> tuple[str, str]:
    """Add a section on how differences change with size; return the figure's SVG and a summary.

    Both are empty if the baseline is the only variant that was trained at all sizes.
    """
    rungs = make_rungs(comparisons)
    by_dim = {width(comparison): comparison for comparison in comparisons}
    largest = by_dim[rungs[-1].dim]
    baseline = without_dim(largest.baseline, width(largest))
    variants = [name for name in rungs[-1].samples if name != baseline]
    if not variants or baseline not in rungs[-1].samples:
        return "", ""

    # The verdicts at each size come from that size's own table.
    unit = largest.first.metric_name
    verdicts = defaultdict(dict)
    for dim, comparison in by_dim.items():
        result = judge_measure(comparison, unit, attrgetter("loss"), margin)
        for name, verdict in result.verdicts.items():
            verdicts[dim][without_dim(name, dim)] = verdict
    at_largest = verdicts[width(largest)]
    variants.sort(key=lambda name: at_largest[name].difference)
    trends = judge_trends(rungs, baseline)
    laws = {name: fit_power_law(rungs, name) for name in (baseline, *variants)}

    sizes = ", ".join(str(rung.dim) for rung in rungs)
    page.paragraph(f"How the differences change with the size of the model: dim {sizes}", "h1")
    headline = describe_largest(rungs[-1], baseline, at_largest, unit)
    clauses = describe_trends(rungs, trends)
    page.paragraph(headline, style="answer")
    page.paragraph(clauses)
    flops = [rung.flops for rung in rungs]
    figure = draw_ladder(
        flops,
        losses={name: [rung.samples[name] for rung in rungs] for name in laws},
        fits={name: [law.loss(each) for each in flops] for name, law in laws.items()},
        intervals={name: [verdicts[rung.dim][name][:3] for rung in rungs] for name in variants},
        baseline=baseline,
        unit=unit,
    )
    caption = (
        "Top: each dot is a seed, and each line a fitted power law. Bottom: the difference from "
        f"{baseline} with its 95 % interval."
    )
    svg = page.figure(figure, caption)
    page.table(ladder_rows(rungs, baseline, variants, at_largest, trends, laws))
    with page.folded("How to read the trends"):
        page.paragraph(LADDER)
        page.paragraph(COMPUTE)
    return svg, f"{headline}\n{clauses}"


def width(comparison: Comparison) -> int:
    return comparison.first.settings["model"]["dim"]


def describe_largest(rung: Rung, baseline: str, verdicts: dict[str, Verdict], unit: str) -> str:
    """Name the best variant at the largest size."""
    at = f"At dim {rung.dim}, the largest size, "
    better = [name for name in rung.samples if name in verdicts and verdicts[name].text == "better"]
    if not better:
        return f"{at}no variant is better than {baseline} for certain."
    best = min(better, key=lambda name: verdicts[name].difference)
    return (
        f"{at}{best}'s loss is lower than {baseline}'s by {-verdicts[best].difference:.3f} {unit}."
    )


def describe_trends(rungs: list[Rung], trends: dict[str, Trend]) -> str:
    sentences = []
    for text, clause in CLAUSES.items():
        names = [name for name, trend in trends.items() if trend.text == text]
        if names:
            sentences.append(clause.format(names=", ".join(names)))
    span = rungs[-1].flops / rungs[0].flops
    return f"Training compute grows {span:.3g}-fold across the sizes. {' '.join(sentences)}"


def ladder_rows(
    rungs: list[Rung],
    baseline: str,
    variants: list[str],
    verdicts: dict[str, Verdict],
    trends: dict[str, Trend],
    laws: dict[str, PowerLaw],
) -> list[dict[str, str]]:
    """Return the table's rows: the difference at the largest size, its trend, and the power law."""
    largest = rungs[-1]
    loss = fmean(largest.samples[baseline])
    rows = []
    titles = (
        "variant",
        f"difference at dim {largest.dim}",
        "verdict there",
        "trend",
        "change for 10 x the compute",
        f"compute of {baseline} for this loss",
        "exponent",
    )
    for name in (baseline, *variants):
        cells = [name, "", "baseline", "", "", ""]
        law = laws[name]
        if name in trends:
            verdict = verdicts[name]
            trend = trends[name]
            factors = [
                compute_factor(difference, loss, laws[baseline])
                for difference in (verdict.difference, verdict.high, verdict.low)
            ]
            cells = [
                name,
                with_interval(*verdict[:3]),
                verdict.text,
                trend.text,
                with_interval(*trend[:3]),
                "{:.2f} x [{:.2f}, {:.2f}]".format(*factors),
            ]
        exponent = f"{law.exponent:.4f} [{law.low:.4f}, {law.high:.4f}]"
        rows.append(dict(zip(titles, (*cells, exponent), strict=True)))
    return rows


def make_rungs(comparisons: list[Comparison]) -> list[Rung]:
    """Return a rung for each size, smallest first, with the variants that all sizes share."""
    samples_by_dim = {}
    flops_by_dim = {}
    for comparison in comparisons:
        dim = width(comparison)
        first = comparison.first
        samples_by_dim[dim] = {}
        for name, runs in comparison.groups.items():
            samples_by_dim[dim][without_dim(name, dim)] = [run.loss for run in runs]
        flops_by_dim[dim] = first.model.training_flops() * first.last["tokens"]
    common = set.intersection(*(set(samples) for samples in samples_by_dim.values()))
    rungs = []
    for dim in sorted(samples_by_dim, key=flops_by_dim.get):
        samples = {name: samples_by_dim[dim][name] for name in sorted(common)}
        rungs.append(Rung(dim, flops_by_dim[dim], samples))
    return rungs


def without_dim(name: str, dim: int) -> str:
    """Return a variant's name without the width that a sweep over widths adds to it."""
    return name.replace(f"dim-{dim}", "").strip("-")


def judge_trends(rungs: list[Rung], baseline: str) -> dict[str, Trend]:
    """Judge for each variant whether its difference from the baseline changes with compute.

    The slope of a line fitted to the differences, over the logarithm of the compute, is a weighted
    sum of means, so its standard error follows from the spread across seeds. The interval is the
    wider of two: one from the variances of the variant and the baseline alone, and one from
    variances that are pooled over all variants of the same size. The first can be too narrow with
    few seeds, and the second if variances differ. The bounds are NaN if, at any size, the variant
    or the baseline has no spread. The degrees of freedom follow Satterthwaite, Biometrics Bulletin
    2 (1946), and Bonferroni's correction accounts for the number of variants.
    """
    logs = np.log10([rung.flops for rung in rungs])
    deviations = logs - logs.mean()
    weights = deviations / (deviations**2).sum()

    trends = {}
    variants = [name for name in rungs[0].samples if name != baseline]
    for name in variants:
        differences = [rung.difference(name, baseline) for rung in rungs]
        slope = float(np.dot(weights, differences))
        separate = []
        pooled = []
        for rung, weight in zip(rungs, weights, strict=True):
            pair = [rung.samples[name], rung.samples[baseline]]
            separate += [(weight**2 * variance, freedom) for variance, freedom in variances(pair)]
            variance, freedom = pooled_variance(pair, rung.samples)
            pooled.append((weight**2 * variance, freedom))
        tail = LEVEL / len(variants) / 2
        half = float(np.maximum(half_width(separate, tail), half_width(pooled, tail)))
        text = trend_text(slope - half, slope + half, differences[-1])
        trends[name] = Trend(slope, slope - half, slope + half, text)
    return trends


def variances(pair: list[list[float]]) -> list[tuple[float, int]]:
    """Return the variance of each sample's mean, with its degrees of freedom.

    Returns a single NaN if either sample has no spread.
    """
    if not all(map(has_spread, pair)):
        return [(math.nan, 1)]
    return [(np.var(values, ddof=1) / len(values), len(values) - 1) for values in pair]


def pooled_variance(pair: list[list[float]], samples: Samples) -> tuple[float, int]:
    """Return the variance of the difference of the pair's means, with its degrees of freedom.

    All variants are assumed to have the same variance. The result is NaN if no sample has a spread.
    """
    known = [values for values in samples.values() if has_spread(values)]
    if not known:
        return math.nan, 1
    freedom = sum(len(values) - 1 for values in known)
    variance = sum(np.var(values) * len(values) for values in known) / freedom
    return variance * sum(1 / len(values) for values in pair), freedom


def half_width(terms: list[tuple[float, int]], tail: float) -> float:
    """Return half the width of an interval with a probability of `tail` on either side.

    `terms` are the summands of the squared standard error, with their degrees of freedom.
    """
    total = sum(variance for variance, _ in terms)
    freedom = total**2 / sum(variance**2 / each for variance, each in terms)
    return math.sqrt(total) * stats.t.ppf(1 - tail, freedom)


def trend_text(low: float, high: float, difference: float) -> str:
    """Describe a trend, given the interval of its slope and the difference at the largest size."""
    if not (low > 0 or high < 0):
        return CANNOT_TELL
    noun = "lead" if difference < 0 else "deficit"
    verb = "grows" if (high < 0) == (difference < 0) else "shrinks"
    return f"{noun} {verb}"


def fit_power_law(rungs: list[Rung], name: str) -> PowerLaw:
    """Fit a straight line to the logarithms of the losses and the compute."""
    logs = []
    losses = []
    for rung in rungs:
        for loss in rung.samples[name]:
            logs.append(math.log(rung.flops))
            losses.append(math.log(loss))
    line = stats.linregress(logs, losses)
    half = math.nan
    if len(logs) > 2:
        half = line.stderr * stats.t.ppf(1 - LEVEL / 2, len(logs) - 2)
    exponent = -line.slope
    return PowerLaw(math.exp(line.intercept), exponent, exponent - half, exponent + half)


def compute_factor(difference: float, loss: float, law: PowerLaw) -> float:
    """Return the factor by which the compute must change for `loss` to change by `difference`."""
    return (1 + difference / loss) ** (-1 / law.exponent)
