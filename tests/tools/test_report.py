"""The report says what the runs show, in every measure, and no more."""

import math
import re
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.conftest import TINY, settings_of
from tests.tools.pages import table
from tools.compare import report
from tools.compare.plots import ForestRow, draw_forest
from tools.compare.runs import Run, changes

SEEDS = (0, 1, 2)
# Recall of each seed.
ACCURACY = {"gqa": (1.0, 0.97, 0.2), "mqa": (0.95, 0.92, 0.91), "retention": (0.2, 0.17, 0.19)}
FLOOR = 0.1875  # of one or the other of 4 or 8 values that are all different


def text_run(variant: str, seed: int, loss: float, *overrides: str, tokens: int = 1000) -> Run:
    """A run on text that ended at this loss in bits per byte."""
    words = (f"attention={variant}", f"seed={seed}", f"name={variant}", *overrides)
    settings = settings_of(*TINY, *words).model_dump() | {"machine": {"device": "cpu"}}
    slices = {"repeated": 2 * loss, "new": 4 * loss}
    first = {"step": 1, "tokens": tokens // 2, "seconds": 1.0, "train_loss": 6.0}
    last = first | {"step": 2, "tokens": tokens, "val_loss": 3 * loss, "val_bpb": loss}
    last["slices"] = {name: {"loss": value, "tokens": 7} for name, value in slices.items()}
    run = Run(Path(f"{variant}-{seed}"), settings, [first, last], True, 100.0 + seed)
    run.commit = "abc123"
    run.command = "python -m tools.compare --margin 0.02"
    if variant != "mqa":
        run.lengths = {"1": 3.0, "2": 3.2, "4": 3.5 + 0.01 * seed}
    run.decoding = {"decoding, ms/token": 1.25}
    return run


def searched(variant: str, losses: dict[float, float]) -> list[Run]:
    """The runs of a search for learning rates, by the factor of the rates; inf diverged."""
    runs = []
    for factor, loss in losses.items():
        run = text_run(variant, 1000, loss)
        run.factor = factor
        if loss == float("inf"):
            run.lines = []
        runs.append(run)
    return runs


def recall_run(variant: str, seed: int) -> Run:
    run = text_run(variant, seed, 1.0)
    run.settings["data"] = {
        "_target_": "data.tasks.Recall",
        "pairs": [4, 8],
        "vocab_size": 8192,
        "power": 0.01,
        "context": 64,
    }
    accuracy = ACCURACY[variant][seed]
    run.lines[0] |= {"recall_accuracy": accuracy - 0.06}
    run.lines[-1] |= {"val_bpb": None, "slices": {}, "recall_accuracy": accuracy}
    return run


LOSSES = {"gqa": 1.0, "mqa": 0.98, "retention": 1.2}
RUNS = [
    *(text_run(name, seed, LOSSES[name] + 0.001 * seed**2) for name in LOSSES for seed in SEEDS),
    *(recall_run(name, seed) for name in ACCURACY for seed in SEEDS),
]


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Writes the report of runs -> report.html and the summary."""
    folder = tmp_path_factory.mktemp("report")

    def written(runs: list[Run], **problems: str) -> tuple[str, str]:
        summary = report.write_report(folder, runs, problems, margin=0.01)
        return (folder / "report.html").read_text(encoding="utf-8"), summary

    return written


@pytest.fixture(scope="module")
def whole(write) -> tuple[str, str]:
    """The report of RUNS: report.html and the summary."""
    return write(RUNS)


def test_each_variant_has_a_row_with_every_measure(whole):
    rows, parts, recall = (table(whole[0], number) for number in range(3))
    # The best first.
    assert list(rows) == list(parts) == list(recall) == ["mqa", "gqa", "retention"]
    assert rows["gqa"]["verdict on bits per byte"] == "baseline"
    assert rows["mqa"]["bits per byte"] == "0.9817"
    difference = rows["retention"]["difference in bits per byte"]
    # Dunnett's critical value for two variants and 6 degrees of freedom is 2.86 (his table).
    half = 2.86 * np.std([0, 0.001, 0.004], ddof=1) * (2 / 3) ** 0.5
    ends = [float(end) for end in re.findall(r"[+-][\d.]+", difference)]
    assert ends == pytest.approx([0.2, 0.2 - half, 0.2 + half], abs=1.1e-4)
    assert rows["retention"]["verdict on bits per byte"] == "worse"
    assert parts["mqa"]["4 x the context, nats more"] == "n/a"
    assert parts["gqa"]["4 x the context, nats more"] == "0.5100"
    assert parts["mqa"]["verdict on repeated tokens, nats"] == "better"
    assert rows["gqa"]["training, tokens/s"] == "101"
    assert rows["gqa"]["decoding, ms/token"] == "1.25"
    assert rows["gqa"]["settings"] == "" and "kv_heads=1" in rows["mqa"]["settings"]


def test_seeds_that_solve_a_task_are_counted(whole):
    page, summary = whole
    rows = table(page, 2)
    assert [row["seeds that solve it"] for row in rows.values()] == ["3 of 3", "2 of 3", "0 of 3"]
    # The first evaluation of gqa-0 has solved it already, and of gqa-1 not.
    assert rows["mqa"]["million tokens until then"] == "0.00"
    assert rows["retention"]["million tokens until then"] == "never"
    assert rows["retention"]["accuracy, %"] == "17.0 to 20.0"
    assert f"(floor {FLOOR:.3f}), seeds that reach 90%: mqa 3 of 3, gqa 2 of 3, " in summary
    assert "retention 0 of 3 (at the floor)." in summary


def test_each_size_has_a_baseline_of_its_own(write):
    runs = [
        text_run(
            variant,
            seed,
            loss + dim * (1 + 0.0001 * seed),
            f"model.dim={dim}",
            f"name={variant}-dim-{dim}",
        )
        for variant, loss in (("gqa", 1.0), ("mqa", 1.1))
        for dim in (32, 64)
        for seed in (0, 1)
    ]
    page, summary = write(runs)
    for number, dim in enumerate((32, 64)):
        rows = table(page, 2 * number)
        assert list(rows) == [f"gqa-dim-{dim}", f"mqa-dim-{dim}"]
        assert rows[f"gqa-dim-{dim}"]["verdict on bits per byte"] == "baseline"
        cell = rows[f"mqa-dim-{dim}"]["difference in bits per byte"]
        assert cell.startswith("+0.1000 [+0.0")
        assert f"Beside gqa-dim-{dim} (2 seeds), bits per byte with a margin" in summary


def test_what_the_search_found_stands_in_the_report(write):
    inf = float("inf")
    runs = [run for run in RUNS if run.task == "text"]
    found = {
        "gqa": {1.0: 1.0, 0.5: 1.1, 2.0: 1.1, 0.25: 1.4, 4.0: 1.4},
        "mqa": {1.0: 1.05, 0.5: 1.2, 2.0: 1.0, 0.25: 1.6, 4.0: 1.05},
        "retention": {1.0: 1.2, 0.5: 1.3, 2.0: 1.1, 0.25: 1.4, 4.0: 1.05, 8.0: 1.02, 16.0: inf},
    }
    edge = {"retention": {1.0: 1.2, 0.5: 1.1}}
    page, _ = write(runs + [run for name, each in found.items() for run in searched(name, each)])
    rows = table(page, 2)
    assert [row["optimum x"] for row in rows.values()][:2] == ["1", "2"]
    assert rows["gqa"]["off by two, nats"] == "+0.3000"
    assert [row["diverged"] for row in rows.values()] == ["0", "0", "1"]
    assert rows["mqa"]["nats at the common rates"] == "3.1500"
    assert rows["retention"]["tried"] == "0.25, 0.5, 1, 2, 4, 8, 16"
    assert table(page, 0)["mqa"]["verdict on bits per byte"] == "better"
    # A best rate at the edge of what was tried gives no verdict.
    page, summary = write(runs + [r for name, each in edge.items() for r in searched(name, each)])
    assert table(page, 0)["retention"]["verdict on bits per byte"] == "best rate at the edge"
    assert "best rate at the edge: retention" in summary
    # What has been found so far can be seen before anything is judged.
    page, summary = write(searched("gqa", found["gqa"]))
    assert table(page, 0)["gqa"]["optimum x"] == "1" and "has no run that judges" in summary


def test_seeds_that_diverged_count(write):
    runs = [run for run in RUNS if not (run.settings["name"] == "mqa" and run.seed == 0)]
    for run in RUNS:
        if run not in runs:
            runs.append(replace(run, lines=[]))
    page, summary = write(runs)
    assert table(page, 0)["mqa"]["verdict on bits per byte"] == "seeds diverged"
    assert table(page, 1)["mqa"]["verdict on repeated tokens, nats"] == "seeds diverged"
    assert table(page, 2)["mqa"]["seeds that solve it"] == "2 of 3" and "mqa 2 of 3" in summary


def test_a_baseline_without_a_run_is_not_replaced(write):
    runs = [replace(run, baseline="mha") for run in RUNS]
    page, summary = write(runs)
    assert summary.startswith("mha, the baseline, has no run") and "verdict" not in page
    # Nor does the order of the runs choose another.
    runs = [replace(run, baseline="mqa") for run in RUNS if run.task == "text"]
    assert table(write(runs)[0], 0)["mqa"]["verdict on bits per byte"] == "baseline"


def test_what_was_not_trained_or_logged_has_no_value(write):
    old = [text_run("gqa", 0, 1.0), text_run("gqa", 1, 1.1)]
    del old[0].lines[-1]["slices"]
    page = write(old, failed="exit 4: training diverged")[0]
    assert table(page, 1)["gqa"]["new tokens, nats"] == "n/a"
    assert "failed is not in the report: exit 4: training diverged" in page


def test_the_page_stands_alone_in_any_color_scheme(whole):
    page, summary = whole
    assert "<script" not in page and "http" not in re.sub(r'xmlns(:\w+)?="\S+"', "", page)
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert page.count("<svg") == 2 and "#000000" not in page and "currentColor" in page
    ids = re.findall(r'clipPath id="(.*?)"', page)
    assert len(set(ids)) == len(ids) > 0
    # Every tag but these is closed, in order.
    ElementTree.fromstring(re.sub("<!doctype html>|<meta .*?>|&nbsp;", "", page))
    # What a reader looks for comes first.
    parts = ["<h2>", "Beside gqa (3 seeds)", "<svg", "<table"]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    assert "margin of 0.01: better: mqa; worse: retention. Found with a chance" in summary
    assert "by variant: differences of 0.0" in summary
    assert "trained at commit abc123." in page
    assert "gqa was trained by python -m tools.compare --margin 0.02, with" in page


UNTUNED = "No learning rate was tuned for any variant (--tune does). "
ENOUGH = "enough: steps={} max_minutes=null, {} a run at the speed of these"


@pytest.mark.parametrize(
    "ratio, num_seeds, doubt",
    [
        (10.1, 3, None),
        (9.9, 3, f"9.9 of 10 tokens a parameter ({ENOUGH})"),
        (10.1, 2, "2 of 3 seeds"),
    ],
)
def test_the_first_line_says_what_the_runs_can_bear(write, ratio, num_seeds, doubt):
    parameters = sum(p.numel() for p in RUNS[0].model.parameters())
    runs = [
        text_run("gqa", seed, 1.0, tokens=round(ratio * parameters)) for seed in range(num_seeds)
    ]
    first = write(runs)[1].splitlines()[0]
    if doubt is None:
        assert first.startswith(f"{UNTUNED}Beside gqa")
    else:
        # Steps of 512 tokens, at 100 tokens a second.
        time = timedelta(seconds=round(10 * parameters / 100))
        doubt = doubt.format(math.ceil(10 * parameters / 512), time)
        assert first.startswith(f"Too little to choose: {doubt}. {UNTUNED}Beside gqa")


def test_the_first_line_says_that_one_was_trained_on_fewer_tokens(write):
    sizes = {"gqa": 30_000_000, "mqa": 20_000_000}
    runs = [text_run(name, seed, 1.0, tokens=sizes[name]) for name in sizes for seed in range(3)]
    first = write(runs)[1].splitlines()[0]
    doubt = "Too little to choose: 20,000,000 of 30,000,000 tokens. "
    assert first.startswith(f"{doubt}{UNTUNED}Beside gqa")


def test_the_settings_of_a_variant_are_those_that_its_baseline_has_otherwise():
    gqa = text_run("gqa", 0, 1.0)
    assert changes(text_run("gqa", 1, 1.0), gqa) == ""
    assert changes(text_run("mha", 0, 1.0, "model.hidden=100"), gqa) == "hidden=100, kv_heads=4"
    # Each kind of layers beside the only kind that the baseline has.
    window_nope = changes(text_run("window_nope", 0, 1.0), gqa)
    assert window_nope.startswith("kinds.local.window=128, kinds.full.rope_base=None, _target_=")


@pytest.mark.parametrize("count", [3, 30])
def test_the_rows_of_a_plot_have_their_names_beside_them(count):
    draw = np.random.default_rng(0)
    rows = [ForestRow(f"v{n}", draw.normal(size=5).tolist(), (-1.0, 1.0)) for n in range(count)]
    figure = draw_forest(rows, "loss", {"equal": 0.0, "margin": 0.01})
    figure.draw_without_rendering()
    labels = figure.axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == [row.label for row in rows]
    boxes = [label.get_window_extent() for label in labels]
    # From top to bottom, without overlap, inside the picture.
    for above, below in pairwise(boxes):
        assert above.y0 >= below.y1
    assert min(box.x0 for box in boxes) >= 0 and boxes[-1].y0 >= 0
