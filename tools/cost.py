"""Print the cost of a run with every attention variant, or only with attention=A,B:

    python -m tools.cost model=124m context=4096
    python -m tools.cost model=1b attention=gqa,mla data.vocab_size=32000

It takes the overrides of train.py except init_from. Models are built on PyTorch's meta device, so
nothing is computed.
"""

import sys

import torch

from data.tokenizer import Tokenizer
from model.build import build_model
from run import cli, errors
from run.compose import choices, compose
from tools.compare.sweep import expand_sweep
from training.setup import check_buildable

COLUMNS = (
    "attention",
    "vocabulary",
    "parameters",
    "MFLOP/token",
    "KV bytes/token",
    "KV MB at context",
)
FORMAT = "{:14}" + " {:>16}" * 5  # format of a row
NOTE = """
MFLOP/token is for training. KV sizes are for one sequence, with keys and values in bf16 and
recurrent states in fp32. In a decoding step, sparse attention reads only some keys and values."""
GPT2_NOTE = """
model=124m is named after GPT-2 small, which has the same width and depth. For nearly the same
number of parameters, use attention=mha data.vocab_size=50257 model.tied=true."""
NEXT = "next: python train.py attention=NAME, with the same overrides"


def main(arguments: list[str]) -> None:
    cli.end_with_reader()
    parser = cli.Parser("python -m tools.cost", __doc__)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of train.py")
    overrides = parser.parse_args(arguments).overrides

    # Remove attention=A,B, because each attention variant has a separate row.
    sweep = expand_sweep(overrides)  # also checks the overrides
    names = [word.partition("=")[2] for word in sweep.get("attention", [])]
    names = names or choices("attention")
    others = [word for word in overrides if not word.lstrip("+").startswith("attention=")]

    for name in names:
        cells = row(name, others)
        if name == names[0]:
            print(FORMAT.format(*COLUMNS))
        print(FORMAT.format(*cells), flush=True)
    print(NOTE)
    if "model=124m" in overrides:
        print(GPT2_NOTE)
    print(NEXT)


def row(attention: str, overrides: list[str]) -> tuple[str, ...]:
    """Return the cells of COLUMNS for a run with this attention variant and these overrides."""
    # One sequence is a valid batch at every context.
    settings = compose(
        ["name=cost", "batch_tokens=${context}", *overrides, f"attention={attention}"]
    )
    if settings.init_from is not None:
        raise ValueError(
            f"this command loads no model (init_from={settings.init_from}). fix: omit init_from"
        )
    sizes = check_buildable(settings).model
    if settings.data.get("tokenizer"):
        sizes["vocab_size"] = Tokenizer.load(settings.data["tokenizer"]).vocab_size
    model = build_model(sizes, "meta")
    bytes_of_one = model.cache_bytes(1, torch.bfloat16)
    bytes_of_two = model.cache_bytes(2, torch.bfloat16)
    bytes_of_context = model.cache_bytes(model.context, torch.bfloat16)
    return (
        attention,
        f"{len(model.embed.weight):,}",
        f"{model.num_parameters() / 1e6:.2f} M",
        f"{model.training_flops() / 1e6:.1f}",
        f"{bytes_of_two - bytes_of_one:,}",
        f"{bytes_of_context / 1e6:.2f}",
    )


if __name__ == "__main__":
    with errors.report_errors(), errors.exit_on_invalid_input():
        main(sys.argv[1:])
