"""Measure a model in figures that others publish too, and print them as JSON.

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
from pathlib import Path

from data.files import TEXT_SUFFIXES, find_files, read_documents
from data.tokenizer import IdTokenizer, Tokenizer
from inference.load import load
from inference.text import generate_text
from model.transformer import Transformer
from run import errors
from run.cli import Parser, add_model_options, bounded_number
from run.progress import say, waiting
from tools.lengths import evaluate_corpus, measure_lengths, open_run
from tools.scoring import Score, score_rows, windows
from training.setup import open_corpus


def main(args: argparse.Namespace) -> None:
    with errors.user_input():
        result = evaluate_model(args)
    print(json.dumps(result, default=str))
    say("next: the same command with --run of another model, to compare with")


def parse_arguments() -> argparse.Namespace:
    parser = Parser("python -m tools.evaluate", __doc__, "--text, --slices, --lengths or --tasks")
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
        return result | evaluate_corpus(model, open_corpus(settings["data"]), settings)
    if args.text is not None:
        files = find_files(args.text, TEXT_SUFFIXES)
        documents = read_documents(files, "text", args.separator)
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
    with waiting("tokenizing the text"):
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
            sums = []
            for request in requests:
                rows = windows(self.tok_encode(request.args[0]), model.context)
                sums.append(sum(score for score, _ in score_rows(model, rows, batch_size)))
            return sums

        def generate_until(self, requests: list, **_) -> list[str]:
            answers = []
            for request in requests:
                prompt, options = request.args
                stop_texts = options.get("until") or []
                if isinstance(stop_texts, str):
                    stop_texts = [stop_texts]
                temperature = 0
                if options.get("do_sample"):
                    temperature = options.get("temperature", 1.0)
                answers += generate_text(
                    model,
                    tokenizer,
                    prompt,
                    max_new_tokens=options.get("max_gen_toks", 256),
                    stop_texts=stop_texts,
                    temperature=temperature,
                )
            return answers

    return Harnessed()


if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
