"""Scale: a power law of loss against training FLOP for each variant, and where the laws lead.

L(C) = E + A C^-alpha, Hoffmann et al., 2203.15556. All variants have one irreducible loss E, and
each its own A and alpha.
"""

from operator import attrgetter

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import least_squares

from tools.compare.plots import new_figure
from tools.compare.runs import Run
from tools.compare.statistics import compare_to_baseline, estimate

GROWTH = 10  # how many times the largest size the laws are extrapolated to
HEADER = ["variant", "difference at the largest size", f"at {GROWTH} times that", "ranking"]


def fit_report(
    runs_by_variant: dict[str, list[Run]],
) -> tuple[str, list[str], list[list], Figure] | None:
    """Fit the laws -> a summary, the header and rows of a table, and a plot.

    The first variant is the baseline. Returns None where all runs of a variant have one size.
    Raises ValueError where sizes or seeds are too few, or runs are missing.
    """
    # Seeds are pairs, so each must have trained every size of every variant.
    tables = [losses_by_size(runs) for runs in runs_by_variant.values()]
    if all(len(table) == 1 for table in tables):
        return None
    num_sizes = {len(table) for table in tables}
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
    baseline, *names = runs_by_variant
    columns = []
    for values in (losses[:, :, -1], extrapolated):
        by_seed = [dict(enumerate(column)) for column in values.T.tolist()]
        others = dict(zip(names, by_seed[1:], strict=True))
        columns.append(compare_to_baseline(by_seed[0], others))
    rows = []
    for name in names:
        verdicts = [column[name] for column in columns]
        cells = [f"{each.difference.mean:+.4f} ± {each.difference.ci95:.4f}" for each in verdicts]
        rows.append([name, *cells, ranking(*[each.text for each in verdicts])])

    text = f"Whether differences to {baseline} at {sizes.max():.2g} training FLOP hold beyond."
    return text, HEADER, rows, draw([*runs_by_variant], sizes, losses, extrapolated)


def losses_by_size(runs: list[Run]) -> dict[float, dict[int, float]]:
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
    start = [irreducible, *losses[:, -1] - irreducible, *np.full(len(losses), 0.3)]
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
    target = GROWTH * sizes.max()
    points = np.geomspace(sizes.min(), target)
    curves = law(fit_law(sizes / sizes.max(), losses.mean(axis=0)), points / sizes.max())
    for index, name in enumerate(names):
        mean, ci95, _ = estimate(extrapolated[:, index].tolist())
        marker, *_ = axes.errorbar(target, mean, ci95, fmt="o", capsize=3, label=name)
        color = marker.get_color()
        axes.plot(sizes[index], losses[:, index].T, "o", color=color, markersize=3)
        axes.plot(points, curves[index], "--", color=color, linewidth=1)
    axes.legend(frameon=False)
    return figure
