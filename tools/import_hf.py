"""Make a checkpoint of a Hugging Face folder:

python -m tools.import_hf my/SmolLM2-135M --out models/smollm2
"""

import argparse
import json
from pathlib import Path

from data.tokenizer import Tokenizer
from model.build import build_model
from run import checkpoint, errors
from run.cli import HelpFormatter, Parser
from tools.export_hf import into_new_folder
from tools.formats.hf_config import from_hf_config
from tools.formats.special_tokens import import_tokenizer, malformed
from tools.formats.weights import FETCH_AGAIN, read_weights


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        "python -m tools.import_hf",
        description=__doc__,
        epilog="such as my/SmolLM2-135M --out models/smollm2",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="with config.json, safetensors and a tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    return parser.parse_args()


@into_new_folder
def main(args: argparse.Namespace) -> str:
    # All that can be wrong with the folder is found before anything is written.
    with errors.user_input(), malformed(f"no model with a tokenizer ({args.folder})"):
        architecture, tree = from_hf_config(json.loads((args.folder / "config.json").read_text()))
        tokenizer = load_tokenizer(args.folder, tree["vocab_size"])
        weights = read_weights(args.folder, build_model(tree, "meta"), architecture)
    for name, weight in weights.items():
        if not weight.isfinite().all():
            problem = f"weights contain NaN or infinity ({args.folder}: {name})"
            errors.exit_with(errors.DIVERGED, f"{problem}. fix: {FETCH_AGAIN}")
    checkpoint.save(args.out, 0, weights, {"model": tree}, tokenizer.files, {})
    return f"written: {args.out}. To use it: python generate.py PROMPT --run {args.out}"


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a folder. Raises ValueError where it is missing or not the model's."""
    tokenizer = import_tokenizer(folder)
    # An embedding may be padded beyond the vocabulary, for speed.
    is_padded = "tokenizer.json" in tokenizer.files and tokenizer.vocab_size < vocab_size
    if tokenizer.vocab_size != vocab_size and not is_padded:
        raise ValueError(
            f"a tokenizer of another vocabulary ({folder} has {tokenizer.vocab_size}, the model "
            f"{vocab_size}). fix: the tokenizer that it was trained with"
        )
    return tokenizer


if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
