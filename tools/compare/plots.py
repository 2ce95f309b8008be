"""The plots of a comparison: loss against cache bytes, and loss during training."""

from collections import defaultdict
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
        losses = [run.loss for run in runs]
        loss = estimate(losses)
        cache_bytes = runs[0].cache_bytes_per_token
        color = f"C{number}"  # the same as in the curves
        points.append((cache_bytes, loss, name, color))

    # The names of neighbors go to different sides of their points.
    side = "left"
    shift = 7  # points
    for x, loss, name, color in sorted(points):
        side = "right" if side == "left" else "left"
        shift = -shift
        axes.errorbar(x, loss.mean, loss.ci95, fmt="o", capsize=3, color=color)
        position = (x, loss.mean)
        axes.annotate(name, position, (shift, 4), textcoords="offset points", ha=side)

    axes.set_xlabel("cache bytes per token at full context, bf16")
    axes.set_ylabel(f"{runs[0].metric_name}, 95 % interval over seeds")
    axes.margins(x=0.15)
    return figure


def draw_curves(groups: Groups) -> Figure:
    """Plots the loss of each variant, the mean over its seeds, against tokens, FLOP and seconds."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    all_axes = figure.subplots(1, len(QUANTITIES), sharey=True)
    for number, (name, runs) in enumerate(groups.items()):
        marker = MARKERS[number // 10 % len(MARKERS)]
        curve = mean_curve(runs)
        for axes, quantity in zip(all_axes, QUANTITIES, strict=True):
            axes.plot(curve[quantity], curve["loss"], marker, label=name, markersize=4)
            axes.set_xlabel(quantity)
    all_axes[0].set_ylabel(runs[0].metric_name)
    all_axes[-1].legend()
    return figure


def mean_curve(runs: list[Run]) -> dict[str, list[float]]:
    """Averages over runs of a variant, wherever all were evaluated at one number of tokens."""
    metric = runs[0].metric
    flops = runs[0].model.training_flops()
    by_tokens = [{line["tokens"]: line for line in run.evaluations} for run in runs]
    curve = defaultdict(list)
    # Seeds may have been evaluated at other steps, or for longer.
    common = set.intersection(*map(set, by_tokens))
    for tokens in sorted(common):
        lines = [evaluations[tokens] for evaluations in by_tokens]
        seconds = [line["seconds"] for line in lines]
        losses = [line[metric] for line in lines]
        curve["tokens"].append(tokens)
        curve["training FLOP"].append(tokens * flops)
        curve["seconds"].append(mean(seconds))
        curve["loss"].append(mean(losses))
    return curve
