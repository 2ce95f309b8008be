"""Scale: a power law of loss against training FLOP for each variant, and where the laws lead.

L(C) = E + A C^-alpha, Hoffmann et al., 2203.15556. All variants have one irreducible loss E, and
each its own A and alpha.
"""

from operator import attrgetter

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import least_squares

from tools.compare.plots import new_figure
from tools.compare.runs import Groups, Run
from tools.compare.statistics import Values, Verdict, compare_to_baseline, estimate

GROWTH = 10  # how many times the largest size the laws are extrapolated to
HEADER = ["variant", "difference at the largest size", f"at {GROWTH} times that", "ranking"]


def fit_report(runs_by_variant: Groups) -> tuple[str, list[str], list[list], Figure] | None:
    """Fit the laws -> a summary, the header and rows of a table, and a plot.

    The first variant is the baseline. Returns None where all runs of a variant have one size.
    Raises ValueError where sizes or seeds are too few, or runs are missing.
    """
    # Seeds are pairs, so each must have trained every size of every variant.
    tables = [losses_by_size(runs) for runs in runs_by_variant.values()]
    num_sizes = {len(table) for table in tables}
    if num_sizes <= {1}:
        return None
    seeds = set()
    for table in tables:
        seeds.update(tuple(by_seed) for by_seed in table.values())
    is_complete = len(num_sizes) == 1 and len(seeds) == 1
    if not is_complete or min(num_sizes) < 3 or len(min(seeds)) < 2:
        raise ValueError(
            "no law of size (fewer than 3 sizes or 2 seeds, or they differ between variants). "
            "fix: train what is missing"
        )
    sizes = np.array([list(table) for table in tables])  # (V, K)
    losses = [[list(by_seed.values()) for by_seed in table.values()] for table in tables]
    losses = np.array(losses).transpose(2, 0, 1)  # (S, V, K)
    extrapolated = extrapolate(sizes / sizes.max(), losses)  # (S, V)

    # Judge the differences at the largest size, and those beyond it.
    names = [*runs_by_variant]
    at_target = judge(names, extrapolated)
    rows = []
    for name, largest in judge(names, losses[:, :, -1]).items():
        target = at_target[name]
        cells = [largest.difference.text("+"), target.difference.text("+")]
        rows.append([name, *cells, ranking(largest.text, target.text)])

    text = f"Whether differences to {names[0]} at {sizes.max():.2g} training FLOP hold beyond."
    return text, HEADER, rows, draw(names, sizes, losses, extrapolated)


def losses_by_size(runs: list[Run]) -> dict[float, Values]:
    """Map the training FLOP of runs to the final losses by seed, both ascending."""
    losses = {}
    for run in sorted(runs, key=attrgetter("seed")):
        size = run.model.training_flops() * run.last["tokens"]
        losses.setdefault(size, {})[run.seed] = run.loss
    return dict(sorted(losses.items()))


def law(fit: np.ndarray, sizes: np.ndarray | float) -> np.ndarray:
    """E, A (V) and alpha (V) in one array, sizes (V, K) -> losses (V, K)."""
    scales, exponents = np.split(fit[1:, None], 2)
    return fit[0] + scales * sizes**-exponents


def fit_law(sizes: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Fit `law` to losses (V, K) by least squares of log loss, with E, A and alpha of at least 0.

    Sizes are relative to the largest, so A is the loss above E there.
    """

    def residuals(fit: np.ndarray) -> np.ndarray:
        return np.log(law(fit, sizes) / losses).ravel()

    # Starts at 0.2 to 0.95 of the lowest loss lead to the same fits of 300 laws drawn at random.
    irreducible = losses.min() / 2
    scales = losses[:, -1] - irreducible
    exponents = np.full_like(scales, 0.3)
    start = np.hstack([irreducible, scales, exponents])
    return least_squares(residuals, start, bounds=(0, np.inf), xtol=1e-12, ftol=1e-12).x


def extrapolate(sizes: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Relative sizes (V, K), losses (S, V, K) -> losses (S, V) at GROWTH times the largest size.

    They are the pseudo-values of the jackknife: S times the extrapolation of all seeds, less S - 1
    times that of all but one. Tukey (Ann. Math. Statist. 29, 1958) treats them as independent, with
    Student's t; see Miller, Biometrika 61 (1974). The percentiles of a bootstrap of five seeds are
    too narrow: docs/evaluation.md.
    """
    num_seeds = len(losses)
    from_all = law(fit_law(sizes, losses.mean(axis=0)), GROWTH)
    pseudo_values = []
    for index in range(num_seeds):
        others = np.delete(losses, index, axis=0).mean(axis=0)
        from_others = law(fit_law(sizes, others), GROWTH)
        pseudo_values.append(num_seeds * from_all - (num_seeds - 1) * from_others)
    return np.array(pseudo_values)[:, :, 0]


def judge(names: list[str], losses: np.ndarray) -> dict[str, Verdict]:
    """Losses (S, V) of variants -> the verdict on each but the first, which is the baseline."""
    baseline, *others = [dict(enumerate(by_seed)) for by_seed in losses.T.tolist()]
    return compare_to_baseline(baseline, dict(zip(names[1:], others, strict=True)))


def ranking(at_largest: str, at_target: str) -> str:
    """Whether the verdicts on a variant say that it ranks beyond the largest size as at it."""
    if "not distinguishable" in (at_largest, at_target):
        return "cannot tell"
    return "holds" if at_largest == at_target else "reverses"


def draw(
    names: list[str], sizes: np.ndarray, losses: np.ndarray, extrapolated: np.ndarray
) -> Figure:
    """Plot the loss of each run, the laws, dashed, and the extrapolation with its intervals."""
    figure, axes = new_figure("training FLOP", "final loss")
    axes.set_xscale("log")
    largest = sizes.max()
    target = GROWTH * largest
    points = np.geomspace(sizes.min(), target)
    curves = law(fit_law(sizes / largest, losses.mean(axis=0)), points / largest)
    for index, name in enumerate(names):
        mean, ci95, _ = estimate(extrapolated[:, index].tolist())
        marker, *_ = axes.errorbar(target, mean, ci95, fmt="o", capsize=3, label=name)
        color = marker.get_color()
        axes.plot(sizes[index], losses[:, index].T, "o", color=color, markersize=3)
        axes.plot(points, curves[index], "--", color=color, linewidth=1)
    axes.legend(frameon=False)
    return figure
