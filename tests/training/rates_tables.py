"""Create the tables and the figure in docs/rates.md from docs/results/rates/runs.jsonl.

    python -m tests.training.rates_tables

prints the tables and draws docs/results/rates/width.svg. Each line of runs.jsonl contains a model,
its learning rates and its bits per byte on held-out text.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from run import ROOT
from run.instantiate import instantiate
from tests.conftest import settings_of
from training.rates import Reference

FOLDER = ROOT / "docs" / "results" / "rates"
TODAY = "today"  # runs with the current update rule and the current ratios of rates
BEFORE = "update of RMS 0.2"


class Case(NamedTuple):
    """A training setup, whose runs differ only in their learning rates."""

    way: str
    optimizer: str
    attention: str
    dim: int
    depth: int
    batch_tokens: int
    steps: int
    seed: int


class Curve(NamedTuple):
    """The losses of a case by factor of the law's rate, and the parabola fitted to them."""

    losses: dict[float, float]
    best: float  # factor
    lowest: float  # loss
    at_one: float  # loss at the law's rates


def read_runs(path: Path = FOLDER / "runs.jsonl") -> dict[Case, dict[float, float]]:
    """The losses of each case by the learning rate of matrices."""
    cases = defaultdict(dict)
    for line in path.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        cases[Case(*(run[key] for key in Case._fields))][run["lr"]] = run["val_bpb"]
    return cases


def law(case: Case) -> float:
    """The learning rate of matrices that the law predicts for a case."""
    return unscaled(case) * reference_of(case).run_factor(case.dim, case.batch_tokens, case.steps)


def unscaled(case: Case) -> float:
    """The law's rate without the factor for batch, length and width; formerly always 0.02."""
    if case.way == BEFORE:
        return 0.02
    rate = settings_of(f"optimizer={case.optimizer}").optimizer["lr"]
    if case.optimizer == "adamw":
        rate *= reference_of(case).width_factor(case.dim)
    return rate


def reference_of(case: Case) -> Reference:
    tree = settings_of(f"optimizer={case.optimizer}").optimizer["reference"]
    return instantiate(tree, "training")


def fit_curve(by_rate: dict[float, float], rate: float) -> Curve | None:
    """Fit a parabola to the best rate and its neighbours; None if the best rate is at an edge."""
    losses = {tried / rate: loss for tried, loss in sorted(by_rate.items())}
    factors = list(losses)
    place = factors.index(min(losses, key=losses.get))
    if not 0 < place < len(factors) - 1:
        return None
    near = np.log2(factors[place - 1 : place + 2])
    values = [losses[factor] for factor in factors[place - 1 : place + 2]]
    parabola = np.polyfit(near, values, 2)
    optimum = -parabola[1] / (2 * parabola[0])
    # If factor 1 is not one of these rates, interpolate its loss.
    at_one = np.interp(0.0, np.log2(factors), list(losses.values()))
    if near[0] <= 0 <= near[-1]:
        at_one = np.polyval(parabola, 0.0)
    lowest = np.polyval(parabola, optimum)
    return Curve(losses, float(2**optimum), float(lowest), float(at_one))


def print_axis(name: str, cases: dict[Case, dict[float, float]], key: str) -> None:
    """Print a row of means over the seeds for each value of the field `key`.

    Cases whose best rate is at an edge of the range are omitted.
    """
    values = defaultdict(list)
    for case, by_rate in cases.items():
        if len(by_rate) >= 4 and fit_curve(by_rate, 1.0) is not None:
            values[getattr(case, key)].append(case)
    for value, members in sorted(values.items()):
        cells = []
        rates = [law] if members[0].optimizer == "adamw" else [law, unscaled]
        for rate in rates:
            curves = [fit_curve(cases[case], rate(case)) for case in members]
            best = math.exp(fmean(math.log(curve.best) for curve in curves))
            above = fmean(curve.at_one - curve.lowest for curve in curves)
            cells.append(f"{best:.2f} | {above:.4f}")
        lowest = fmean(curve.lowest for curve in curves)
        cells.append(f"{lowest:.4f} | {len(members)}")
        print(f"| {name} {value:,} | {' | '.join(cells)} |")


def print_attentions(cases: dict[Case, dict[float, float]]) -> None:
    """Print the losses of other attention variants at 0.5, 1 and 2 times the law's rates."""
    for case, by_rate in sorted(cases.items()):
        losses = {round(rate / law(case), 1): loss for rate, loss in by_rate.items()}
        curve = fit_curve(by_rate, law(case))
        if case.attention != "gqa" and {0.5, 1.0, 2.0} <= losses.keys():
            cells = [f"{losses[factor]:.4f}" for factor in (0.5, 1.0, 2.0)]
            best = "at an edge" if curve is None else f"{curve.best:.2f}"
            print(f"| {case.attention} | {case.dim} | {' | '.join(cells)} | {best} |")


def print_error(cases: dict[Case, dict[float, float]]) -> None:
    """Print how far the best rates are from the law: RMS of ln(best / law), over all cases."""
    errors = []
    for case, by_rate in cases.items():
        curve = fit_curve(by_rate, law(case)) if len(by_rate) >= 4 else None
        if curve is not None:
            errors.append(math.log(curve.best))
    rms = math.sqrt(fmean(error**2 for error in errors))
    print(f"\nRMS of ln(best rate / law) over {len(errors)} curves: {rms:.3f}")


def select(runs: dict[Case, dict[float, float]], **fields) -> dict[Case, dict[float, float]]:
    """Select the cases with these values; a tuple lists allowed values."""
    selected = {}
    for case, by_rate in runs.items():
        is_in = True
        for key, wanted in fields.items():
            value = getattr(case, key)
            is_in = is_in and (value in wanted if isinstance(wanted, tuple) else value == wanted)
        if is_in:
            selected[case] = by_rate
    return selected


def draw_widths(runs: dict[Case, dict[float, float]]) -> Figure:
    """Plot the loss against the factor of all rates, with and without the law, a line per width."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, way in zip(figure.subplots(1, 2, sharey=True), (BEFORE, TODAY), strict=True):
        cases = select(runs, way=way, optimizer="muon", attention="gqa", depth=4, steps=200)
        for case, by_rate in sorted(select(cases, batch_tokens=4096, seed=7).items()):
            rate = unscaled(case) if way == BEFORE else law(case)
            factors = [tried / rate for tried in sorted(by_rate)]
            losses = [by_rate[tried] for tried in sorted(by_rate)]
            axes.plot(factors, losses, "o-", markersize=3, label=f"dim {case.dim}")
        axes.axvline(1, color="gray", linewidth=1, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("factor of the default rates")
    left, right = figure.axes
    left.set_title("one rate for all sizes")
    right.set_title("rates by the law")
    left.set_ylabel("bits per byte")
    right.legend(fontsize=8, frameon=False)
    return figure


HEADERS = {
    "muon": """
| Muon | best factor | loss at factor 1, above the lowest | best factor without N | loss, above the lowest | lowest loss | seeds |
|---|---|---|---|---|---|---|""",
    "adamw": """
| AdamW | best factor | loss at factor 1, above the lowest | lowest loss | seeds |
|---|---|---|---|---|""",
    "attentions": """
| attention | dim | half the rates | the law's | twice the rates | best factor |
|---|---|---|---|---|---|""",
    BEFORE: """
| one rate for all sizes | best of the factors tried | its loss | loss at factor 1, above it |
|---|---|---|---|""",
}


def main(figure: Path = FOLDER / "width.svg") -> None:
    runs = read_runs()
    for optimizer in ("muon", "adamw"):
        plain = select(runs, way=TODAY, optimizer=optimizer, attention="gqa")
        short = select(plain, batch_tokens=4096, steps=200)
        small = select(plain, dim=64, depth=4)
        wide = {case: losses for case, losses in plain.items() if case.dim in (256, 768)}
        print(HEADERS[optimizer])
        print_axis("width", select(short, depth=4), "dim")
        if optimizer == "muon":
            print_axis("depth (dim 128)", select(short, dim=128), "depth")
        in_all = 400 * 4096
        equal = {c: v for c, v in small.items() if c.steps * c.batch_tokens == in_all}
        print_axis("1.6 M tokens (dim 64), batch", equal, "batch_tokens")
        print_axis("steps (dim 64)", select(small, batch_tokens=4096), "steps")
        print_axis("800 steps, dim", select(wide, batch_tokens=4096, steps=800), "dim")
        print_axis("100 steps of 65,536 tokens, dim", select(wide, batch_tokens=65536), "dim")
        print_error(plain)

    print(HEADERS["attentions"])
    print_attentions(select(runs, way=TODAY, optimizer="muon"))
    print(HEADERS[BEFORE])
    for case, losses in sorted(select(runs, way=BEFORE).items()):
        at_one = losses[0.02]
        best = min(losses, key=losses.get)
        print(
            f"| width {case.dim} | {best / 0.02:g} | {losses[best]:.4f} | "
            f"{at_one - losses[best]:.4f} |"
        )
    draw_widths(runs).savefig(figure)


if __name__ == "__main__":
    main()
