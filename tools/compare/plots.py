"""The plots of a comparison: rows of points with intervals, and losses by rate."""

import math
from statistics import fmean
from typing import NamedTuple

from matplotlib import color_sequences, cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from tools.compare.tuning import Losses

WIDTH = 5.6  # inches: its letters can be read on a screen of 400 pixels
ROW = 0.24  # inches
COLORS = color_sequences["petroff10"]  # told apart by color-blind readers: 2107.02270
# Ten colors with the first marker and line, then with the next.
STYLES = cycler(marker=["o", "s", "^"], linestyle=["-", "--", ":"]) * cycler(color=COLORS)
in_bytes = EngFormatter(unit="B", places=1)  # 66048 -> 66.0 kB


class ForestRow(NamedTuple):
    label: str
    points: list[float]
    interval: tuple[float, float] | None


def new_figure(xlabel: str, ylabel: str, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_prop_cycle(STYLES)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_forest(rows: list[ForestRow], xlabel: str, lines: dict[str, float]) -> Figure:
    """Plot rows from top to bottom: a dot for each point, and the interval with its middle.

    `lines` are values on the axis that are marked in all rows, by their labels.
    """
    figure, axes = new_figure(xlabel, "", 1.0 + ROW * len(rows))
    for style, (label, value) in zip(("-", ":"), lines.items(), strict=False):
        axes.axvline(value, color="gray", linestyle=style, linewidth=1, label=label)
    for height, row in enumerate(rows):
        heights = [height] * len(row.points)
        axes.plot(row.points, heights, ".", color=COLORS[0], alpha=0.5, markersize=4)
        if row.interval is not None and all(map(math.isfinite, row.interval)):
            axes.plot(row.interval, [height] * 2, "-", color="black", marker="|", linewidth=1.2)
            axes.plot(fmean(row.interval), height, "D", color="black", markersize=3)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    axes.invert_yaxis()
    figure.legend(loc="outside upper right", ncols=2, fontsize=7, frameon=False)
    return figure


def draw_searches(losses: dict[str, Losses]) -> Figure:
    """Plot the loss of each variant over the factors of its learning rates, on a log axis."""
    figure, axes = new_figure("factor of the learning rates", "val_loss, nats", 4.0)
    axes.set_xscale("log", base=2)
    for name, by_factor in losses.items():
        factors = sorted(by_factor)
        values = [by_factor[factor] for factor in factors]
        axes.plot(factors, values, label=name, markersize=3, linewidth=1)
    figure.legend(loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    return figure
