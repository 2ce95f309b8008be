"""Evaluate a model with standard metrics, and print them as JSON.

python -m tools.evaluate --run runs/NAME --text FILE
    nats per token and bits per byte on any text
python -m tools.evaluate --run runs/NAME --text FILE --context 4096
    in windows longer than the training context
python -m tools.evaluate --run runs/NAME --slices
    the same metrics as in training, over all held-out data, by position and for repeated tokens
python -m tools.evaluate --run runs/NAME --lengths
    the same targets, at the end of windows of 1, 2 and 4 training contexts

For tasks such as arc_easy, use lm-evaluation-harness, which reads exports of tools.export_hf.
"""

import argparse
import json
import math
from collections.abc import Iterable

import torch

from data.files import find_files, read_documents
from data.tokenizer import IdTokenizer, Tokenizer
from model.transformer import Transformer
from run import errors
from run.cli import Parser, add_batch_option, add_model_options, bounded_number
from run.progress import say
from tools.lengths import evaluate_corpus, measure_lengths, open_run
from tools.scoring import load_to_score, total_nats, windows
from training.setup import open_run_corpus


def main(args: argparse.Namespace) -> None:
    with errors.user_input():
        result = evaluate_model(args)
    print(json.dumps(result, default=str))
    say("next: to compare models, run the same command with a different --run")


def parse_arguments() -> argparse.Namespace:
    parser = Parser("python -m tools.evaluate", __doc__)
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument(
        "--text",
        metavar="FILE",
        help="score a file, a glob, or a folder of .txt, .jsonl and .parquet files",
    )
    kinds.add_argument(
        "--slices",
        action="store_true",
        help="compute the same metrics as in training, over all held-out data",
    )
    kinds.add_argument(
        "--lengths",
        action="store_true",
        help="compute the held-out loss with more context than in training",
    )
    add_model_options(
        parser, "fp32; a CUDA GPU may multiply in lower precision (docs/evaluation.md)"
    )
    add_batch_option(parser)
    parser.add_argument(
        "--context",
        type=bounded_number(int, 1),
        help="tokens per window (default: the training context)",
    )
    parser.add_argument(
        "--separator", default="<|endoftext|>", help="line that separates documents in a .txt file"
    )
    args = parser.parse_args()

    # Reject options that this kind of evaluation does not use.
    unused = []
    if args.slices:
        unused = ["separator", "batch_size"]
    elif args.lengths:
        unused = ["separator", "batch_size", "context", "dtype"]
    for name in unused:
        if getattr(args, name) != parser.get_default(name):
            kind = "--slices" if args.slices else "--lengths"
            parser.error(f"{kind} cannot be combined with --{name.replace('_', '-')}")
    return args


def evaluate_model(args: argparse.Namespace) -> dict:
    if args.lengths:
        return measure_lengths(args.run, args.device)
    precision = "auto"
    if args.slices:
        newest, settings = open_run(args.run)
        precision = settings["precision"]
    model, tokenizer, name, products = load_to_score(
        args.run, args.device, args.dtype, args.context, precision
    )
    result = {"name": name, "context": model.context}
    if args.slices:
        corpus = open_run_corpus(newest, settings)
        return result | evaluate_corpus(model, corpus, settings, products)
    documents = read_documents(find_files(args.text), "text", args.separator)
    return result | evaluate_text(model, tokenizer, documents, args.batch_size, products)


def evaluate_text(
    model: Transformer,
    tokenizer: Tokenizer,
    documents: Iterable[str],
    batch_size: int,
    precision: torch.dtype = torch.float32,
) -> dict:
    """Score each document's tokens, after BOS and without EOS, in windows of the context length.

    If the tokenizer has no BOS, EOS takes its place, as in training.
    """
    # Tokenize and cut all documents before scoring, because rows are sorted by length.
    rows = []
    num_documents = 0
    num_bytes = 0
    for text in documents:
        rows += windows([tokenizer.bos, *tokenizer.encode(text)], model.context)
        num_documents += 1
        num_bytes += len(text.encode())
    if not rows:
        raise ValueError("the files contain no text. fix: choose a different file with --text")

    nats = total_nats(model, rows, batch_size, precision=precision)
    num_tokens = sum(len(row.tokens) - row.first for row in rows)
    bits_per_byte = nats / math.log(2) / num_bytes
    if isinstance(tokenizer, IdTokenizer):  # the byte length of its tokens is unknown
        bits_per_byte = None
    return {
        "documents": num_documents,
        "tokens": num_tokens,
        "bytes": num_bytes,
        "nats_per_token": nats / num_tokens,
        "bits_per_byte": bits_per_byte,
    }


if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
