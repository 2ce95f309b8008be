"""Plot the attention weights of a prompt:

    python -m tools.attention_map "def main(" --out map.png
    python -m tools.attention_map "def main(" --run runs/NAME --out map.svg

Rows are softmax layers and columns are their heads. The title lists the layers without softmax,
which have no attention weights.
"""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from inference.load import load
from inference.prompts import new_sequences
from model.attention.kernels.choose import AttentionKernel
from model.transformer import Transformer
from run import errors
from run.cli import Parser, add_model_options, user_path

MAX_LABELED = 32  # prompts with up to this many tokens have axes labeled with their tokens
SQUARE = 3.0  # side of a head's plot, in inches
Maps = dict[int, Tensor]  # weights (H, T, T) by layer number


def main() -> None:
    parser = Parser("python -m tools.attention_map", __doc__)
    parser.add_argument("prompt", help="text whose attention weights are plotted")
    parser.add_argument(
        "--out", type=user_path, required=True, metavar="map.png", help="output image, .png or .svg"
    )
    add_model_options(parser)
    args = parser.parse_args()
    with errors.exit_on_invalid_input():
        model, tokenizer, name = load(args.run, args.device, args.dtype)
        (sequence,) = new_sequences(tokenizer, [args.prompt], model.context, max_new_tokens=1)
        maps = attention_weights(model, sequence.tokens)
        if not maps:
            raise ValueError(
                "the model has no softmax layers. fix: choose a model with softmax layers (--run)"
            )
        labels = [label(tokenizer, token) for token in sequence.tokens]
        others = sorted(set(range(len(model.blocks))) - maps.keys())
        title = f"{name}: {args.prompt!r:.60}\nlayers without softmax: {others or 'none'}"
        draw(maps, labels, title, args.out)
    print(f"{title}\nwritten: {args.out}")


def label(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text (repr() if invisible), or its vocabulary entry if it has no text."""
    text = tokenizer.decode([token])
    if text == "" or "\ufffd" in text:
        return tokenizer.piece(token)
    return text if text.isprintable() and not text.isspace() else repr(text)


@torch.no_grad()
def attention_weights(model: Transformer, tokens: list[int]) -> Maps:
    """Return each softmax layer's weights (H, T, T) by layer number; row i is for query i.

    Differential attention has two maps for each pair of heads, one for each softmax.
    """
    maps = {}
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
    maps: Maps, layer: int, kernel: AttentionKernel, args: tuple, kwargs: dict, output: Tensor
) -> None:
    """Forward hook of a layer's kernel: store the weights of the batch's first row in `maps`."""
    # With the identity matrix as values, the output equals the attention weights.
    q, k, _, mask = args
    identity = torch.eye(k.shape[1]).to(k)
    v = identity[:, None].expand(*k.shape[:3], -1)  # (B, S, K, S)
    weights = kernel.forward(q, k, v, mask, **kwargs)  # (B, T, H, S)
    assert weights.shape == (*q.shape[:3], k.shape[1])
    maps[layer] = weights[0].transpose(0, 1).float().cpu()


def draw(maps: Maps, labels: list[str], title: str, path: Path) -> None:
    """Draw the weights in `maps` to a file; `labels` are the tokens' texts."""
    from matplotlib.figure import Figure

    # Otherwise Matplotlib would read $ as the start of a formula.
    title = title.replace("$", r"\$")
    labels = [label.replace("$", r"\$") for label in labels]

    # One square per head.
    heads = max(len(weights) for weights in maps.values())
    size = (heads * SQUARE + 1, len(maps) * SQUARE + 1)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(maps), heads, squeeze=False, sharex=True, sharey=True)
    ticks = range(len(labels))
    for row, layer in zip(grid, maps, strict=True):
        for head, weights in enumerate(maps[layer].numpy()):
            axes = row[head]
            image = axes.imshow(weights, cmap="magma", vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(f"layer {layer} head {head}", fontsize=7)
            # Only short prompts leave room for labels.
            if len(labels) <= MAX_LABELED:
                axes.set_xticks(ticks, labels, rotation=90, fontsize=5)
                axes.set_yticks(ticks, labels, fontsize=5)
    figure.suptitle(title, fontsize=9)
    figure.supxlabel("key: attended token", fontsize=9)
    figure.supylabel("query: attending token", fontsize=9)
    figure.colorbar(image, ax=grid, label="weight", fraction=0.05)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    with errors.report_errors():
        main()
