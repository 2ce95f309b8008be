"""The plots of a comparison: points with names beside them, and curves."""

from collections.abc import Callable, Iterable
from statistics import fmean

from matplotlib import color_sequences, cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

from tools.compare.runs import Curve, Groups, Run
from tools.compare.statistics import Estimate

SIZE = (5.6, 4.0)  # inches: its letters can be read on a screen of 400 pixels
COLORS = color_sequences["petroff10"]  # told apart by color-blind readers: 2107.02270
# Ten colors with the first marker and line, then with the next.
STYLES = cycler(marker=["o", "s", "^"], linestyle=["-", "--", ":"]) * cycler(color=COLORS)
LABEL_GAP = 0.055  # of the height of a plot, from a name to the next
in_bytes = EngFormatter(unit="B", places=1)  # 66048 -> 66.0 kB


def new_figure(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_prop_cycle(STYLES)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_points(
    sizes: dict[str, int],
    values: dict[str, Estimate],
    ylabel: str,
    ylim: tuple[float, float] | None = None,
) -> Figure:
    """Plots values with their 95 % intervals, by name, against cache bytes on a log axis.

    Intervals are cut off at `ylim`, which is for values that have bounds.
    """
    figure, axes = new_figure("cache at full context, bf16", ylabel)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.minorticks_off()
    points = []
    positions = spread(sizes, values)
    for name, value in values.items():
        x = positions[name]
        marker, *_ = axes.errorbar(x, value.mean, value.ci95, fmt="o", capsize=2, markersize=5)
        points.append((value.mean, x, name, marker.get_color()))
    axes.set_xlim(min(positions.values()) / 1.5, max(positions.values()) * 1.5)
    if ylim is not None:
        axes.set_ylim(ylim)
    label_points(axes, sorted(points))
    return figure


def spread(sizes: dict[str, int], names: Iterable[str]) -> dict[str, float]:
    """Where names are drawn on a log axis: at their sizes, and those of about equal sizes apart."""
    positions = {}
    x = 0.0
    for name in sorted(names, key=sizes.get):
        x = max(sizes[name], 1.04 * x)
        positions[name] = x
    return positions


def label_points(axes: Axes, points: list[tuple[float, float, str, str]]) -> None:
    """Writes names on the right of the plot, with a line to each point (y, x, name, color).

    `points` ascend. A name is at the height of its point, or as far above the one below it and
    below the top of the plot as it needs.
    """
    bottom, top = axes.get_ylim()
    gap = min(LABEL_GAP, 1 / len(points))
    height = -gap
    for index, (y, x, name, color) in enumerate(points):
        highest = 1 - gap * (len(points) - 1 - index)
        own_height = (y - bottom) / (top - bottom)
        height = min(highest, max(height + gap, own_height))
        axes.annotate(
            name,
            (x, y),
            (1.02, height),
            textcoords="axes fraction",
            fontsize=8,
            va="center",
            # The line begins at the left edge of the name, so that it crosses no other name.
            arrowprops={"arrowstyle": "-", "relpos": (0, 0.5), "linewidth": 0.5, "color": color},
        )


def draw_curves(
    groups: Groups, curve_of: Callable[[Run], Curve], xlabel: str, ylabel: str
) -> Figure:
    """Plots a curve for each variant, the mean over its seeds."""
    figure, axes = new_figure(xlabel, ylabel)
    for name, runs in groups.items():
        curve = mean_curve([curve_of(run) for run in runs])
        axes.plot(curve.keys(), curve.values(), label=name, markersize=3, linewidth=1)
    figure.legend(loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    return figure


def mean_curve(curves: list[Curve]) -> Curve:
    """Averages y over the curves at each x that all of them have."""
    # Seeds may have been evaluated at other steps, or for longer.
    common = set.intersection(*map(set, curves))
    return {x: fmean(curve[x] for curve in curves) for x in sorted(common)}
