"""The attention weights of a prompt as a picture: a row for each layer, a column for each head."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from model.attention.kernels import AttentionKernel, bias_tensor, eager_attention
from model.transformer import Transformer

MAX_LABELED = 48  # tokens up to which the axes are labeled with them


@torch.no_grad()
def attention_weights(model: Transformer, tokens: list[int]) -> dict[int, Tensor]:
    """Return the weights (H, T, T) of every softmax layer by its number, row i those of token i.

    For differential attention these are both softmaxes of each pair of heads.
    """
    maps: dict[int, Tensor] = {}
    with ExitStack() as hooks:
        for layer, block in enumerate(model.blocks):
            record = partial(record_weights, maps, layer)
            for module in block.modules():
                if isinstance(module, AttentionKernel):
                    hook = module.register_forward_hook(record, with_kwargs=True)
                    hooks.enter_context(hook)
        model(torch.tensor([tokens], device=model.embed.weight.device))
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
    v = torch.eye(k.shape[2]).to(k).expand(*k.shape[:2], -1, -1)
    bias = bias_tensor(kwargs.pop("score_bias", None), q.shape[1], visible)
    y = eager_attention(q, k, v, visible.mask, softcap=kernel.softcap, bias=bias, **kwargs)
    maps[layer] = y[0].float().cpu()


def draw(model: Transformer, tokens: list[int], labels: list[str], path: Path) -> None:
    """Draw the weights of all softmax layers to a file. Raises ValueError where there are none."""
    from matplotlib.figure import Figure

    maps = attention_weights(model, tokens)
    if not maps:
        raise ValueError(
            "no layer of this model is a softmax (--attention-map). fix: --run of another"
        )

    # A square for each head; only those of a short prompt have room for its tokens.
    is_labeled = len(tokens) <= MAX_LABELED
    inches = max(2.0, 0.14 * len(tokens)) if is_labeled else 3.0
    heads = max(map(len, maps.values()))
    size = (heads * inches + 1, len(maps) * inches + 1)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(maps), heads, squeeze=False, sharex=True, sharey=True)
    labels = [label.replace("$", r"\$") for label in labels]  # $ would begin a formula
    for row, (layer, layer_weights) in zip(grid, maps.items(), strict=True):
        for head, weights in enumerate(layer_weights.numpy()):
            axes = row[head]
            axes.imshow(weights, cmap="magma", vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(f"layer {layer} head {head}", fontsize=7)
            if is_labeled:
                axes.set_xticks(range(len(tokens)), labels, rotation=90, fontsize=5)
                axes.set_yticks(range(len(tokens)), labels, fontsize=5)
    figure.savefig(path, dpi=120)
