"""Measures a model in figures that others publish too, and prints them as JSON.

python -m tools.evaluate --run runs/NAME --text FILE
    nats per token and bits per byte, of any text
python -m tools.evaluate --run runs/NAME --text FILE --context 4096
    in longer windows than it was trained with
python -m tools.evaluate --run runs/NAME --slices
    the metrics of training on all held-out data, by position and by what repeats
python -m tools.evaluate --run runs/NAME --lengths
    the same targets with 1, 2 and 4 times the training context in front of them
python -m tools.evaluate --run runs/NAME --tasks arc_easy,piqa
    lm-evaluation-harness, with its tasks
python -m tools.evaluate --run runs/NAME --tasks mine --task-folder FOLDER
    or with yours, without a network
"""

import argparse
import json
import math
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from data.files import TEXT_SUFFIXES, find_files, read_documents
from data.tokenizer import IdTokenizer, Tokenizer
from inference.load import load
from inference.text import generate_text
from model.layers import fp32
from model.transformer import Transformer
from run import errors
from run.cli import Parser, add_model_options, bounded_number
from tools.lengths import evaluate_corpus, measure_lengths, open_corpus, open_run

Row = tuple[list[int], int]  # tokens, and the index of the first that is scored
# Of a row: the summed log-probability of its scored tokens, and whether all are the most likely.
Score = tuple[float, bool]


def main(args: argparse.Namespace) -> None:
    with errors.user_input():
        result = evaluate_model(args)
    print(json.dumps(result, default=str))


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        "python -m tools.evaluate",
        description=__doc__.partition(",")[0],
        epilog="--text, --slices, --lengths or --tasks",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive = bounded_number(int, 1)
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--text", help="score a file, a glob, or a folder of .txt, .jsonl and .parquet")
    add("--slices", action="store_true", help="what training logs, of all held-out data")
    add("--lengths", action="store_true", help="the held-out loss beyond the training context")
    add("--tasks", help="names of lm-evaluation-harness, with commas between them")
    add_model_options(parser)
    add = parser.add_argument
    add("--context", type=positive, help="tokens of a window, if not as many as in training")

    add = parser.add_argument_group("with --text").add_argument
    add("--separator", default="<|endoftext|>", help="a line between the documents of a .txt")
    add("--documents", type=positive, help="evaluate only the first N documents")

    add = parser.add_argument_group("with --tasks").add_argument
    add("--task-folder", type=Path, help="your tasks, as .yaml")
    add("--num-fewshot", type=bounded_number(int, 0), help="examples before each question")
    add("--limit", type=positive, help="questions of each task")
    return parser.parse_args()


def evaluate_model(args: argparse.Namespace) -> dict:
    if args.lengths:
        return measure_lengths(args.run)
    model, tokenizer, name = load(args.run, args.device, args.dtype, args.context)
    result = {"name": name, "context": model.context}
    if args.slices:
        _, settings = open_run(args.run)
        return result | evaluate_corpus(model, open_corpus(settings), settings)
    if args.text is not None:
        files = find_files(args.text, TEXT_SUFFIXES)
        documents = islice(read_documents(files, "text", args.separator), args.documents)
        return result | evaluate_text(model, tokenizer, documents, args.batch_size)
    return result | {"tasks": evaluate_tasks(model, tokenizer, args)}


def evaluate_text(
    model: Transformer, tokenizer: Tokenizer, documents: Iterable[str], batch_size: int
) -> dict:
    """Scores the tokens of each document, after BOS and without EOS, in windows of the context."""
    # Tokenize and cut all documents before scoring, because rows are sorted by length.
    rows = []
    num_documents = 0
    num_bytes = 0
    for text in documents:
        rows += windows(tokenizer.encode_prompt(text), model.context)
        num_documents += 1
        num_bytes += len(text.encode())
    if not rows:
        raise ValueError("there is no text. fix: --text PATH of another")

    nats = -sum(score for score, _ in score_rows(model, rows, batch_size))
    num_tokens = sum(len(tokens) - 1 for tokens, _ in rows)
    bits_per_byte = nats / math.log(2) / num_bytes
    if isinstance(tokenizer, IdTokenizer):  # the bytes of its tokens are unknown
        bits_per_byte = None
    return {
        "documents": num_documents,
        "tokens": num_tokens,
        "bytes": num_bytes,
        "nats_per_token": nats / num_tokens,
        "bits_per_byte": bits_per_byte,
    }


def windows(tokens: list[int], context: int) -> list[Row]:
    """Cuts tokens into rows; every token but the first is scored once."""
    starts = range(0, len(tokens) - 1, context)
    return [(tokens[start : start + context + 1], 1) for start in starts]


@torch.inference_mode()
def score_rows(model: Transformer, rows: list[Row], batch_size: int) -> list[Score]:
    """Scores rows in batches, the longest first, so that rows of a batch have similar lengths."""
    device = model.embed.weight.device
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
    scores = {}
    for start in range(0, len(rows), batch_size):
        # Pad on the right, which earlier tokens do not attend to. The last token is only a target.
        indices = order[start : start + batch_size]
        inputs = [torch.tensor(rows[index][0][:-1]) for index in indices]
        hidden = model.hidden(pad_sequence(inputs, batch_first=True).to(device))
        for index, states in zip(indices, hidden, strict=True):
            scores[index] = score_row(model, states, rows[index])
    return [scores[index] for index in range(len(rows))]


def score_row(model: Transformer, hidden: Tensor, row: Row) -> Score:
    """Scores a row by its hidden states (T, D)."""
    tokens, first = row
    # The hidden state at a token predicts the next one.
    logits = fp32(model.logits(hidden[first - 1 : len(tokens) - 1]))  # (scored tokens, V)
    targets = torch.tensor(tokens, device=hidden.device)[first:]  # none of an empty answer
    nats = cross_entropy(logits, targets, reduction="none")
    is_greedy = (logits.argmax(dim=-1) == targets).all()
    return -nats.double().sum().item(), is_greedy.item()


def evaluate_tasks(model: Transformer, tokenizer: Tokenizer, args: argparse.Namespace) -> dict:
    """Runs lm-evaluation-harness, and returns its results by task.

    Raises ValueError where it is not installed, or has no such task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(
            f"lm-evaluation-harness is not installed ({error}). fix: pip install lm_eval"
        ) from None

    # The tasks of a folder are found without reading the thousands of the harness. It refuses an
    # unknown task with a traceback, so look it up first.
    folder = args.task_folder and str(args.task_folder)
    manager = TaskManager(include_path=folder, include_defaults=folder is None)
    names = args.tasks.split(",")
    unknown = set(names) - set(manager.all_tasks)
    if unknown:
        raise ValueError(
            f"unknown tasks ({', '.join(sorted(unknown))}). "
            "fix: a file in --task-folder, or without that, one of lm_eval ls tasks"
        )
    evaluation = simple_evaluate(
        lm_eval_model(model, tokenizer, args.batch_size),
        tasks=names,
        task_manager=manager,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
    )
    return evaluation["results"]


def lm_eval_model(model: Transformer, tokenizer: Tokenizer, batch_size: int):
    """Wraps a model as lm-evaluation-harness calls it; each text begins with BOS.

    The class is made here because its base class is part of the harness, which is optional.
    """
    from lm_eval.api.model import TemplateLM

    class Harnessed(TemplateLM):
        eot_token_id = tokenizer.eos
        prefix_token_id = tokenizer.bos

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
            if add_special_tokens is False:
                return tokenizer.encode(string)
            return tokenizer.encode_prompt(string)

        def _loglikelihood_tokens(self, requests: list, **_) -> list[Score]:
            """Scores answers (text, tokens of the question, tokens of the answer) of choices."""
            rows = []
            for _, question, answer in requests:
                # A question that does not fit loses its beginning.
                tokens = [*question, *answer][-model.context - 1 :]
                if len(answer) >= len(tokens):
                    raise ValueError(
                        f"an answer of {len(answer)} tokens (context {model.context}). "
                        "fix: --tasks NAME of another"
                    )
                rows.append((tokens, len(tokens) - len(answer)))
            return score_rows(model, rows, batch_size)

        def loglikelihood_rolling(self, requests: list, **_) -> list[float]:
            """Scores whole texts, of any length."""
            # Rows of all texts are scored in common batches, and summed text by text.
            texts = [self.tok_encode(request.args[0]) for request in requests]
            rows = [windows(tokens, model.context) for tokens in texts]
            scores = iter(score_rows(model, list(chain(*rows)), batch_size))
            return [sum(score for score, _ in islice(scores, len(text))) for text in rows]

        def generate_until(self, requests: list, **_) -> list[str]:
            return [self.answer(*request.args) for request in requests]

        def answer(self, prompt: str, options: dict) -> str:
            stop_texts = options.get("until") or []
            if isinstance(stop_texts, str):
                stop_texts = [stop_texts]
            temperature = 0
            if options.get("do_sample"):
                temperature = options.get("temperature", 1.0)
            (text,) = generate_text(
                model,
                tokenizer,
                prompt,
                max_new_tokens=options.get("max_gen_toks", 256),
                stop_texts=stop_texts,
                temperature=temperature,
            )
            return text

    return Harnessed()


if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
