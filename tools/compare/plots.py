"""The plots of a comparison: points with intervals, and curves."""

from collections.abc import Callable
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
in_bytes = EngFormatter(unit="B", places=1)  # 66048 -> 66.0 kB


def new_figure(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_prop_cycle(STYLES)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_points(cache_bytes: dict[str, int], estimates: dict[str, Estimate], ylabel: str) -> Figure:
    """Plot estimates with their 95 % intervals, by name, against cache bytes on a log axis."""
    figure, axes = new_figure("cache at full context, bf16", ylabel)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.minorticks_off()

    # Caches of about the same size are drawn side by side.
    positions = {}
    x = 0.0
    for name in sorted(estimates, key=cache_bytes.get):
        x = max(cache_bytes[name], 1.04 * x)
        positions[name] = x

    # The legend has the names in the order of their points, from top to bottom.
    for name in sorted(estimates, key=estimates.get, reverse=True):
        mean, ci95, _ = estimates[name]
        axes.errorbar(positions[name], mean, ci95, label=name, capsize=2, linestyle="none")
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure


def draw_curves(
    groups: Groups, curve_of: Callable[[Run], Curve], xlabel: str, ylabel: str
) -> Figure:
    """Plot a curve for each variant, the mean over its seeds."""
    figure, axes = new_figure(xlabel, ylabel)
    for name, runs in groups.items():
        curve = mean_curve([curve_of(run) for run in runs])
        axes.plot(curve.keys(), curve.values(), label=name, markersize=3, linewidth=1)
    figure.legend(loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    return figure


def mean_curve(curves: list[Curve]) -> Curve:
    """Average y over the curves at each x that all of them have."""
    # Seeds may have been evaluated at other steps, or for longer.
    common = set.intersection(*map(set, curves))
    return {x: fmean(curve[x] for curve in curves) for x in sorted(common)}
