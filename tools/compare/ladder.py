"""Judge whether differences from the baseline grow or shrink with model size."""

import re

from matplotlib.figure import Figure
from pandas import DataFrame

from tools.compare.comparison import Comparison, judge_losses
from tools.compare.plots import draw_ladder
from tools.compare.statistics import Verdict, with_interval

MAX_WARMUP = 0.05  # a size counts if its warm-up takes at most this share of the steps
CAPTION = """
Each size has its own intervals, as in its table. A lead or a deficit grows or shrinks if the
intervals of the smallest and the largest size do not overlap. A size counts only if its warm-up
takes at most 5 % of the steps, because shorter runs have hardly begun to learn. A trend describes
only these sizes.
"""


def make_ladder(
    comparisons: list[Comparison], answers: dict[int, str], margin: float
) -> tuple[str, str, str, Figure, DataFrame, str] | None:
    """Compare differences from the baseline at several sizes; return a report section's contents.

    `answers` has the answer at each size, by model.dim. Returns None if the sizes have different
    baselines, or no other variant in common.
    """
    comparisons = sorted(comparisons, key=flops_of_baseline)
    baselines = {without_dim(each.baseline, each.dim) for each in comparisons}
    verdicts = []  # of each size, smallest first, by variant
    for comparison in comparisons:
        judged, _ = judge_losses(comparison, margin)
        verdicts.append({without_dim(name, comparison.dim): each for name, each in judged.items()})
    common = set.intersection(*map(set, verdicts))
    if len(baselines) > 1 or not common:
        return None
    names = [name for name in verdicts[-1] if name in common]
    names.sort(key=lambda name: verdicts[-1][name].difference)
    counted = [each for each, at in zip(verdicts, comparisons, strict=True) if has_learned(at)]

    trends = {}
    rows = []
    for name in names:
        trends[name] = "cannot tell"
        if len(counted) > 1:
            trends[name] = judge_trend(counted[0][name], counted[-1][name])
        row = {"variant": name}
        for comparison, each in zip(comparisons, verdicts, strict=True):
            row[f"dim {comparison.dim}"] = with_interval(*each[name][:3])
        rows.append(row | {"verdict, largest size": verdicts[-1][name].text, "trend": trends[name]})

    largest = comparisons[-1]
    answer = f"At dim {largest.dim}, the largest size: {answers[largest.dim]}"
    better = [name for name in names if verdicts[-1][name].text == "better"]
    if better:
        answer += f" Trend of {better[0]} over the sizes: {trends[better[0]]}."
    (baseline,) = baselines
    figure = draw_ladder(
        [flops_of_baseline(comparison) for comparison in comparisons],
        {name: [each[name] for each in verdicts] for name in names},
        f"difference from {baseline}, {largest.first.metric_name}",
    )
    title = "Several sizes: dim " + ", ".join(str(each.dim) for each in comparisons)
    return title, answer, "", figure, DataFrame(rows), CAPTION


def flops_of_baseline(comparison: Comparison) -> float:
    """Return the training FLOPs of the baseline's first run."""
    first = comparison.first
    return first.model.training_flops() * first.last["tokens"]


def has_learned(comparison: Comparison) -> bool:
    """Whether the warm-up of the baseline took at most MAX_WARMUP of its steps."""
    first = comparison.first
    return first.settings["schedule"].get("warmup", 0) <= MAX_WARMUP * first.last["step"]


def without_dim(name: str, dim: int) -> str:
    """Return a variant's name without the width that a sweep over widths adds to it."""
    return re.sub(rf"(^|-)dim-{dim}(?=-|$)", "", name).strip("-")


def judge_trend(smallest: Verdict, largest: Verdict) -> str:
    """Judge how a difference changes from the smallest size to the largest, by their intervals."""
    if not (largest.high < smallest.low or largest.low > smallest.high):  # or one is NaN
        return "cannot tell"
    falls = largest.difference < smallest.difference
    if largest.difference < 0:
        return "lead grows" if falls else "lead shrinks"
    return "deficit shrinks" if falls else "deficit grows"
