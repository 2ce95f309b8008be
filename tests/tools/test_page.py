"""The comparison page in a real browser, at the widths of a desktop and a phone."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.tools.browser import HEIGHT, look_at, needs_browser
from tests.tools.pages import recall_run, searched, text_run
from tools.compare.report import write_report
from tools.compare.runs import Run

DESKTOP = 1280  # pixels
PHONE = 390


def many(names: list[str], num_seeds: int = 3, outlier: float = 0.0) -> list[Run]:
    """Runs with these names and different losses; `outlier` is added to the last variant's loss."""
    draw = np.random.default_rng(0)
    model = text_run("gqa", 0, 1.0)
    runs = []
    for number, name in enumerate(names):
        mean = 1.2 + 0.01 * draw.normal() + outlier * (number == len(names) - 1)
        for seed in range(num_seeds):
            run = replace(model, folder=Path(f"{name}-{seed}"), settings=deepcopy(model.settings))
            run.settings |= {"name": name, "seed": seed}
            run.lines = [line | {"val_bpb": mean + 0.004 * draw.normal()} for line in model.lines]
            runs.append(run)
    return runs


def with_long_settings() -> list[Run]:
    """Variants with the same name that differ in many settings with long values."""
    runs = []
    changed = ("model.hidden=100", "attention.rope_fraction=0.5", "attention.gated=true")
    for overrides in ((), changed, ("optimizer=adamw", "attention=gdn", "data=text")):
        for seed in range(3):
            run = text_run("gqa", seed, 1.0 + seed / 100, *overrides, "name=gqa")
            run.command = f"python -m tools.compare data.path=/{'long/' * 40}text.txt"
            runs.append(run)
    return runs


def page_of(runs: list[Run], folder: Path) -> str:
    write_report(folder, runs, {"failed-0": "exit 4: training diverged"}, margin=0.01)
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, dict]:
    """Browser measurements of each page, by "NAME WIDTH"."""
    folder = tmp_path_factory.mktemp("pages")
    names = [f"variant_{number}" for number in range(30)]
    two = many(["gqa", "mha"])
    rates = {1.0: 1.0, 0.5: 1.1, 2.0: 1.1}
    cases = {
        "two": two + searched("gqa", rates) + searched("mha", rates),
        "five": many(["gqa", "mha", "local_global", "sliding_window", "value_residual"]),
        "thirty": many(names),
        "outlier": many(names, outlier=3.0),
        "one seed": many(["gqa", "mha"], num_seeds=1),
        "long settings": with_long_settings(),
        "task": [recall_run(name, n, 0.9 - 0.2 * n) for name in ("gqa", "mqa") for n in range(3)],
    }
    pages = {name: page_of(runs, folder) for name, runs in cases.items()}
    return look_at(pages, (DESKTOP, PHONE), folder)


pytestmark = needs_browser
CASES = ("two", "five", "thirty", "outlier", "one seed", "long settings", "task")
everywhere = pytest.mark.parametrize("width", [DESKTOP, PHONE])
each = pytest.mark.parametrize("name", CASES)


@everywhere
@each
def test_words_are_not_cut_and_only_tables_scroll_horizontally(seen, name, width):
    view = seen[f"{name} {width}"]
    assert (view["width"], view["height"]) == (width, HEIGHT)
    assert view["damaged"] == []
    assert view["overflow"] == 0
    assert all(box["overflow"] == "auto" for box in view["boxes"])


@everywhere
@each
def test_the_answer_and_the_figure_are_on_the_first_screen(seen, name, width):
    view = seen[f"{name} {width}"]
    (answer,) = view["answers"]
    assert answer["bottom"] < HEIGHT / 2
    (figure,) = view["figures"]
    assert figure["top"] < HEIGHT and figure["height"] < HEIGHT
    assert figure["width"] <= width


@everywhere
@each
def test_all_details_are_collapsed_initially(seen, name, width):
    view = seen[f"{name} {width}"]
    assert view["openDetails"] == 0 and view["numDetails"] >= 4


@pytest.mark.parametrize("name", ["five", "thirty", "task"])
def test_clicking_a_column_title_sorts_by_that_column(seen, name):
    columns = seen[f"{name} {DESKTOP}"]["sorted"]
    assert len(columns) == 6
    for column in columns:
        assert {state["state"] for state in column["states"]} == {"ascending", "descending"}
        assert column["marked"] == 1  # a screen reader announces only this column
        for state in column["states"]:
            is_falling = state["state"] == "descending"
            cells = state["cells"]
            kinds = [kind(cell) for cell in cells]
            numbers = [number(cell) for cell in cells if kind(cell) == 0]
            words = [cell for cell in cells if kind(cell) == 1]
            # In both directions: numbers first, then words, then empty cells.
            assert kinds == sorted(kinds), column["title"]
            assert numbers == sorted(numbers, reverse=is_falling), column["title"]
            assert words == sorted(words, reverse=is_falling), column["title"]


def kind(cell: str) -> int:
    """0: a number, 1: a word, 2: empty."""
    if not cell:
        return 2
    return 0 if cell[0] in "+-0123456789" else 1


def number(cell: str) -> float:
    return float(cell.replace(",", "").split()[0])


def test_a_table_wider_than_a_phone_scrolls(seen):
    assert any(box["isWide"] for box in seen[f"thirty {PHONE}"]["boxes"])
