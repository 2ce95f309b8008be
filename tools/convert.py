"""Give a model another attention, without training:

python -m tools.convert --model MODEL attention=gqa attention.kv_heads=2 --out FOLDER
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from data.files import TEXT_SUFFIXES, find_files, read_documents
from data.tokenizer import Tokenizer
from model.attention.base import Attention
from model.build import build_model, materialize
from model.init import initialize
from model.transformer import Transformer
from run import checkpoint, config, errors
from run.cli import Parser, bounded_number
from tools.evaluate import evaluate_text
from tools.export_hf import check_is_new
from tools.formats import converted_model

MOMENT_TOKENS = 32_768  # of a text, for the inputs of each layer


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        "python -m tools.convert",
        description=__doc__.partition(",")[0],
        epilog="attention=PRESET attention.KEY=VALUE, as in training",
    )
    add = parser.add_argument
    add("overrides", nargs="+", help="of attention, as train.py takes them")
    add("--model", type=Path, help="a run, a Hugging Face folder or llama2.c's .bin")
    add("--out", type=Path, required=True, help="a new folder")
    add(
        "--text",
        help="evaluate before and after on its first documents, and fit to those after them",
    )
    add(
        "--documents",
        type=bounded_number(int, 1),
        default=50,
        help="of the text that are evaluated",
    )
    parser.set_defaults(separator="<|endoftext|>", truncate=True, batch_size=8)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    # What can be wrong is found before anything is written.
    with errors.user_input():
        path = checkpoint.find_model(args.model)
        check_is_new(args.out)
        tree = checkpoint.load_config(path)["model"]
        refused = [word for word in args.overrides if not converted_model.ATTENTION_KEY.match(word)]
        if refused:
            raise ValueError(
                f"only attention is converted ({' '.join(refused)}). "
                "fix: attention=PRESET or attention.KEY=VALUE"
            )
        new_tree = converted_model.convert_config(tree, args.overrides)
        model = build_model(new_tree)
        converted_model.load_converted(model, new_tree, path)
        tokenizer = Tokenizer.load(checkpoint.tokenizer_path(path))

    # One of the models is in memory at a time.
    moments = None
    if args.text is not None:
        with errors.user_input():
            old = checkpoint.load_model(path, "cpu")
            print_loss("before", old, tokenizer, args)
            moments = measure_moments(old, tokenizer, args)
            del old
    model = materialize(model, "cpu", torch.float32)
    initialize(model, seed=0)
    changes = converted_model.load_converted(model, new_tree, path, moments)
    for line in converted_model.describe(changes):
        print(line)
    before = build_model(tree).cache_bytes(tree["context"], torch.bfloat16)
    after = model.cache_bytes(tree["context"], torch.bfloat16)
    print(f"cache of a full context in bf16: {before:,} -> {after:,} bytes")
    if args.text is not None:
        print_loss("after", model.eval(), tokenizer, args)
    checkpoint.check_finite(model, path)
    checkpoint.save(args.out, 0, model.state_dict(), {"model": new_tree}, tokenizer.files, {})
    print(
        f"written: {args.out}. To heal it: "
        f"python train.py init_from={args.out} distill={path} data=text data.path=TEXT"
    )


def print_loss(
    when: str, model: Transformer, tokenizer: Tokenizer, args: argparse.Namespace
) -> None:
    result = evaluate_text(model, tokenizer, args)
    print(f"{when}: {result['nats_per_token']:.4f} nats per token")


@torch.inference_mode()
def measure_moments(
    model: Transformer, tokenizer: Tokenizer, args: argparse.Namespace
) -> list[Tensor]:
    """The mean (D, D) of x x^T over the inputs x of each attention, on a part of the text."""
    # Sum up over all tokens, whenever an attention is called.
    sums = {block.attention: 0.0 for block in model.blocks}

    def add_moment(attention: Attention, inputs: tuple) -> None:
        x = inputs[0].flatten(0, 1).double()
        sums[attention] = sums[attention] + x.mT @ x

    for attention in sums:
        attention.register_forward_pre_hook(add_moment)

    # Read the text up to MOMENT_TOKENS, a document at a time.
    num_tokens = 0
    documents = read_documents(find_files(args.text, TEXT_SUFFIXES), "text", args.separator)
    # What the loss is measured on is held out.
    for text in islice(documents, args.documents, None):
        tokens = tokenizer.encode_prompt(text)[: min(model.context, MOMENT_TOKENS - num_tokens)]
        model.hidden(torch.tensor([tokens]))
        num_tokens += len(tokens)
        if num_tokens >= MOMENT_TOKENS:
            break
    if num_tokens == 0:
        raise ValueError(
            f"no text after the documents to evaluate (--documents {args.documents}). "
            "fix: fewer, or more text"
        )
    return [moment / num_tokens for moment in sums.values()]


if __name__ == "__main__":
    with config.report_errors():
        main(parse_arguments())
