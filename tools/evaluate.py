"""Evaluate a model with standard metrics, and print them as JSON.

python -m tools.evaluate --run runs/NAME --text FILE
    nats per token and bits per byte on any text
python -m tools.evaluate --run runs/NAME --text FILE --context 4096
    in windows longer than the training context
python -m tools.evaluate --run runs/NAME --slices
    the same metrics as in training, over all held-out data, by position and for repeated tokens
python -m tools.evaluate --run runs/NAME --lengths
    the loss on one set of targets, at the end of windows of 1, 2 and 4 times the training context

For tasks such as arc_easy, use lm-evaluation-harness, which reads exports of tools.export_hf.
"""

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from data.files import find_files, read_documents
from data.loader import document_ids
from data.tokenizer import IdTokenizer, Tokenizer
from inference.load import load
from model.layers import fp32
from model.transformer import Transformer
from run import checkpoint, errors, hardware
from run.cli import Parser, add_batch_option, add_model_options, bounded_number
from run.distributed import Ranks
from run.progress import print0
from run.signals import Signals
from training.evaluation import evaluate
from training.loss import LanguageModelLoss
from training.setup import open_run_corpus

BATCH_TOKENS = 4096  # inputs per batch (at least one window), with --slices and --lengths
MULTIPLES = (1, 2, 4)  # of the training context, with --lengths
NUM_TARGETS = 16_384  # approximate maximum number of tokens that --lengths scores


def main(args: argparse.Namespace) -> None:
    with errors.exit_on_invalid_input():
        if args.slices:
            result = measure_slices(args)
        elif args.lengths:
            result = measure_lengths(args.run, args.device)
        else:
            result = measure_text(args)
    print(json.dumps(result, default=str))
    print0("next: to compare models, run the same command with a different --run")


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
        help="compute the held-out loss at 1, 2 and 4 times the training context",
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


def measure_text(args: argparse.Namespace) -> dict:
    """Score each document's tokens, after BOS and without EOS, in windows of the context length.

    If the tokenizer has no BOS, EOS takes its place, as in training.
    """
    model, tokenizer, name, precision = load_to_score(
        args.run, args.device, args.dtype, args.context
    )
    documents = read_documents(find_files(args.text), "text", args.separator)
    # Tokenize and cut all documents before scoring, because rows are sorted by length.
    rows = []
    num_documents = 0
    num_bytes = 0
    for text in documents:
        rows += windows([tokenizer.bos, *tokenizer.encode(text)], model.context)
        num_documents += 1
        num_bytes += len(text.encode())
    if not rows:
        raise ValueError(f"the files contain no text (--text {args.text})")

    print0(f"scoring {len(rows)} windows")
    nats = total_nats(model, rows, args.batch_size, precision=precision)
    num_tokens = sum(len(row.tokens) - row.first for row in rows)
    bits_per_byte = nats / math.log(2) / num_bytes
    if isinstance(tokenizer, IdTokenizer):  # the byte length of its tokens is unknown
        bits_per_byte = None
    return {
        "name": name,
        "context": model.context,
        "documents": num_documents,
        "tokens": num_tokens,
        "bytes": num_bytes,
        "nats_per_token": nats / num_tokens,
        "bits_per_byte": bits_per_byte,
    }


def measure_slices(args: argparse.Namespace) -> dict:
    """Return the metrics of training's evaluations, computed over all held-out data."""
    newest, settings = open_run(args.run)
    model, _, name, precision = load_to_score(
        newest, args.device, args.dtype, args.context, settings["precision"]
    )
    corpus = open_run_corpus(newest, settings).with_context(model.context)
    num_tokens = corpus.validation_tokens(model.context)
    bos = corpus.tokenizer.bos if settings["document_mask"] else None
    print0(f"evaluating on {num_tokens:,} held-out tokens")
    metrics = evaluate(
        LanguageModelLoss(model, z_loss=0.0, bos=bos),
        corpus,
        num_tokens,
        model.context,
        max(1, BATCH_TOKENS // model.context),
        precision,
        Ranks(0, 1, model.embed.weight.device),
        Signals(),
        with_gradients=False,
    )
    return {"name": name, "context": model.context} | metrics


def measure_lengths(run_dir: Path | None, device: str = "auto") -> dict[str, float]:
    """Return the held-out loss, in nats per token, at MULTIPLES of a run's training context.

    In each window, only the last tokens are scored, half as many as the training context has, so
    that every context length scores the same targets, with more or less text in front of them.
    Windows overlap, but their targets do not. Raises ValueError if there is no run, or if its text
    has changed or is too short.
    """
    newest, settings = open_run(run_dir)
    corpus = open_run_corpus(newest, settings)
    longest = MULTIPLES[-1] * settings["context"] + 1
    if len(corpus.validation) < longest:
        raise ValueError(
            f"too few held-out tokens ({len(corpus.validation)}; a window needs {longest}). fix: "
            "--text FILE --context N; for a task: --slices --context N"
        )
    num_targets = settings["context"] // 2  # per window
    ends = range(longest, len(corpus.validation) + 1, num_targets)
    ends = ends[: NUM_TARGETS // num_targets + 1]
    bos = corpus.tokenizer.bos if settings["document_mask"] else None
    losses = {}
    for multiple in MULTIPLES:
        context = multiple * settings["context"]
        model, _, _, precision = load_to_score(
            newest, device, context=context, precision=settings["precision"]
        )
        rows = []
        for end in ends:
            tokens = corpus.validation[end - context - 1 : end].tolist()
            rows.append(Row(tokens, first=len(tokens) - num_targets))
        batch_size = max(1, BATCH_TOKENS // context)
        nats = total_nats(model, rows, batch_size, bos, precision=precision)
        losses[str(multiple)] = nats / (len(rows) * num_targets)
    return losses


def open_run(path: Path | None) -> tuple[Path, dict]:
    """Return the newest checkpoint of a run, by default the newest run, and its settings.

    Raises ValueError if there is no run, or for a model that is not from a run.
    """
    newest = checkpoint.find_model(path)
    settings = checkpoint.load_config(newest)
    if not {"data", "text"} <= settings.keys():
        raise ValueError(f"not a run, so it has no held-out data ({newest}). fix: --text FILE")
    return newest, settings


def load_to_score(
    path: Path | None,
    device: str = "auto",
    dtype: str = "auto",
    context: int | None = None,
    precision: str = "auto",
) -> tuple[Transformer, Tokenizer, str, torch.dtype]:
    """Load a model for scoring text; return the results of `load` and the dtype of matrix products.

    With dtype=auto, the weights are in fp32, and a CUDA GPU multiplies in `precision`. In the
    precision of training, the loss equals the loss that training logged for the same tokens, apart
    from rounding: on such a GPU, training may use TF32 for the products that stay in fp32. Other
    values of `dtype` have the same effect as in generation.
    """
    weights = "fp32" if dtype == "auto" else dtype
    model, tokenizer, name = load(path, device, weights, context)
    device = model.embed.weight.device
    products = torch.float32
    if dtype == "auto" and device.type == "cuda":
        products = hardware.pick_precision(precision, device)
    return model, tokenizer, name, products


class Row(NamedTuple):
    tokens: list[int]
    first: int  # the index of the first token that is scored


def windows(tokens: list[int], context: int) -> list[Row]:
    """Cut tokens into rows of up to `context` inputs; every token but the first is scored once.

    If the last of several rows would be shorter, it begins earlier, so that its scored tokens have
    more context. This is the rolling log-likelihood of lm-evaluation-harness
    (get_rolling_token_windows in lm_eval/utils.py).
    """
    rows = []
    for start in range(0, len(tokens) - 1, context):
        last = min(start + context, len(tokens) - 1)  # the last token that is scored
        begin = max(0, last - context)
        rows.append(Row(tokens[begin : last + 1], first=start + 1 - begin))
    return rows


@torch.inference_mode()
def total_nats(
    model: Transformer,
    rows: list[Row],
    batch_size: int,
    bos: int | None = None,
    *,
    precision: torch.dtype = torch.float32,
) -> float:
    """Return the total loss of all scored tokens in nats, for up to `batch_size` rows at a time.

    Matrices are multiplied in `precision`, or in the dtype of the weights if `precision` is fp32.
    If `bos` is given, this token begins a document, and no token attends to another document.
    """
    device = model.embed.weight.device
    total = 0.0
    # Rows of a batch have similar lengths. The padding is on the right, so no token of a row
    # attends to it.
    rows = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        inputs = [torch.tensor(row.tokens[:-1]) for row in batch]
        inputs = pad_sequence(inputs, batch_first=True).to(device)
        documents = None
        if bos is not None:
            documents = document_ids(inputs, bos)
        with hardware.autocast(device, precision):
            hidden, _ = model.hidden_states(inputs, documents=documents)
        for row, states in zip(batch, hidden, strict=True):
            # No token precedes the first token, so it cannot be predicted.
            assert 1 <= row.first < len(row.tokens)
            # The hidden state at a token predicts the next one.
            states = states[row.first - 1 : len(row.tokens) - 1]
            with hardware.autocast(device, precision):
                logits = model.logits(states)  # (targets, V)
            logits = fp32(logits)
            targets = torch.tensor(row.tokens[row.first :], device=device)
            nats = cross_entropy(logits, targets, reduction="none")
            total += nats.cpu().double().sum().item()  # Apple GPUs have no float64
    return total


if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
