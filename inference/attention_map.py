"""The attention weights of a prompt as a picture: a row for each layer, a column for each head."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from model.attention.kernels import AttentionKernel, bias_tensor, eager_attention
from model.transformer import Transformer

MAX_LABELLED = 48  # tokens up to which the axes are labelled with them


@torch.no_grad()
def weights(model: Transformer, tokens: list[int]) -> dict[int, Tensor]:
    """Return the weights (H, T, T) of every softmax layer by its number, row i those of token i.

    For differential attention these are both softmaxes of each pair of heads.
    """
    maps: dict[int, Tensor] = {}
    hooks = []
    for layer, block in enumerate(model.blocks):
        for module in block.modules():
            if isinstance(module, AttentionKernel):
                record = partial(record_weights, maps, layer)
                hooks.append(module.register_forward_hook(record, with_kwargs=True))
    try:
        model(torch.tensor([tokens], device=model.embed.weight.device))
    finally:
        for hook in hooks:
            hook.remove()
    return maps


def record_weights(
    maps: dict[int, Tensor],
    layer: int,
    kernel: AttentionKernel,
    args: tuple,
    kwargs: dict,
    output: Tensor,
) -> None:
    """Store the weights of the first row in `maps`; a forward hook of the layer's kernel."""
    q, k, _, visible = args
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    # The weights are the output for values that are the identity.
    identity = torch.eye(k.shape[2], dtype=q.dtype, device=q.device)
    v = identity.expand(*k.shape[:2], -1, -1)
    bias = bias_tensor(kwargs.pop("score_bias", None), q.shape[1], visible)
    y = eager_attention(q, k, v, visible.mask, softcap=kernel.softcap, bias=bias, **kwargs)
    maps[layer] = y[0].float().cpu()


def draw(model: Transformer, tokens: list[int], labels: list[str], path: Path) -> None:
    """Draw the weights of all softmax layers to a file. Raises ValueError where there are none."""
    from matplotlib.figure import Figure

    maps = weights(model, tokens)
    if not maps:
        raise ValueError("no layer of this model is a softmax (--attention-map). fix: another run")

    # A square for each head; only those of a short prompt have room for its tokens.
    is_labelled = len(tokens) <= MAX_LABELLED
    inches = max(2.0, 0.14 * len(tokens)) if is_labelled else 3.0
    heads = max(map(len, maps.values()))
    size = (heads * inches + 1, len(maps) * inches + 1)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(maps), heads, squeeze=False, sharex=True, sharey=True)
    labels = [label.replace("$", r"\$") for label in labels]  # $ would begin a formula
    for row, layer in zip(grid, maps, strict=True):
        for head, head_weights in enumerate(maps[layer]):
            axes = row[head]
            axes.imshow(head_weights.numpy(), cmap="magma", vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(f"layer {layer} head {head}", fontsize=7)
            if is_labelled:
                axes.set_xticks(range(len(tokens)), labels, rotation=90, fontsize=5)
                axes.set_yticks(range(len(tokens)), labels, fontsize=5)
    figure.savefig(path, dpi=120)
