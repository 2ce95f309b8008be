"""The plots of a comparison: loss against cache bytes, and loss during training."""

from statistics import mean

from matplotlib.figure import Figure

from tools.compare.runs import Groups, Run
from tools.compare.statistics import estimate

MARKERS = ("o-", "s--", "^:")  # the next one after every ten colors
QUANTITIES = ("tokens", "training FLOP", "seconds")


def draw_caches(groups: Groups) -> Figure:
    """Plots the final loss of each variant against its cache bytes."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    points = []
    for number, (name, runs) in enumerate(groups.items()):
        metric = runs[0].metric_name
        loss = estimate([run.loss for run in runs])
        color = f"C{number % 10}"  # the same as in the curves
        points.append((runs[0].cache_bytes_per_token, loss, name, color))

    # The names of neighbours go to different sides of their points.
    side = "left"
    shift = 7  # points
    for x, loss, name, color in sorted(points):
        side = "right" if side == "left" else "left"
        shift = -shift
        axes.errorbar(x, loss.mean, loss.ci95, fmt="o", capsize=3, color=color)
        position = (x, loss.mean)
        axes.annotate(name, position, (shift, 4), textcoords="offset points", ha=side)

    axes.set_xlabel("cache bytes per token at full context, bf16")
    axes.set_ylabel(f"{metric}, 95 % interval over seeds")
    axes.margins(x=0.15)
    return figure


def draw_curves(groups: Groups) -> Figure:
    """Plots the loss of each variant, the mean over its seeds, against tokens, FLOP and seconds."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    all_axes = figure.subplots(1, len(QUANTITIES), sharey=True)
    for axes, quantity in zip(all_axes, QUANTITIES, strict=True):
        for number, (name, runs) in enumerate(groups.items()):
            metric = runs[0].metric_name
            marker = MARKERS[number // 10 % len(MARKERS)]
            xs, losses = mean_curve(runs, quantity)
            axes.plot(xs, losses, marker, label=name, markersize=4)
        axes.set_xlabel(quantity)
    all_axes[0].set_ylabel(metric)
    all_axes[-1].legend()
    return figure


def mean_curve(runs: list[Run], quantity: str) -> tuple[list[float], list[float]]:
    """Averages x and loss over runs, wherever all were evaluated at one number of tokens."""
    curves = []
    for run in runs:
        flops = run.model.training_flops()
        curve = {}
        for line in run.evaluations:
            tokens = line["tokens"]
            curve[tokens] = line | {"training FLOP": tokens * flops}
        curves.append(curve)

    # The points that all runs have.
    xs = []
    losses = []
    for tokens in sorted(set.intersection(*map(set, curves))):
        xs.append(mean(curve[tokens][quantity] for curve in curves))
        losses.append(mean(curve[tokens]["loss"] for curve in curves))
    return xs, losses
