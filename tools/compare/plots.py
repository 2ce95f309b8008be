"""The plots of a comparison: points with names beside them, and curves."""

import math
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from tools.compare.runs import Groups, Run
from tools.compare.statistics import Estimate

SIZE = (5.6, 4.0)  # inches: its letters can be read on a screen of 400 pixels
COLORS = matplotlib.color_sequences["petroff10"]  # told apart by color-blind readers: 2107.02270
MARKERS = ("o-", "s--", "^:")  # the next one after every ten colors
RADII = range(12, 160, 8)  # points between a label and what it names
DIRECTIONS = range(0, 360, 30)  # degrees
in_bytes = EngFormatter(unit="B", places=1)  # 66048 -> 66.0 kB
Curve = dict[float, float]  # x -> y


def new_figure(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_points(points: dict[str, tuple[float, Estimate]], xlabel: str, ylabel: str) -> Figure:
    """Plots a value with its 95 % interval, by name, against bytes on a logarithmic axis.

    Points of equal bytes are drawn side by side.
    """
    figure, axes = new_figure(xlabel, ylabel)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(in_bytes)
    axes.margins(y=0.15)
    sizes = [x for x, _ in points.values()]
    axes.set_xlim(min(sizes) / 2, max(sizes) * 2)
    by_x = defaultdict(list)
    for name, (x, _) in points.items():
        by_x[x].append(name)
    labels = []
    for number, (name, (x, value)) in enumerate(points.items()):
        place = by_x[x].index(name) - (len(by_x[x]) - 1) / 2
        x *= 1.04**place
        color = COLORS[number % len(COLORS)]
        axes.errorbar(x, value.mean, value.ci95, fmt="o", capsize=2, markersize=5, color=color)
        labels.append((x, value.mean, value.ci95, name))
    place_labels(axes, labels)
    return figure


def place_labels(axes: Axes, labels: list[tuple[float, float, float, str]]) -> None:
    """Writes names beside their points (x, y, half an interval of y), so that none covers another name or a point.

    Each name in turn gets the nearest free place around its point, with a line to it.
    """
    # Places are measured in pixels, so the layout must not change any more.
    figure = axes.figure
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    inside = axes.get_window_extent()
    points = []
    for x, y, ci95, _ in labels:
        points += [(x, y - ci95), (x, y), (x, y + ci95)]
    points = axes.transData.transform(points)  # (3 N, 2)
    taken = []
    pixels = figure.dpi / 72  # per point
    for x, y, _, name in sorted(labels):
        label = axes.annotate(
            name,
            (x, y),
            (0, 0),
            textcoords="offset points",
            fontsize=8,
            ha="center",
            va="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "alpha": 0.5, "shrinkB": 3},
        )
        box = label.get_window_extent()

        def cost(offset: tuple[float, float], box=box) -> float:
            """The number of names and points that the name covers; infinite outside."""
            moved = box.translated(pixels * offset[0], pixels * offset[1])
            padded = moved.padded(4)
            covered = ((padded.min < points) & (points < padded.max)).all(axis=1).sum()
            covered += moved.count_overlaps(taken)
            is_inside = all(inside.contains(*corner) for corner in moved.corners())
            return covered if is_inside else math.inf

        offsets = []
        for radius, angle in product(RADII, DIRECTIONS):
            # Names are wider than high, so they need more room at the sides.
            across = math.cos(math.radians(angle)) * (radius + box.width / pixels / 2)
            offsets.append((across, math.sin(math.radians(angle)) * radius))
        best = min(offsets, key=cost)
        label.xyann = best
        taken.append(box.translated(pixels * best[0], pixels * best[1]))


def draw_curves(
    groups: Groups, curve_of: Callable[[Run], Curve], xlabel: str, ylabel: str
) -> Figure:
    """Plots a curve for each variant, the mean over its seeds."""
    figure, axes = new_figure(xlabel, ylabel)
    for number, (name, runs) in enumerate(groups.items()):
        curve = mean_curve([curve_of(run) for run in runs])
        marker = MARKERS[number // len(COLORS) % len(MARKERS)]
        style = {"color": COLORS[number % len(COLORS)], "markersize": 3, "linewidth": 1}
        axes.plot(curve.keys(), curve.values(), marker, label=name, **style)
    figure.legend(loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    return figure


def mean_curve(curves: list[Curve]) -> Curve:
    """Averages y over the curves at each x that all of them have."""
    # Seeds may have been evaluated at other steps, or for longer.
    common = set.intersection(*map(set, curves))
    return {x: fmean(curve[x] for curve in curves) for x in sorted(common)}
