"""Give a model another attention, without training:

python -m tools.convert runs/NAME attention=gqa attention.kv_heads=2 --out FOLDER
python -m tools.convert runs/NAME attention=mla --text my/stories.txt --out FOLDER
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from data.files import TEXT_SUFFIXES, find_files, read_documents
from data.tokenizer import Tokenizer, tokenizer_file
from inference.load import load_model
from model.attention.base import Attention
from model.build import build_model
from run import checkpoint, errors
from run.cli import Parser
from tools.export_hf import into_new_folder
from tools.formats import converted_model

MOMENT_TOKENS = 32_768  # of a text, for the inputs of each layer


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        "python -m tools.convert",
        __doc__,
        "MODEL attention=PRESET attention.KEY=VALUE --out FOLDER",
    )
    add = parser.add_argument
    add("model", type=Path, help="a run or a checkpoint")
    add("overrides", nargs="+", metavar="KEY=VALUE", help="of attention, as for train.py")
    add("--out", type=Path, required=True, help="a new folder")
    add("--text", help="a file or folder whose beginning a latent is fitted to")
    return parser.parse_args()


@into_new_folder
def main(args: argparse.Namespace) -> str:
    # What can be wrong is found before a file is written.
    with errors.user_input():
        path = checkpoint.find_model(args.model)
        tree = checkpoint.load_model_config(path)
        new_tree = converted_model.convert_config(tree, args.overrides)
        tokenizer = Tokenizer.load(tokenizer_file(path))
        moments = None
        if args.text is not None:
            moments = measure_moments(load_model(path, "cpu"), tokenizer, args.text)
        model = build_model(new_tree)
        changes = converted_model.load_converted(model, new_tree, path, moments)
    before = build_model(tree, "meta").cache_bytes(tree["context"], torch.bfloat16)
    after = model.cache_bytes(tree["context"], torch.bfloat16)
    if not all(weight.isfinite().all() for weight in model.parameters()):
        errors.exit_with(
            errors.DIVERGED, f"weights contain NaN or infinity ({path}). fix: an older checkpoint"
        )
    checkpoint.save(args.out, 0, model.state_dict(), {"model": new_tree}, tokenizer.files, {})
    return "\n".join(converted_model.describe(changes)) + (
        f"\ncache of a full context in bf16: {before:,} -> {after:,} bytes\n"
        f"written: {args.out}. To heal it: "
        f"python train.py init_from={args.out} distill={args.model} data=text data.path=TEXT"
    )


@torch.inference_mode()
def measure_moments(model: torch.nn.Module, tokenizer: Tokenizer, path: str) -> list[Tensor]:
    """The mean (D, D) of x x^T over the inputs x of each attention, on the beginning of a text."""
    # Sum up over all tokens, whenever an attention is called.
    sums = {block.attention: 0.0 for block in model.blocks}

    def add_moment(attention: Attention, inputs: tuple) -> None:
        x = inputs[0].flatten(0, 1).double()
        sums[attention] = sums[attention] + x.mT @ x

    for attention in sums:
        attention.register_forward_pre_hook(add_moment)

    # Read the text up to MOMENT_TOKENS, a document at a time.
    num_tokens = 0
    for text in read_documents(find_files(path, TEXT_SUFFIXES), "text", "<|endoftext|>"):
        tokens = tokenizer.encode_prompt(text)[: min(model.context, MOMENT_TOKENS - num_tokens)]
        model.hidden(torch.tensor([tokens]))
        num_tokens += len(tokens)
        if num_tokens >= MOMENT_TOKENS:
            break
    if num_tokens == 0:
        raise ValueError(f"no text (--text {path}). fix: --text PATH of another")
    return [moment / num_tokens for moment in sums.values()]


if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
