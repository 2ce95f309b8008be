"""How good a model is, in numbers that others quote too, as JSON:

python -m tools.evaluate --run runs/NAME --text FILE            nats per token and bits per byte, of any text
python -m tools.evaluate --run runs/NAME --tasks arc_easy,piqa  lm-evaluation-harness, with its tasks
python -m tools.evaluate --run runs/NAME --tasks mine --task-folder FOLDER      or with yours, without a network
"""

import argparse
import json
import math
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from common import errors, hardware
from common.cli import Parser, bounded_number
from data.files import TEXTS, find_files, read_documents
from data.tokenizer import IdTokenizer, Tokenizer
from inference.engine import generate
from inference.load import load
from inference.sampling import sample
from inference.text import StreamingText, truncate_left
from model.layers import fp32
from model.transformer import Transformer

Row = tuple[list[int], int]  # tokens, and the first of them that is scored


def arguments() -> argparse.Namespace:
    about, how = __doc__.partition(",")[0], argparse.ArgumentDefaultsHelpFormatter
    parser = Parser(
        "python -m tools.evaluate",
        description=about,
        epilog="--text or --tasks",
        formatter_class=how,
    )
    add = parser.add_argument
    add(
        "--run",
        type=Path,
        help="a run, a Hugging Face folder or llama2.c's .bin (default: the run that saved last)",
    )
    add("--text", help="a file, a glob, or a folder of .txt, .jsonl and .parquet")
    add("--separator", default="<|endoftext|>", help="a line between the documents of a .txt")
    add("--documents", type=bounded_number(int, 1), help="look at the first so many")
    add("--truncate", action="store_true", help="leave out what lies beyond the model's context")
    add("--tasks", help="names of lm-evaluation-harness, with commas between them")
    add("--task-folder", type=Path, help="your tasks, as .yaml")
    add("--num-fewshot", type=bounded_number(int, 0), help="examples before each question")
    add("--limit", type=bounded_number(int, 1), help="questions of each task")
    add("--batch-size", type=bounded_number(int, 1), default=8)
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    add(
        "--dtype",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="auto: bf16 on a GPU, else fp32",
    )
    given = parser.parse_args()
    if (given.text is None) == (given.tasks is None):
        parser.error("exactly one of --text and --tasks is needed")
    if given.tasks is None and (given.task_folder or given.limit or given.num_fewshot is not None):
        parser.error("--task-folder, --limit and --num-fewshot are for --tasks")
    if given.text is None and (given.documents or given.truncate):
        parser.error("--documents and --truncate are for --text")
    if given.task_folder is not None and not given.task_folder.is_dir():
        parser.error(f"there is no folder {given.task_folder}")
    return given


def main(given: argparse.Namespace) -> None:
    with errors.user_input():
        model, tokenizer, name = load(given.run, hardware.pick_device(given.device), given.dtype)
        if given.text is not None:
            found = {"name": name, **of_text(model, tokenizer, given)}
        else:
            found = {"name": name, "tasks": of_tasks(model, tokenizer, given)}
    print(json.dumps(found, default=str))


def of_text(
    model: Transformer, tokenizer: Tokenizer, given: argparse.Namespace
) -> dict[str, float]:
    """Of each document's own tokens behind BOS, in windows of the context; its end is not counted."""
    size, rows, count = 0, [], 0
    for count, text in enumerate(
        read_documents(find_files(given.text, TEXTS), "text", given.separator), 1
    ):
        tokens = [tokenizer.bos, *tokenizer.encode(text)]
        if given.truncate and len(tokens) > model.context:
            tokens = tokens[: model.context]
            text = tokenizer.decode(tokens)
        rows += windows(tokens, model.context)
        size += len(text.encode())
        if count == given.documents:
            break
    if not rows:
        raise ValueError(f"no text (--text {given.text}). fix: a file that is not empty")
    nats, tokens = (
        -sum(each for each, _ in scores(model, rows, given.batch_size)),
        sum(len(row) - 1 for row, _ in rows),
    )
    rates = {"nats_per_token": nats / tokens, "bits_per_byte": nats / math.log(2) / size}
    if isinstance(tokenizer, IdTokenizer):
        rates["bits_per_byte"] = None
    return {"documents": count, "tokens": tokens, "bytes": size, **rates}


def windows(tokens: list[int], context: int) -> Iterator[Row]:
    """All but the first token once, each seen from as many before it as a window has."""
    for start in range(0, len(tokens) - 1, context):
        yield tokens[start : start + context + 1], 1


@torch.inference_mode()
def scores(model: Transformer, rows: list[Row], batch: int) -> list[tuple[float, bool]]:
    """Of each row, the summed log-probability of its tokens from the first scored on, and whether all are likeliest."""
    order, found = sorted(range(len(rows)), key=lambda row: -len(rows[row][0])), {}
    for start in range(0, len(rows), batch):
        some = [rows[place] for place in order[start : start + batch]]
        width, device = len(some[0][0]) - 1, model.embed.weight.device
        padded = torch.tensor(
            [tokens[:-1] + [0] * (width + 1 - len(tokens)) for tokens, _ in some], device=device
        )
        for place, hidden, (tokens, first) in zip(
            order[start:], model.hidden(padded), some, strict=False
        ):
            logits = fp32(model.logits(hidden[first - 1 : len(tokens) - 1]))
            targets = torch.tensor(tokens[first:], device=device)
            chosen = logits.log_softmax(dim=-1).gather(-1, targets[:, None]).double().sum()
            found[place] = chosen.item(), bool((logits.argmax(dim=-1) == targets).all())
    return [found[row] for row in range(len(rows))]


def of_tasks(
    model: Transformer, tokenizer: Tokenizer, given: argparse.Namespace
) -> dict[str, dict]:
    """What lm-evaluation-harness measures. Raises ValueError where it is not there, or has no such task."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(
            f"lm-evaluation-harness is not installed ({error}). fix: pip install lm_eval"
        ) from None
    tasks, names = (
        TaskManager(include_path=given.task_folder and str(given.task_folder)),
        given.tasks.split(","),
    )
    if unknown := [name for name in names if name not in tasks.all_tasks]:
        raise ValueError(
            f"unknown tasks ({', '.join(unknown)}). fix: --task-folder, or one of lm_eval ls tasks"
        )
    asked = {
        "tasks": names,
        "task_manager": tasks,
        "num_fewshot": given.num_fewshot,
        "limit": given.limit,
    }
    return simple_evaluate(harnessed(model, tokenizer, given.batch_size), **asked)["results"]


def harnessed(model: Transformer, tokenizer: Tokenizer, batch: int):
    """A model as lm-evaluation-harness asks it; each text begins with BOS."""
    from lm_eval.api.model import TemplateLM

    class Harnessed(TemplateLM):
        eot_token_id, prefix_token_id = tokenizer.eos, tokenizer.bos

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
            return [tokenizer.bos] * (add_special_tokens is not False) + tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: list, **_) -> list[tuple[float, bool]]:
            rows = []
            for _, before, after in requests:
                tokens = [*before, *after][-model.context - 1 :]
                if len(after) >= len(tokens):
                    raise ValueError(
                        f"an answer of {len(after)} tokens (context {model.context}). fix: another task"
                    )
                rows.append((tokens, len(tokens) - len(after)))
            return scores(model, rows, batch)

        def loglikelihood_rolling(self, requests: list, **_) -> list[float]:
            texts = [
                [*windows(self.tok_encode(request.args[0]), model.context)] for request in requests
            ]
            found = iter(scores(model, [row for rows in texts for row in rows], batch))
            return [sum(score for score, _ in islice(found, len(rows))) for rows in texts]

        def generate_until(self, requests: list, **_) -> list[str]:
            return [self.answer(*request.args) for request in requests]

        def answer(self, prompt: str, how: dict) -> str:
            stop_texts = how.get("until") or []
            if isinstance(stop_texts, str):
                stop_texts = [stop_texts]
            max_new_tokens = how.get("max_gen_toks", 256)
            temperature = 0
            if how.get("do_sample"):
                temperature = how.get("temperature", 1.0)

            tokens = truncate_left(self.tok_encode(prompt), model.context)
            text = StreamingText(tokenizer, tokens, max_new_tokens, stop_texts=stop_texts)
            capacity = min(model.context, len(tokens) + max_new_tokens)
            weight = model.embed.weight
            cache = model.new_cache(1, capacity, weight.dtype, weight.device)
            sampler = partial(sample, temperature=temperature)
            for _ in generate(model, [text], sampler, cache=cache):
                pass
            return text.text

    return Harnessed()


if __name__ == "__main__":
    with errors.report_errors():
        main(arguments())
