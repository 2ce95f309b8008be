"""Convert a Hugging Face folder to a checkpoint:

python -m tools.import_hf my/SmolLM2-135M --out models/smollm2
"""

import argparse
import shlex

from model.build import build_model
from run import errors
from run.cli import Parser, user_path
from run.progress import say
from tools.export_hf import new_folder, save_checkpoint
from tools.formats.hf_config import from_hf_config
from tools.formats.special_tokens import (
    describe_bos,
    describe_changes,
    describe_versions,
    import_tokenizer,
    malformed,
    read_json,
)
from tools.formats.weights import read_weights


def parse_arguments() -> argparse.Namespace:
    parser = Parser("python -m tools.import_hf", __doc__)
    parser.add_argument(
        "folder", type=user_path, help="folder with config.json, safetensors and a tokenizer"
    )
    parser.add_argument(
        "--out", type=user_path, required=True, metavar="FOLDER", help="new folder to write"
    )
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    with new_folder(args.out):
        import_model(args)
    run = shlex.quote(str(args.out))
    print(f"written: {args.out}. To use it: python generate.py PROMPT --run {run}")


def import_model(args: argparse.Namespace) -> None:
    """Read a transformers model, and write it as a checkpoint."""
    # Find all errors in the folder before a file is written.
    with errors.user_input(), malformed(f"no model with a tokenizer ({args.folder})"):
        config = read_json(args.folder / "config.json")
        architecture, tree = from_hf_config(config)
        tokenizer = import_tokenizer(args.folder)
        num_tokens = tokenizer.vocab_size
        num_embeddings = tree["vocab_size"]
        # An embedding may be padded beyond the vocabulary for speed.
        is_padded = "tokenizer.json" in tokenizer.files and num_tokens < num_embeddings
        if num_tokens != num_embeddings and not is_padded:
            raise ValueError(
                f"the tokenizer does not fit the model ({args.folder}: {num_tokens} token ids, "
                f"{num_embeddings} embeddings). fix: use the tokenizer that the model was trained "
                "with"
            )
        weights = read_weights(args.folder, build_model(tree, "meta"), architecture)
    save_checkpoint(args.out, weights, tree, tokenizer, args.folder)
    changes = describe_changes(tokenizer)
    if changes:
        say(f"note: the tokenizer changes some texts, such as {', '.join(changes[:4])}")
    for difference in describe_versions(tokenizer, config["model_type"]):
        say(f"note: {difference}")
    if unused_bos := describe_bos(tokenizer):
        say(f"note: {unused_bos}")


if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
