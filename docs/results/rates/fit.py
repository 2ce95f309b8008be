"""Compare the scaling rule of docs/rates.md with the best learning rates that were measured.

    python -m docs.results.rates.fit

prints the first five tables of README.md from runs.jsonl and depth.jsonl, the constants of the fits
and the intervals for the rates of other projects, and draws width.svg.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import least_squares

from run.compose import compose
from run.instantiate import instantiate
from tools.compare.plots import to_svg

FOLDER = Path(__file__).parent
OPTIMIZERS = {name: compose([f"optimizer={name}"]).optimizer for name in ("muon", "adamw")}
# The runs of other projects, by name: dim x depth, tokens per step and tokens in total.
OTHERS = {
    "modded-nanogpt": (768 * 12, 524_288, 1.70e9),
    "nanochat, d12": (768 * 12, 524_288, 1.32e9),
    "nanochat, d20": (1280 * 20, 1_048_576, 5.22e9),
}
MIN_STEPS = 150  # as in training/rates.py
RESAMPLES = 2000


class Setup(NamedTuple):
    """An optimizer, a model and the size of its run."""

    optimizer: str
    dim: int
    depth: int
    batch_tokens: int
    steps: int


# Losses in bits per byte by setup, seed and learning rate of the matrices.
Runs = dict[Setup, dict[int, dict[float, float]]]


class Optimum(NamedTuple):
    """The minimum of the parabola through the losses at the best rate and its two neighbors."""

    rate: float
    loss: float
    loss_at_rule: float


def rule_rate(setup: Setup) -> float:
    """Return the peak rate of matrices that training/rates.py sets."""
    options = OPTIMIZERS[setup.optimizer]
    reference = instantiate(options["reference"], "training")
    rate = options["lr"] * reference.run_factor(*setup[1:])
    if setup.optimizer == "adamw":
        rate *= reference.width_factor(setup.dim)
    return rate


def optimum(losses: dict[float, float], expected: float) -> Optimum | None:
    """Return the optimum of losses by rate; None if the best rate is the lowest or the highest."""
    rates = sorted(losses)
    best = rates.index(min(losses, key=losses.get))
    if not 0 < best < len(rates) - 1:
        return None
    neighbors = rates[best - 1 : best + 2]
    parabola = np.polyfit(np.log(neighbors), [losses[rate] for rate in neighbors], 2)
    minimum = -parabola[1] / (2 * parabola[0])
    # If the rule's rate is outside these three, interpolate between the measured losses.
    at_rule = np.interp(math.log(expected), np.log(rates), [losses[rate] for rate in rates])
    if neighbors[0] <= expected <= neighbors[-1]:
        at_rule = np.polyval(parabola, math.log(expected))
    return Optimum(math.exp(minimum), float(np.polyval(parabola, minimum)), float(at_rule))


def read_runs(attention: str = "gqa", momentum: float = 0.85) -> Runs:
    """Return a preset's losses; except for gqa, only at the current ratios of the roles' rates."""
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
    """Return the optima of gqa by setup, one for each seed whose best rate is not at an edge."""
    optima = {}
    for setup, by_seed in sorted(read_runs(momentum=momentum).items()):
        found = [optimum(each, rule_rate(setup)) for each in by_seed.values()]
        optima[setup] = [each for each in found if each is not None]
    return {setup: found for setup, found in optima.items() if found}


def print_table(optima: dict[Setup, list[Optimum]], optimizer: str) -> None:
    columns = ("best factor", "loss at the rule's rate, above the lowest", "lowest loss", "seeds")
    print(f"\n{optimizer}\n| dim, depth | batch | steps | {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|")
    for setup, found in optima.items():
        if setup.optimizer == optimizer:
            factor = math.exp(fmean(math.log(each.rate / rule_rate(setup)) for each in found))
            above = fmean(each.loss_at_rule - each.loss for each in found)
            lowest = fmean(each.loss for each in found)
            print(
                f"| {setup.dim}, {setup.depth} | {setup.batch_tokens:,} | {setup.steps:,} | "
                f"{factor:.2f} | {above:.4f} | {lowest:.4f} | {len(found)} |"
            )


def print_attentions() -> None:
    print("\n| attention | dim | losses by factor of the rule's rate | best factor |")
    print("|---|---|---|---|")
    for attention in ("dsa", "fox", "gated", "kda", "mamba2", "mla"):
        for setup, by_seed in sorted(read_runs(attention).items()):
            (losses,) = by_seed.values()
            best = optimum(losses, rule_rate(setup))
            factor = "at an edge" if best is None else f"{best.rate / rule_rate(setup):.2f}"
            cells = [
                f"{losses[rate]:.4f} ({rate / rule_rate(setup):.2f})" for rate in sorted(losses)
            ]
            print(f"| {attention} | {setup.dim} | {', '.join(cells)} | {factor} |")


def draw_widths() -> None:
    """Draw width.svg: the loss over the factor of all rates, with a line for each width."""
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.axvline(1, color="gray", linewidth=1, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("factor of the rule's rates")
    axes.set_ylabel("bits per byte after 200 steps")
    for setup, by_seed in sorted(read_runs().items()):
        if setup[2:] == (4, 4096, 200) and setup.optimizer == "muon":
            rates = sorted(by_seed[7])
            factors = [rate / rule_rate(setup) for rate in rates]
            losses = [by_seed[7][rate] for rate in rates]
            axes.plot(factors, losses, "o-", markersize=3, label=f"dim {setup.dim}")
    axes.legend(fontsize=8, frameon=False)
    (FOLDER / "width.svg").write_text(to_svg(figure, "width"), encoding="utf-8")


class Sizes(NamedTuple):
    """Arrays with a value for each setup, relative to the reference of the rule."""

    dim: np.ndarray
    depth: np.ndarray
    batch: np.ndarray
    tokens: np.ndarray


class Form(NamedTuple):
    """A formula for the logarithm of the best rate, and the constants where its fit starts."""

    value: Callable[[np.ndarray, Sizes], np.ndarray]
    start: list[float]


def power(x: np.ndarray, at: Sizes) -> np.ndarray:
    return (
        x[0] + x[1] * np.log(at.batch) + x[2] * np.log(at.tokens) + x[3] * np.log(at.dim * at.depth)
    )


def capped(x: np.ndarray, at: Sizes) -> np.ndarray:
    """power() with the batch size capped, so that at least exp(last constant) steps remain."""
    largest = at.tokens * (4e6 / 4096) / np.exp(x[4])
    # A smooth minimum, so that the fit can move the cap.
    batch = (at.batch**-8.0 + largest**-8.0) ** (-1 / 8)
    return power(x, at._replace(batch=batch))


def noise_scale(x: np.ndarray, at: Sizes) -> np.ndarray:
    """The earlier rule, with the factor 1 / sqrt(1 + noise / batch) and no factor for the depth."""
    noise = np.exp(x[1]) * at.tokens ** x[2] * at.dim ** x[3]
    return x[0] - 0.5 * np.log1p(noise / at.batch)


def rise_and_fall(x: np.ndarray, at: Sizes) -> np.ndarray:
    """2405.14578: the rate falls again for batches larger than the noise scale."""
    noise = np.exp(x[1]) * at.tokens ** x[2] * (at.dim * at.depth) ** x[3]
    return x[0] - np.log(np.sqrt(noise / at.batch) + np.sqrt(at.batch / noise))


CAP = math.log(MIN_STEPS)
FREE = Form(lambda x, at: capped([*x, CAP], at), [-3.4, 0.5, -0.3, -0.2])
FORMS = {
    "the rule": Form(lambda x, at: capped([x[0], 0.5, -0.32, x[1], x[2]], at), [-3.4, -0.2, CAP]),
    "the rule without its cap": Form(
        lambda x, at: power([x[0], 0.5, -0.32, x[1]], at), [-3.4, -0.2]
    ),
    "the rule with free exponents and a cap of 150 steps": FREE,
    "free exponents, without a cap": Form(power, [-3.4, 0.5, -0.3, -0.2]),
    "noise scale (the earlier rule)": Form(noise_scale, [-2.2, 2.3, 0.75, 0.5]),
    "noise scale, rise and fall": Form(rise_and_fall, [-2.4, 2.4, 0.75, 0.5]),
}


class Measured:
    """The best rates of Muon, with the sizes of their setups."""

    def __init__(self, optima: dict[Setup, list[Optimum]]):
        setups = [setup for setup in optima if setup.optimizer == "muon"]
        dim, depth, batch, steps = np.array([setup[1:] for setup in setups], dtype=float).T
        self.steps = steps
        self.sizes = Sizes(dim / 128, depth / 4, batch / 4096, batch * steps / 4e6)
        means = [fmean(math.log(each.rate) for each in optima[setup]) for setup in setups]
        self.best = np.array(means)

    def errors(self, form: Form, constants: np.ndarray, rows: np.ndarray) -> np.ndarray:
        sizes = Sizes(*(each[rows] for each in self.sizes))
        return form.value(constants, sizes) - self.best[rows]

    def fit(self, form: Form, rows: np.ndarray) -> np.ndarray:
        return least_squares(lambda x: self.errors(form, x, rows), form.start).x

    def held_out(self, form: Form, fitted: np.ndarray, rest: np.ndarray) -> float:
        """Return the RMS error in `rest` after a fit to `fitted`."""
        return rms(self.errors(form, self.fit(form, fitted), rest))

    def leave_one_out(self, form: Form, rows: np.ndarray) -> float:
        errors = []
        for row in rows:
            constants = self.fit(form, rows[rows != row])
            errors.append(self.errors(form, constants, np.array([row]))[0])
        return rms(np.array(errors))


def rms(values: np.ndarray) -> float:
    return math.sqrt(np.mean(np.square(values)))


def print_forms(measured: Measured) -> None:
    every = np.arange(len(measured.best))
    long = np.flatnonzero(measured.steps >= 100)
    small = (measured.sizes.dim <= 2) & (measured.sizes.tokens < 0.5)
    rest = np.flatnonzero(~small)
    small = np.flatnonzero(small)
    print("\n| form | constants | all | leave one out | 100 steps or more | hold-out |")
    print("|---|---|---|---|---|---|")
    for name, form in FORMS.items():
        cells = [
            measured.held_out(form, every, every),
            measured.leave_one_out(form, every),
            measured.leave_one_out(form, long),
            measured.held_out(form, small, rest),
        ]
        print(f"| {name} | {len(form.start)} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    for name, form in FORMS.items():
        fits = [np.round(measured.fit(form, rows), 2) for rows in (every, small)]
        print(f"{name}: constants {fits[0]}, and for the hold-out {fits[1]}")


def print_intervals(measured: Measured) -> None:
    """Resample the setups; print the exponents' standard errors and intervals for OTHERS' rates."""
    generator = np.random.default_rng(0)
    count = len(measured.best)
    fits = np.array(
        [measured.fit(FREE, generator.integers(0, count, count)) for _ in range(RESAMPLES)]
    )
    print(f"\nfree exponents {measured.fit(FREE, np.arange(count))[1:].round(2)}")
    low, high = np.percentile(fits, [16, 84], axis=0)
    print(f"standard errors {((high - low) / 2)[1:].round(2)}")
    for name, (size, batch, tokens) in OTHERS.items():
        at = Sizes(*(np.array([each]) for each in (size / 512, 1.0, batch / 4096, tokens / 4e6)))
        rates = [math.exp(FREE.value(fit, at)[0]) for fit in fits]
        low, median, high = np.percentile(rates, [5, 50, 95])
        set_by_rule = rule_rate(Setup("muon", size, 1, batch, tokens / batch))
        print(
            f"{name}: by the rule {set_by_rule:.3f}, resampled {median:.3f} [{low:.3f}, {high:.3f}]"
        )


if __name__ == "__main__":
    optima = read_optima()
    print_table(optima, "muon")
    print("\nwith a momentum of 0.95:")
    print_table(read_optima(momentum=0.95), "muon")
    print_table(optima, "adamw")
    print_attentions()
    print_forms(Measured(optima))
    print_intervals(Measured(optima))
    draw_widths()
