"""Compare the law of learning rates with the best rates that were measured (docs/rates.md).

    python -m docs.results.rates.fit

prints the tables in README.md from runs.jsonl and depth.jsonl, and how well the law and other forms predict runs to
which they were not fitted, and draws width.svg.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import least_squares

from tools.compare.plots import to_svg
from training.rates import Reference

FOLDER = Path(__file__).parent
LR = {"muon": 0.035, "adamw": 5.2e-3}
MUON = Reference(
    dim=128, depth=4, batch_tokens=4096, tokens=4e6, embedding=2.6, head=0.23, vectors=0.46
)


class Setup(NamedTuple):
    """A model and the size of its run."""

    optimizer: str
    dim: int
    depth: int
    batch_tokens: int
    steps: int


# Losses in bits per byte by setup, seed and learning rate of the matrices.
Runs = dict[Setup, dict[int, dict[float, float]]]


class Optimum(NamedTuple):
    """The minimum of the parabola through the best rate and its two neighbours."""

    rate: float
    loss: float
    loss_at_law: float


def law(setup: Setup) -> float:
    """Return the rate of matrices that training/rates.py sets."""
    if setup.optimizer == "adamw":
        return LR["adamw"] * MUON.width_factor(setup.dim)
    return LR["muon"] * MUON.run_factor(setup.dim, setup.depth, setup.batch_tokens, setup.steps)


def optimum(losses: dict[float, float], expected: float) -> Optimum | None:
    """Return the optimum of losses by rate; None if the best rate is the lowest or the highest."""
    rates = sorted(losses)
    best = rates.index(min(losses, key=losses.get))
    if not 0 < best < len(rates) - 1:
        return None
    near = rates[best - 1 : best + 2]
    parabola = np.polyfit(np.log(near), [losses[rate] for rate in near], 2)
    place = -parabola[1] / (2 * parabola[0])
    # Beyond the three rates, interpolate between the measured losses.
    at_law = np.interp(math.log(expected), np.log(rates), [losses[rate] for rate in rates])
    if near[0] <= expected <= near[-1]:
        at_law = np.polyval(parabola, math.log(expected))
    return Optimum(math.exp(place), float(np.polyval(parabola, place)), float(at_law))


def read_runs(attention: str = "gqa", momentum: float = 0.85) -> Runs:
    """Return the losses of a preset at the current ratios between the rates."""
    runs = defaultdict(lambda: defaultdict(dict))
    lines = []
    for name in ("runs.jsonl", "depth.jsonl"):
        lines += (FOLDER / name).read_text(encoding="utf-8").splitlines()
    for run in map(json.loads, lines):
        # The ratios changed by 4 % after most runs of gqa. Runs of one curve have equal ratios.
        has_ratios = run["attention"] == "gqa" or run["embedding_lr"] > 2.55 * run["lr"]
        is_wanted = run["attention"] == attention and run.get("momentum", 0.85) == momentum
        if run["way"] == "today" and is_wanted and has_ratios:
            setup = Setup(*(run[key] for key in Setup._fields))
            runs[setup][run["seed"]][run["lr"]] = run["val_bpb"]
    return runs


def read_optima(momentum: float = 0.85) -> dict[Setup, list[Optimum]]:
    """Return the optima of gqa for each setup, one per seed with enough rates."""
    optima = {}
    for setup, by_seed in sorted(read_runs(momentum=momentum).items()):
        found = [optimum(each, law(setup)) for each in by_seed.values()]
        optima[setup] = [each for each in found if each is not None]
    return {setup: found for setup, found in optima.items() if found}


def print_table(optima: dict[Setup, list[Optimum]], optimizer: str) -> None:
    print(f"\n| {optimizer}: dim, depth | batch | steps | best factor | above | lowest | seeds |")
    print("|---|---|---|---|---|---|---|")
    for setup, found in optima.items():
        if setup.optimizer == optimizer:
            factor = math.exp(fmean(math.log(each.rate / law(setup)) for each in found))
            above = fmean(each.loss_at_law - each.loss for each in found)
            lowest = fmean(each.loss for each in found)
            print(
                f"| {setup.dim}, {setup.depth} | {setup.batch_tokens:,} | {setup.steps:,} | "
                f"{factor:.2f} | {above:.4f} | {lowest:.4f} | {len(found)} |"
            )


def print_attentions() -> None:
    print(
        "\n| attention | dim | losses by factor of the law's rate | best factor |\n|---|---|---|---|"
    )
    for attention in ("dsa", "fox", "gated", "kda", "mamba2", "mla"):
        for setup, by_seed in sorted(read_runs(attention).items()):
            (losses,) = by_seed.values()
            best = optimum(losses, law(setup))
            factor = "at an edge" if best is None else f"{best.rate / law(setup):.2f}"
            cells = [f"{losses[rate]:.4f} ({rate / law(setup):.2f})" for rate in sorted(losses)]
            print(f"| {attention} | {setup.dim} | {', '.join(cells)} | {factor} |")


def draw_widths() -> None:
    """Plot the loss against the factor of all rates in width.svg, with a line for each width."""
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.axvline(1, color="gray", linewidth=1, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("factor of the law's rates")
    axes.set_ylabel("bits per byte after 200 steps")
    for setup, by_seed in sorted(read_runs().items()):
        if setup[2:] == (4, 4096, 200) and setup.optimizer == "muon":
            rates = sorted(by_seed[7])
            factors = [rate / law(setup) for rate in rates]
            losses = [by_seed[7][rate] for rate in rates]
            axes.plot(factors, losses, "o-", markersize=3, label=f"dim {setup.dim}")
    axes.legend(fontsize=8, frameon=False)
    (FOLDER / "width.svg").write_text(to_svg(figure, "width"), encoding="utf-8")


class Form(NamedTuple):
    """A formula for the logarithm of the best rate, and the values from which its fit starts.

    It takes the constants and arrays of dim x depth / 512, batch / 4,096 and tokens / 4 M.
    """

    value: Callable[..., np.ndarray]
    start: list[float]


def power(constants, size, batch, tokens):
    lr, of_batch, of_tokens, of_size = constants
    return lr + of_batch * np.log(batch) - of_tokens * np.log(tokens) - of_size * np.log(size)


def published(constants, size, batch, tokens):
    lr, of_size = constants
    return power([lr, 0.5, 0.32, of_size], size, batch, tokens)


def capped(constants, size, batch, tokens):
    """The law. The last constant is the logarithm of its fewest steps."""
    *others, log_steps = constants
    largest = tokens * 4e6 / 4096 / np.exp(log_steps)
    # A smooth minimum, so that the fit can move the cap.
    batch = (batch**-8.0 + largest**-8.0) ** (-1 / 8)
    return published(others, size, batch, tokens)


def noise_scale(constants, size, batch, tokens):
    """The earlier law: 1 / sqrt(1 + N / B)."""
    lr, log_scale, of_tokens, of_size = constants
    noise = np.exp(log_scale) * tokens**of_tokens * size**of_size
    return lr - 0.5 * np.log1p(noise / batch)


def rise_and_fall(constants, size, batch, tokens):
    """2405.14578: the rate falls again in batches beyond the noise scale."""
    lr, log_scale, of_tokens, of_size = constants
    noise = np.exp(log_scale) * tokens**of_tokens * size**of_size
    return lr - np.log(np.sqrt(noise / batch) + np.sqrt(batch / noise))


FORMS = {
    "the law": Form(capped, [-3.4, 0.2, math.log(150)]),
    "the law without its cap": Form(published, [-3.4, 0.2]),
    "power law, all exponents fitted": Form(power, [-3.4, 0.5, 0.3, 0.2]),
    "noise scale (the earlier law)": Form(noise_scale, [-2.2, 2.3, 0.75, 0.5]),
    "noise scale, rise and fall": Form(rise_and_fall, [-2.4, 2.4, 0.75, 0.5]),
}


class Measured:
    """The best rates of Muon, with the sizes of their setups."""

    def __init__(self, optima: dict[Setup, list[Optimum]]):
        setups = [setup for setup in optima if setup.optimizer == "muon"]
        self.dim = np.array([setup.dim for setup in setups])
        self.size = self.dim * np.array([setup.depth for setup in setups]) / 512
        self.batch = np.array([setup.batch_tokens / 4096 for setup in setups])
        self.steps = np.array([setup.steps for setup in setups])
        self.tokens = self.batch * 4096 * self.steps / 4e6
        means = [fmean(math.log(each.rate) for each in optima[setup]) for setup in setups]
        self.best = np.array(means)

    def errors(self, form: Form, constants: Iterable[float], rows: np.ndarray) -> np.ndarray:
        sizes = (self.size[rows], self.batch[rows], self.tokens[rows])
        return form.value(constants, *sizes) - self.best[rows]

    def fit(self, form: Form, rows: np.ndarray) -> np.ndarray:
        return least_squares(lambda x: self.errors(form, x, rows), form.start).x

    def held_out(self, form: Form, fitted: np.ndarray, rest: np.ndarray) -> float:
        """Return the RMS error in `rest` after a fit to `fitted`."""
        return rms(self.errors(form, self.fit(form, fitted), rest))

    def leave_one_out(self, form: Form, rows: np.ndarray) -> float:
        errors = []
        for row in np.flatnonzero(rows):
            others = rows.copy()
            others[row] = False
            errors.append(self.errors(form, self.fit(form, others), np.array([row]))[0])
        return rms(np.array(errors))


def rms(values: np.ndarray) -> float:
    return math.sqrt(np.mean(np.square(values)))


def print_forms(measured: Measured) -> None:
    every = np.ones(len(measured.best), dtype=bool)
    long = measured.steps >= 100
    small = (measured.dim <= 256) & (measured.tokens < 0.5)
    print("\n| form | constants | all | leave one out | the same, 100 steps or more | hold-out |")
    print("|---|---|---|---|---|---|")
    for name, form in FORMS.items():
        cells = [
            measured.held_out(form, every, every),
            measured.leave_one_out(form, every),
            measured.leave_one_out(form, long),
            measured.held_out(form, small, ~small),
        ]
        print(f"| {name} | {len(form.start)} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")


if __name__ == "__main__":
    optima = read_optima()
    print_table(optima, "muon")
    print_table(read_optima(momentum=0.95), "muon")
    print_table(optima, "adamw")
    print_attentions()
    print_forms(Measured(optima))
    draw_widths()
