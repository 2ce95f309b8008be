"""Convert a model to a different attention variant without training:

python -m tools.convert runs/NAME attention=gqa attention.kv_heads=2 --out FOLDER
python -m tools.convert runs/NAME attention=mla attention.rank=64 --out FOLDER
"""

import argparse
import shlex

import torch

from data.tokenizer import Tokenizer, tokenizer_file
from model.build import build_model
from run import checkpoint, errors
from run.cli import Parser, user_path
from tools.export_hf import new_folder, save_checkpoint
from tools.formats import converted_model


def parse_arguments() -> argparse.Namespace:
    parser = Parser("python -m tools.convert", __doc__)
    add = parser.add_argument
    add("model", type=user_path, help="run or checkpoint")
    add("overrides", nargs="+", metavar="KEY=VALUE", help="attention overrides, as for train.py")
    add("--out", type=user_path, required=True, metavar="FOLDER", help="new folder to write")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    with new_folder(args.out):
        lines = convert(args)
    for line in lines:
        print(line)
    words = (f"init_from={args.out}", f"distill={args.model}")
    print(
        f"written: {args.out}. To continue training it: python train.py {shlex.join(words)} "
        "data=text data.path=TEXT optimizer.lr=0.005"
    )


def convert(args: argparse.Namespace) -> list[str]:
    """Write the model with a different attention variant; return a description of the changes."""
    # Find all errors before a file is written.
    with errors.user_input():
        path = checkpoint.find_model(args.model)
        tree = checkpoint.load_model_config(path)
        new_tree = converted_model.convert_config(tree, args.overrides)
        tokenizer = Tokenizer.load(tokenizer_file(path))
        model = build_model(new_tree)
        changes = converted_model.load_converted(model, new_tree, path)
    before = build_model(tree, "meta").cache_bytes(tree["context"], torch.bfloat16)
    after = model.cache_bytes(tree["context"], torch.bfloat16)
    save_checkpoint(args.out, model.state_dict(), new_tree, tokenizer, path)
    return [
        *converted_model.describe(changes),
        f"cache of a full context in bf16: {before:,} -> {after:,} bytes",
    ]


if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
