"""What every attention would cost in a run:  python -m tools.cost model=124m context=4096

The overrides are those of train.py; attention=gqa,mla shows these two alone. Nothing is computed:
tensors are shapes without memory.
"""

import sys

import torch

from model.build import build_model
from run import cli, errors
from run.settings import CONFIGS, compose, report_errors
from training.setup import check_buildable

COLUMNS = ("attention", "parameters", "MFLOP/token", "KV bytes/token", "KV MB at context")
NAME_WIDTH = 16  # characters
NOTE = "MFLOP/token: in training. KV bytes: of one sequence in bf16."


def main(arguments: list[str]) -> None:
    parser = cli.Parser(
        "python -m tools.cost", description=__doc__, epilog="such as model=124m context=4096"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py")
    overrides = parser.parse_args(arguments).overrides

    # Take out the attentions, each of which is a row.
    names = []
    others = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "attention":
            names += value.split(",")
        else:
            others.append(override)
    if not names:
        names = sorted(path.stem for path in (CONFIGS / "attention").glob("*.yaml"))

    rows = [COLUMNS] + [row(name, others) for name in names]
    width = max(len(column) for column in COLUMNS)
    for name, *cells in rows:
        print(name.ljust(NAME_WIDTH), *[cell.rjust(width) for cell in cells])
    print(f"\n{NOTE}")


def row(attention: str, overrides: list[str]) -> tuple[str, ...]:
    """The cells of COLUMNS for a run with these overrides of train.py."""
    # One sequence is a valid batch at every context.
    batch = "batch_tokens=${context}"
    settings = compose(["name=cost", batch, *overrides, f"attention={attention}"])
    model = build_model(check_buildable(settings).model, "meta")
    cache_bytes = [model.cache_bytes(length, torch.bfloat16) for length in (1, 2, model.context)]
    return (
        attention,
        f"{model.num_parameters() / 1e6:.2f} M",
        f"{model.training_flops() / 1e6:.1f}",
        f"{cache_bytes[1] - cache_bytes[0]:,}",
        f"{cache_bytes[2] / 1e6:.2f}",
    )


if __name__ == "__main__":
    with report_errors(), errors.user_input():
        main(sys.argv[1:])
