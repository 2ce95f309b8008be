"""The plots of a comparison: a row of seeds for each variant, and differences by model size."""

import math
import re
from io import StringIO
from statistics import fmean

from matplotlib import color_sequences, cycler, rc_context
from matplotlib.figure import Figure

from tools.compare.statistics import Samples, Verdict

# In inches. 30 rows fit on a screen.
WIDTH = 4.6
ROW = 0.22
MAX_ROWS_HEIGHT = 4.2
COLORS = color_sequences["petroff10"]  # distinct for color-blind readers: 2107.02270
VERDICT_COLORS = {"better": COLORS[0], "worse": COLORS[6]}  # blue, orange


def draw_forest(
    samples: Samples,
    baseline: str,
    xlabel: str,
    verdicts: dict[str, Verdict] | None = None,
    margin: float | None = None,
) -> Figure:
    """Plot a row for each variant, with a dot for each seed.

    With verdicts, dots are differences from the mean of the baseline, and intervals are plotted.
    """
    height = 1.0 + len(samples) * min(ROW, MAX_ROWS_HEIGHT / len(samples))
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    center = 0.0
    if verdicts is not None:
        center = fmean(samples[baseline])
        axes.axvline(0.0, color="gray", linewidth=1)
    if margin is not None:
        axes.axvline(margin, color="gray", linewidth=1, linestyle=":")

    for row, (name, values) in enumerate(samples.items()):
        axes.plot(
            [value - center for value in values], [row] * len(values), ".k", markersize=3, zorder=3
        )
        verdict = None if verdicts is None else verdicts.get(name)
        if verdict is not None and math.isfinite(verdict.low):
            color = VERDICT_COLORS.get(verdict.text, "gray")
            axes.plot([verdict.low, verdict.high], [row] * 2, color=color, marker="|")
            axes.plot(verdict.difference, row, "D", color=color, markersize=3.5)

    labels = [f"{name} (baseline)" if name == baseline else name for name in samples]
    axes.set_yticks(range(len(samples)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel(xlabel, fontsize=8)
    return figure


def draw_ladder(flops: list[float], verdicts: dict[str, list[Verdict]], ylabel: str) -> Figure:
    """Plot each variant's difference from the baseline, with its interval, against compute."""
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(cycler(marker=["o", "s", "^"]) * cycler(color=COLORS))
    axes.spines[["top", "right"]].set_visible(False)
    axes.axhline(0.0, color="gray", linewidth=1)
    axes.set_xscale("log")
    for number, (name, each) in enumerate(verdicts.items()):
        # Side by side, so that intervals do not hide each other.
        places = [value * 1.04 ** (number - len(verdicts) / 2) for value in flops]
        (line,) = axes.plot(
            places, [verdict.difference for verdict in each], label=name, markersize=4, linewidth=1
        )
        lows = [verdict.low for verdict in each]
        highs = [verdict.high for verdict in each]
        axes.vlines(places, lows, highs, color=line.get_color(), linewidth=1)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("training FLOPs of a run", fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    figure.legend(loc="outside upper center", ncols=4, fontsize=7, frameon=False)
    return figure


def to_svg(figure: Figure, salt: str) -> str:
    """Return the figure as SVG. Black becomes the color of the surrounding text.

    `salt` makes the ids in the SVG reproducible, and must differ between the figures of a page.
    """
    buffer = StringIO()
    with rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    _, tag, drawing = buffer.getvalue().partition("<svg")
    drawing = re.sub("<metadata>.*</metadata>", "", drawing, flags=re.DOTALL)
    return tag + drawing.replace("#000000", "currentColor")
