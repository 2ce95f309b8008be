"""The report says what the runs show, in every measure, and no more."""

import re
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from tests.conftest import TINY, settings_of
from tests.tools.pages import table
from tools.compare import measures, report
from tools.compare.plots import draw_points, mean_curve
from tools.compare.runs import Run, differences
from tools.compare.statistics import Estimate

SEEDS = (0, 1, 2)
RECALL = "recall accuracy (chance 0.125)"
ACCURACY = {"gqa": 0.9, "mqa": 0.95, "retention": 0.3}  # of recall


def text_run(variant: str, seed: int, loss: float, *overrides: str, tokens: int = 1000) -> Run:
    """A run on text that ended at this loss in bits per byte."""
    words = (f"attention={variant}", f"seed={seed}", f"name={variant}", *overrides)
    settings = settings_of(*TINY, *words).model_dump() | {"machine": {"device": "cpu"}}
    slices = {"repeated": 2 * loss, "new": 4 * loss}
    first = {"step": 1, "tokens": tokens // 2, "seconds": 1.0, "train_loss": 6.0}
    first["tokens_per_second"] = 100.0 + seed
    last = first | {"step": 2, "tokens": tokens, "val_loss": 3 * loss, "val_bpb": loss}
    last["slices"] = {name: {"loss": value, "tokens": 7} for name, value in slices.items()}
    return Run(Path(f"{variant}-{seed}"), settings, [first, last], True)


def recall_run(variant: str, seed: int) -> Run:
    run = text_run(variant, seed, 1.0)
    run.folder = Path(f"recall-{variant}-{seed}")
    run.settings["data"] = {"_target_": "data.tasks.Recall", "pairs": [4, 8], "vocab_size": 16}
    accuracy = ACCURACY[variant] + 0.01 * seed**2
    run.lines[-1] |= {"val_bpb": None, "slices": {}, "recall_accuracy": accuracy}
    return run


LOSSES = {"gqa": 1.0, "mqa": 0.98, "retention": 1.2}
RUNS = [
    *(text_run(name, seed, LOSSES[name] + 0.001 * seed**2) for name in LOSSES for seed in SEEDS),
    *(recall_run(name, seed) for name in ACCURACY for seed in SEEDS),
]


def lengths(folder: Path) -> dict:
    """Each seed loses 0.5 nats at 4 times the context; mqa cannot have the positions."""
    seed = int(folder.name[-1])
    if "mqa" in folder.name:
        raise ValueError("no positions. fix: another attention")
    return {"1": 3.0, "2": 3.2, "4": 3.5 + 0.01 * seed}


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Writes the report of runs -> report.html and the summary."""
    folder = tmp_path_factory.mktemp("report")

    def written(runs: list[Run], **problems: str) -> tuple[str, str]:
        summary = report.write_report(folder, runs, problems, "the command", is_quick=False)
        return (folder / "report.html").read_text(), summary

    with pytest.MonkeyPatch.context() as patch:
        decoding = {"decoding, ms/token": 1.25}
        patch.setattr(report, "latencies", lambda runs, *_: dict.fromkeys(runs, decoding))
        patch.setattr(measures, "measure_lengths", lengths)
        yield written


@pytest.fixture(scope="module")
def whole(write) -> tuple[str, str]:
    """The report of RUNS: report.html and the summary."""
    return write(RUNS)


def test_each_variant_has_a_row_with_every_measure(whole):
    rows = table(whole[0], 0)
    assert list(rows) == ["gqa", "mqa", "retention"]
    accuracies = [0.9 + 0.01 * seed**2 for seed in SEEDS]
    ci95 = stats.t.ppf(0.975, 2) * stats.sem(accuracies)
    assert rows["gqa"][RECALL] == f"{fmean(accuracies):.4f} ± {ci95:.4f}, baseline"
    # The differences of all pairs are equal: certain in a loss, and half a point wide in a count.
    cell = rows["retention"]["bits per byte"]
    assert cell.endswith("+0.2000 ± 0.0000 worse (p 0.000, n 3)")
    ci95 = stats.t.ppf(0.975, 2) * 0.005 / 3**0.5
    assert f"-0.6000 ± {ci95:.4f} worse" in rows["retention"][RECALL]
    cell = rows["mqa"]["bits per byte"]
    assert re.match(r"\*0.9817 ± .*\*, -0.0200 ± 0.0000 better", cell)
    assert rows["mqa"]["repeated tokens, nats"].startswith("*1.9633 ±")
    assert rows["mqa"]["4 x the context, nats more"] == "n/a, no positions"
    assert rows["gqa"]["4 x the context, nats more"].startswith("*0.5100 ±")
    assert rows["gqa"]["training, tokens/s"] == "101"
    assert rows["gqa"]["decoding, ms/token"] == "1.25"


def test_each_size_has_a_baseline_of_its_own(write):
    runs = [
        text_run(
            variant,
            seed,
            loss + dim * (1 + 0.1 * seed),
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
        assert rows[f"gqa-dim-{dim}"]["bits per byte"].endswith(", baseline")
        cell = rows[f"mqa-dim-{dim}"]["bits per byte"]
        assert cell.endswith("+0.1000 ± 0.0000 worse (p 0.000, n 2)")
        assert f"Beside gqa-dim-{dim} (seeds: 2); bits per byte: mqa-dim-{dim} worse" in summary


def test_what_was_not_trained_or_logged_has_no_column(write):
    old = [text_run("gqa", 0, 1.0), text_run("gqa", 1, 1.1)]
    del old[0].lines[-1]["slices"]
    row = table(write(old)[0], 0)["gqa"]
    assert not any("ecall" in key for key in row)
    assert row["new tokens, nats"] == "n/a, not logged"
    # A variant without runs of a task has n/a there, and one that failed is named.
    runs = [run for run in RUNS if not (run.task == "recall" and "mqa" in run.folder.name)]
    page = write(runs, failed="exit 4: training diverged")[0]
    assert table(page, 0)["mqa"][RECALL] == "n/a, not trained"
    assert table(page, -1)["failed"]["why"] == "exit 4: training diverged"


def test_the_page_stands_alone_in_any_color_scheme(whole):
    page, summary = whole
    assert "<script" not in page and "http" not in re.sub(r'xmlns(:\w+)?="\S+"', "", page)
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert page.count("<svg") == 6 and "#000000" not in page and "currentColor" in page
    ids = re.findall(r'clipPath id="(.*?)"', page)
    assert len(set(ids)) == len(ids) > 0
    # Every tag but these is closed, in order.
    ElementTree.fromstring(re.sub("<!doctype html>|<meta .*?>|&nbsp;", "", page))
    # What a reader looks for comes first.
    parts = ["<h2>", "<table>", "accuracy (chance 0.125) against cache", "train_loss"]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    assert "\nBeside gqa (seeds: 3); bits per byte: mqa better, retention worse; " in summary
    assert re.search(r"125\): mqa .*, retention worse\.", summary)


@pytest.mark.parametrize(
    "ratio, num_seeds, accuracy, doubt",
    [
        (10.1, 3, 0.5, None),
        (9.9, 3, 0.5, "9.9 of 10 tokens a parameter"),
        (10.1, 2, 0.5, "2 of 3 seeds"),
        (10.1, 3, 0.19, "recall at chance"),
    ],
)
def test_the_first_line_says_what_the_runs_can_bear(
    write, monkeypatch, ratio, num_seeds, accuracy, doubt
):
    parameters = sum(p.numel() for p in RUNS[0].model.parameters())
    monkeypatch.setitem(ACCURACY, "gqa", accuracy - 0.04)
    runs = [
        text_run("gqa", seed, 1.0, tokens=round(ratio * parameters)) for seed in range(num_seeds)
    ]
    page, summary = write([*runs, *(recall_run("gqa", seed) for seed in SEEDS)])
    first = summary.splitlines()[0]
    if doubt is None:
        assert first.startswith("Beside gqa")
    else:
        assert first == f"Too little to choose: {doubt}."
    # Nothing is the best where all guess.
    assert table(page, 0)["gqa"][RECALL].startswith("*") == (accuracy > 0.2)


def test_settings_that_differ_are_listed_with_who_has_them():
    names = ("gqa", "mha", "llama", "nope", "gdn", "retention")
    groups = {name: [text_run(name, seed, 1.0) for seed in (0, 1)] for name in names}
    found = differences(groups)
    prefix = "model.attention."
    assert found[f"{prefix}kv_heads"] == (
        "2 (gqa, llama, nope, gdn); 4 (mha); not an option (retention)"
    )
    assert found[f"{prefix}rope_base"].endswith("; 10000.0, None (nope)")
    assert "False (gqa, mha, llama, nope); True (gdn)" in found[f"{prefix}gated"]
    assert "seed" not in found and "model.dim" not in found


@pytest.mark.parametrize("count", [3, 19])
def test_names_stand_beside_a_plot_in_the_order_of_their_points(count):
    """Most variants have almost the same value, and all but two the same cache."""
    draw = np.random.default_rng(0)
    values = {f"v{number}": Estimate(draw.normal(1, 0.01), 0.004, 0.5) for number in range(count)}
    sizes = dict.fromkeys(values, 33_000) | {"v0": 8_000, "v2": 66_000}
    figure = draw_points(sizes, values, "loss")
    figure.draw_without_rendering()
    texts = figure.legends[0].get_texts()
    assert [text.get_text() for text in texts] == sorted(values, key=values.get, reverse=True)
    boxes = [text.get_window_extent() for text in texts]
    assert min(box.x0 for box in boxes) > figure.axes[0].get_window_extent().x1
    assert min(box.y0 for box in boxes) >= 0 and max(box.y1 for box in boxes) <= figure.bbox.y1
    # No two points are at one place.
    points = {tuple(container[0].get_xydata()[0]) for container in figure.axes[0].containers}
    assert len({x for x, _ in points}) == count


def test_curves_average_what_all_seeds_have():
    assert mean_curve([{1: 2.0, 4: 3.0, 2: 3.0}, {2: 5.0, 3: 1.0, 4: 1.0}]) == {2: 4.0, 4: 2.0}
