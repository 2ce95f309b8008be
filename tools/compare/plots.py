"""The plots of a comparison: rows of points with intervals, and losses by rate."""

import math
from statistics import fmean, median
from typing import NamedTuple

from matplotlib import color_sequences, cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from tools.compare.tuning import Losses

# In inches. At a width of 40 rem, 30 rows fit on a screen 800 pixels high; on a screen 390 pixels
# wide, 8-point letters are still readable.
WIDTH = 4.6
ROW = 0.22
MAX_ROWS_HEIGHT = 4.2
MAX_LABEL = 22  # maximum number of characters in a row's label
REACH = 3.0  # the axis extends to this multiple of the typical distance from the median
COLORS = color_sequences["petroff10"]  # distinct for color-blind readers: 2107.02270
# Ten colors with the first marker and line style, then with the next.
STYLES = cycler(marker=["o", "s", "^"], linestyle=["-", "--", ":"]) * cycler(color=COLORS)
VERDICT_COLORS = {"better": COLORS[0], "worse": COLORS[6]}  # blue, orange
OTHER_COLOR = "gray"


class ForestRow(NamedTuple):
    label: str
    points: list[float]
    interval: tuple[float, float] | None
    verdict: str = ""

    @property
    def values(self) -> list[float]:
        """Return all plotted values: the points, and the bounds of the interval if known."""
        ends = self.interval or ()
        return [value for value in (*self.points, *ends) if math.isfinite(value)]


def new_figure(xlabel: str, ylabel: str, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_prop_cycle(STYLES)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_forest(
    rows: list[ForestRow],
    xlabel: str,
    lines: dict[str, float],
    limits: tuple[float, float] | None = None,
    directions: tuple[str, str] = ("", ""),
) -> Figure:
    """Plot rows from top to bottom: a dot for each point, and the interval with its middle marked.

    `lines` maps labels to axis values that are marked in all rows. Without `limits`, outliers do
    not stretch the axis: an arrow at its end stands for a row's points beyond it, and their values
    are written to the right of the row. `directions` are the labels for the two sides (left, right)
    of the first line; they are shown above that line and at the axis.
    """
    row_height = min(ROW, MAX_ROWS_HEIGHT / len(rows))
    to_left, to_right = directions
    axis_label = "      ".join(filter(None, (to_left, xlabel, to_right)))
    figure, axes = new_figure("", "", 1.0 + row_height * len(rows))
    figure.supxlabel(axis_label, fontsize=8)  # it may be wider than the axis
    low, high = limits or axis_limits(rows, lines)
    for style, (label, value) in zip(("-", ":"), lines.items(), strict=False):
        axes.axvline(value, color="gray", linestyle=style, linewidth=1, label=label)

    # Directions on both sides of the first line, above it.
    origin = next(iter(lines.values()))
    for text, alignment in ((f"{to_left}  ", "right"), (f"  {to_right}", "left")):
        axes.text(
            origin, 1.01, text, transform=axes.get_xaxis_transform(), ha=alignment, fontsize=8
        )

    for height, row in enumerate(rows):
        color = VERDICT_COLORS.get(row.verdict, OTHER_COLOR)
        if row.interval is not None and all(map(math.isfinite, row.interval)):
            axes.plot(row.interval, [height] * 2, "-", color=color, marker="|", linewidth=1.5)
            axes.plot(fmean(row.interval), height, "D", color=color, markersize=3.5)
        axes.plot(row.points, [height] * len(row.points), ".", color="black", markersize=3)

        # An arrow at the end of the axis for the points beyond it.
        below = [point for point in row.points if point < low]
        above = [point for point in row.points if point > high]
        for outside, end, marker in ((below, low, "<"), (above, high, ">")):
            if outside:
                axes.plot(end, height, marker, color=color, markersize=5, clip_on=False)
        if below or above:
            text = describe_outside(below, above)
            place = (1.03, height)
            across = ("axes fraction", "data")
            axes.annotate(text, place, xycoords=across, va="center", fontsize=7)

    axes.set_xlim(low, high)
    axes.set_ylim(len(rows) - 0.4, -0.6)  # from top to bottom, with half a row at the edges
    axes.set_yticks(range(len(rows)), [shorten(row.label) for row in rows], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    figure.legend(loc="outside upper right", ncols=2, fontsize=7, frameon=False)
    return figure


def draw_ladder(
    flops: list[float],
    losses: dict[str, list[list[float]]],
    fits: dict[str, list[float]],
    intervals: dict[str, list[tuple[float, float, float]]],
    baseline: str,
    unit: str,
) -> Figure:
    """Plot losses against training compute, and below them the differences from the baseline.

    For each amount of compute, a variant has the losses of its seeds, the loss on the fitted line,
    and the difference with the bounds of its interval.
    """
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    for axes, label in ((upper, unit), (lower, f"difference from {baseline}")):
        axes.set_ylabel(label, fontsize=8)
        axes.set_prop_cycle(STYLES)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    upper.set_yscale("log")
    upper.set_xscale("log")
    upper.yaxis.set_major_locator(MaxNLocator(5))
    upper.yaxis.set_major_formatter("{x:g}")
    upper.yaxis.set_minor_locator(NullLocator())
    lower.set_xlabel("training FLOPs of a run", fontsize=8)
    lower.axhline(0.0, color="gray", linewidth=1)

    for number, (name, by_flops) in enumerate(losses.items()):
        (line,) = upper.plot(flops, fits[name], label=name, linewidth=1, markersize=0)
        for each, values in zip(flops, by_flops, strict=True):
            upper.plot([each] * len(values), values, ".", color=line.get_color(), markersize=3)
        if name == baseline:
            continue
        # Side by side, so that intervals do not hide each other.
        shifted = [each * 1.04 ** (number - len(losses) / 2) for each in flops]
        differences, lows, highs = zip(*intervals[name], strict=True)
        lower.plot(shifted, differences, color=line.get_color(), markersize=4, linewidth=1)
        lower.vlines(shifted, lows, highs, color=line.get_color(), linewidth=1)
    figure.legend(loc="outside upper center", ncols=4, fontsize=7, frameon=False)
    return figure


def axis_limits(rows: list[ForestRow], lines: dict[str, float]) -> tuple[float, float]:
    """Return axis limits that include all values except those far from the median row.

    "Far" means farther than REACH times a typical distance: the median distance of rows from the
    median row, or the median width of a row if that is larger. The axis includes `lines`.
    """
    drawn = [row.values for row in rows if row.values]
    middles = [fmean(values) for values in drawn]
    middle = median(middles)
    distance = median(abs(each - middle) for each in middles)
    width = median(max(values) - min(values) for values in drawn)
    reach = REACH * max(distance, width)
    inside = [value for values in drawn for value in values if abs(value - middle) <= reach]
    low = min(*inside, *lines.values())
    high = max(*inside, *lines.values())
    space = 0.04 * (high - low) or 0.01
    return low - space, high + space


def describe_outside(below: list[float], above: list[float]) -> str:
    """Describe the points beyond the ends of the axis, such as "3 seeds: 0.12 to 0.15"."""
    texts = []
    for points in (below, above):
        if points:
            ends = list(dict.fromkeys(f"{point:+.3g}" for point in (min(points), max(points))))
            noun = "seed" if len(points) == 1 else "seeds"
            texts.append(f"{len(points)} {noun}: {' to '.join(ends)}")
    return "; ".join(texts)


def shorten(label: str) -> str:
    """Replace the middle of a long label with an ellipsis."""
    if len(label) <= MAX_LABEL:
        return label
    half = MAX_LABEL // 2
    return f"{label[:half]}\u2026{label[1 - half :]}"


def draw_searches(losses: dict[str, Losses]) -> Figure:
    """Plot the loss of each variant against the factors of its learning rates, on a log axis."""
    figure, axes = new_figure("learning-rate factor", "val_loss, nats", 4.0)
    axes.set_xscale("log", base=2)
    for name, by_factor in losses.items():
        factors = sorted(by_factor)
        values = [by_factor[factor] for factor in factors]
        axes.plot(factors, values, label=name, markersize=3, linewidth=1)
    figure.legend(loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    return figure
