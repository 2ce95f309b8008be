"""The attention weights of a prompt as a picture: a row a layer, a column a head."""

from pathlib import Path

import torch
from torch import Tensor

from model.attention.kernels import watching
from model.transformer import Transformer


@torch.no_grad()
def weights(model: Transformer, tokens: list[int]) -> list[Tensor | None]:
    """Of each layer (H, T, T), row i what token i sees; None for a layer that is no softmax.

    For differential attention these are both softmaxes of each pair of heads.
    """
    found: list[Tensor | None] = []

    def take(*_) -> None:
        found.append(watched[0][0].float().cpu() if watched else None)
        watched.clear()

    hooks = [block.attention.register_forward_hook(take) for block in model.blocks]
    with watching() as watched:
        model(torch.tensor([tokens], device=model.embed.weight.device))
    for hook in hooks:
        hook.remove()
    return found


def draw(model: Transformer, tokens: list[int], labels: list[str], path: Path) -> None:
    """Raises ValueError where no layer has weights to draw."""
    from matplotlib.figure import Figure

    layers = [
        (number, layer) for number, layer in enumerate(weights(model, tokens)) if layer is not None
    ]
    if not layers:
        raise ValueError("no layer of this model is a softmax (--attention-map). fix: another run")
    labels = [label.replace("$", r"\$") for label in labels]  # no formulas
    size = max(2.0, 0.14 * len(tokens)) if len(tokens) <= 48 else 3.0
    heads = max(len(layer) for _, layer in layers)
    figure = Figure(figsize=(heads * size + 1, len(layers) * size + 1), layout="constrained")
    grid = figure.subplots(len(layers), heads, squeeze=False, sharex=True, sharey=True)
    for row, (number, layer) in zip(grid, layers, strict=True):
        for head, (axes, seen) in enumerate(zip(row, layer, strict=False)):
            axes.imshow(seen.numpy(), cmap="magma", vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(f"layer {number} head {head}", fontsize=7)
            if len(tokens) <= 48:
                axes.set_xticks(range(len(tokens)), labels, rotation=90, fontsize=5)
                axes.set_yticks(range(len(tokens)), labels, fontsize=5)
    figure.savefig(path, dpi=120)
