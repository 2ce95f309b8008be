"""Scale: a power law of loss against training FLOP for each variant, and where the laws lead.

L(C) = E + A C^-alpha, Hoffmann et al., 2203.15556. All variants have one irreducible loss E, and
each its own A and alpha.
"""

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import least_squares

from tools.compare.runs import Run
from tools.compare.statistics import LEVEL, Estimate, estimate, holm

GROWTH = 10  # how many times the largest size the laws are extrapolated to
HEADER = ["variant", "difference at the largest size", f"at {GROWTH} times that", "ranking"]


def fit_report(
    runs_by_variant: dict[str, list[Run]],
) -> tuple[str, list[str], list[list], Figure] | None:
    """Fit the laws -> a summary, the header and rows of a table, and a plot.

    The first variant is the baseline. Returns None where all runs of a variant have one size.
    Raises ValueError where sizes or seeds are too few.
    """
    # Final losses by size and seed. Seeds are pairs, so each must have trained everything.
    tables = [losses_by_size(runs) for runs in runs_by_variant.values()]
    num_sizes = sorted(map(len, tables))
    if num_sizes[-1] == 1:
        return None
    seeds = set.intersection(*[set(by_seed) for table in tables for by_seed in table.values()])
    if len(seeds) < 2 or not 3 <= num_sizes[0] == num_sizes[-1]:
        problem = f"no law of size (sizes of the variants: {num_sizes}, common seeds: {len(seeds)})"
        raise ValueError(f"{problem}. fix: train all variants at 3 sizes or more, with 2 seeds")
    sizes = np.array([list(table) for table in tables])  # (V, K)
    losses = []
    for seed in seeds:
        losses.append([[by_seed[seed] for by_seed in table.values()] for table in tables])
    losses = np.array(losses)  # (S, V, K)
    extrapolated = extrapolate(sizes / sizes.max(), losses)

    # Differences to the baseline. A ranking needs both: the larger p is that of an
    # intersection-union test (Berger, Technometrics 24, 1982).
    ends = np.stack((losses[:, :, -1], extrapolated))  # (2, S, V)
    ends -= ends[:, :, :1]
    differences = {}
    for name, columns in zip(runs_by_variant, ends.transpose(2, 0, 1).tolist(), strict=True):
        differences[name] = [estimate(values) for values in columns]
    baseline, *names = runs_by_variant
    p_values = holm({name: max(each.p for each in differences[name]) for name in names})
    rows = []
    for name, p in p_values.items():
        cells = [f"{each.mean:+.4f} ± {each.ci95:.4f}" for each in differences[name]]
        rows.append([name, *cells, ranking(*differences[name], p)])

    text = f"Do the differences to {baseline} at {sizes.max():.2g} training FLOP hold at {GROWTH} "
    text += f"times as many? {', '.join(f'{name}: {answer}' for name, *_, answer in rows)}."
    return text, HEADER, rows, draw([*runs_by_variant], sizes, losses, extrapolated)


def losses_by_size(runs: list[Run]) -> dict[float, dict[int, float]]:
    """Map the training FLOP of runs, ascending, to the final losses by seed."""
    losses = {}
    for run in runs:
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


def ranking(at_largest: Estimate, at_target: Estimate, p: float) -> str:
    """Whether two variants that differ at the largest size differ in the same way beyond it."""
    if p > LEVEL:
        return "cannot tell"
    return "holds" if at_largest.mean * at_target.mean > 0 else "reverses"


def draw(
    names: list[str], sizes: np.ndarray, losses: np.ndarray, extrapolated: np.ndarray
) -> Figure:
    """Plot mean losses and their extrapolation with intervals over seeds, and the laws, dashed."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    relative = np.geomspace(sizes.min() / sizes.max(), GROWTH, 50)
    curves = law(fit_law(sizes / sizes.max(), losses.mean(axis=0)), relative)
    for index, name in enumerate(names):
        points = [*sizes[index], GROWTH * sizes.max()]
        values = [estimate(column) for column in (*losses[:, index].T, extrapolated[:, index])]
        means, ci95, _ = zip(*values, strict=True)
        axes.errorbar(points, means, ci95, fmt="o", capsize=3, color=f"C{index}", label=name)
        axes.plot(sizes.max() * relative, curves[index], "--", color=f"C{index}")
    axes.set(xscale="log", xlabel="training FLOP", ylabel="final loss")
    axes.legend()
    return figure
