"""Create run records for a report, and read the report's tables."""

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

from tests.conftest import TINY, settings_of
from tools.compare.runs import Run


def text_run(variant: str, seed: int, loss: float, *overrides: str, tokens: int = 1000) -> Run:
    """A run on text with this final loss in bits per byte."""
    # Composed once for all seeds.
    words = (f"attention={variant}", f"name={variant}", *overrides)
    settings = settings_of(*TINY, *words).model_dump()
    settings |= {"seed": seed, "machine": {"device": "cpu", "precision": "float32"}, "text": "abc"}
    slices = {"repeated": 2 * loss, "new": 4 * loss}
    first = {"step": 1, "tokens": tokens // 2, "seconds": 1.0, "train_loss": 6.0}
    last = first | {"step": 2, "tokens": tokens, "val_loss": 3 * loss, "val_bpb": loss}
    last["eval_tokens"] = 500
    last["slices"] = {name: {"loss": value, "tokens": 7} for name, value in slices.items()}
    run = Run(Path(f"{variant}-{seed}"), settings, [first, last], True, 100.0 + seed)
    run.commit = "abc123"
    run.command = "python -m tools.compare --margin 0.02"
    if variant != "mqa":
        run.lengths = {"1": 3.0, "2": 3.2, "4": 3.5 + 0.01 * seed}
    run.decoding = {"decoding, ms/token": 1.25}
    return run


def searched(run: Run, losses: dict[float, float]) -> list[Run]:
    """The runs of a learning rate search for the variant of a run, with losses by factor."""
    runs = []
    for factor, loss in losses.items():
        bits_per_byte = run.last["val_bpb"] and loss / 3
        last = run.last | {"val_loss": loss, "val_bpb": bits_per_byte}
        runs.append(replace(run, factor=factor, lines=[last]))
    return runs


def recall_run(variant: str, seed: int, accuracy: float) -> Run:
    """A run on the recall task with this final accuracy."""
    run = text_run(variant, seed, 1.0)
    run.settings["data"] = {
        "_target_": "data.tasks.Recall",
        "pairs": [4, 8],
        "vocab_size": 8192,
        "power": 0.01,
        "context": 64,
    }
    run.lines[0] |= {"recall_accuracy": accuracy - 0.06}
    run.lines[-1] |= {"val_bpb": None, "slices": {}, "recall_accuracy": accuracy}
    return run


def table(page: str, number: int) -> dict[str, dict[str, str]]:
    """Read a table of report.html: cells by row name and column title."""
    block = re.findall(r"<table.*?</table>", page, re.DOTALL)[number]
    rows = []
    for row in re.findall(r"<tr.*?</tr>", block, re.DOTALL):
        cells = re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.DOTALL)
        rows.append([unescape(re.sub("<.*?>", "", cell)) for cell in cells])
    header, *body = rows
    return {row[0]: dict(zip(header, row, strict=True)) for row in body}
