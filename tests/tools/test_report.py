"""The report is correct in every measure, and its claims match the data."""

import html
import math
import re
from dataclasses import replace
from datetime import timedelta
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.tools.pages import recall_run, searched, table, text_run
from tools.compare import report
from tools.compare.comparison import sort_runs
from tools.compare.plots import ForestRow, draw_forest
from tools.compare.runs import Run, changes

SEEDS = (0, 1, 2)
# Recall accuracy of each seed.
ACCURACY = {"gqa": (1.0, 0.97, 0.2), "mqa": (0.95, 0.92, 0.91), "retention": (0.2, 0.17, 0.19)}
FLOOR = 0.1875  # guessing among 4 or 8 distinct values: the mean of 1/4 and 1/8


LOSSES = {"gqa": 1.0, "mqa": 0.98, "retention": 1.2}
RUNS = [
    *(text_run(name, seed, LOSSES[name] + 0.001 * seed**2) for name in LOSSES for seed in SEEDS),
    *(recall_run(name, seed, ACCURACY[name][seed]) for name in ACCURACY for seed in SEEDS),
]


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """A function that writes a report on runs, and returns report.html and the summary."""
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
    # Tasks have no parts table.
    rows, costs, parts, settings, recall = (table(whole[0], number) for number in range(5))
    # The best variant comes first.
    for each in (rows, costs, parts, settings, recall):
        assert list(each) == ["mqa", "gqa", "retention"]
    assert rows["gqa"]["verdict"] == "baseline"
    assert rows["mqa"]["loss, bits per byte"] == "0.9817"
    difference = rows["retention"]["difference from gqa"]
    # In Dunnett's table, the critical value for two variants and 6 degrees of freedom is 2.86.
    half = 2.86 * np.std([0, 0.001, 0.004], ddof=1) * (2 / 3) ** 0.5
    ends = [float(end) for end in re.findall(r"[+-][\d.]+", difference)]
    assert ends == pytest.approx([0.2, 0.2 - half, 0.2 + half], abs=1.1e-4)
    assert rows["retention"]["verdict"] == "worse"
    # Keys and values of 2 bytes, 2 heads of 16 features, 2 layers and 64 tokens.
    assert rows["gqa"]["cache, kB"] == "16.4"
    assert parts["mqa"]["4 x the context, nats more"] == "n/a"
    assert parts["gqa"]["4 x the context, nats more"] == "0.5100"
    assert parts["mqa"]["verdict on repeated tokens, nats"] == "better"
    assert costs["gqa"]["training, tokens/s"] == "101"
    assert costs["gqa"]["decoding, ms/token"] == "1.25"
    assert settings["gqa"]["differs from gqa in"] == "baseline"
    assert "kv_heads=1" in settings["mqa"]["differs from gqa in"]


def test_the_number_of_seeds_that_solve_a_task_is_reported(whole):
    page, summary = whole
    rows = table(page, 4)
    assert [row["seeds that solve it"] for row in rows.values()] == ["3 of 3", "2 of 3", "0 of 3"]
    # gqa-0 solves the task at its first evaluation, but gqa-1 does not.
    assert rows["mqa"]["million tokens until then"] == "0.00"
    assert rows["retention"]["million tokens until then"] == "never"
    assert rows["retention"]["accuracy, %"] == "17.0 to 20.0"
    assert f"The floor of {FLOOR:.3f} is" in page
    assert "Seeds that solve recall: mqa 3 of 3 (50 % of the cache), gqa 2 of 3, " in summary
    assert "retention 0 of 3 (no better than guessing)." in summary


def test_each_size_has_a_separate_baseline(write):
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
        rows = table(page, 1 + 4 * number)  # after the table of the sizes
        assert list(rows) == [f"gqa-dim-{dim}", f"mqa-dim-{dim}"]
        assert rows[f"gqa-dim-{dim}"]["verdict"] == "baseline"
        cell = rows[f"mqa-dim-{dim}"][f"difference from gqa-dim-{dim}"]
        assert cell.startswith("+0.1000 [+0.0")
        assert f"gqa-dim-{dim} has the lowest loss so far, which may be chance." in summary


def test_the_report_shows_the_results_of_the_search(write):
    inf = float("inf")
    runs = [run for run in RUNS if run.task == "text"]
    found = {
        "gqa": {1.0: 1.0, 0.5: 1.1, 2.0: 1.1, 0.25: 1.4, 4.0: 1.4},
        "mqa": {1.0: 1.05, 0.5: 1.2, 2.0: 1.0, 0.25: 1.6, 4.0: 1.05},
        "retention": {1.0: 1.2, 0.5: 1.3, 2.0: 1.1, 0.25: 1.4, 4.0: 1.05, 8.0: 1.02, 16.0: inf},
    }
    edge = {"retention": {1.0: 1.2, 0.5: 1.1}}
    page, _ = write(runs + [run for name, each in found.items() for run in searched(name, each)])
    rows = table(page, 3)
    assert [row["best factor"] for row in rows.values()][:2] == ["1", "2"]
    assert rows["gqa"]["off by two, nats"] == "+0.3000"
    assert [row["diverged"] for row in rows.values()] == ["0", "0", "1"]
    assert rows["mqa"]["nats at factor 1"] == "3.1500"
    assert rows["retention"]["factors tried"] == "0.25, 0.5, 1, 2, 4, 8, 16"
    assert table(page, 0)["mqa"]["verdict"] == "better"
    # There is no verdict if the best rate is at the edge of the range.
    page, summary = write(runs + [r for name, each in edge.items() for r in searched(name, each)])
    assert table(page, 0)["retention"]["verdict"] == "best rate at the edge"
    assert "rate may lie outside the range tried: retention." in summary
    # A search is shown even before there are runs to judge.
    page, summary = write(searched("gqa", found["gqa"]))
    assert table(page, 0)["gqa"]["best factor"] == "1"
    assert summary.startswith("No answer yet: no run of gqa, the baseline, has finished.")


def test_diverged_seeds_are_reported(write):
    runs = [run for run in RUNS if not (run.settings["name"] == "mqa" and run.seed == 0)]
    for run in RUNS:
        if run not in runs:
            runs.append(replace(run, lines=[]))
    page, summary = write(runs)
    assert table(page, 0)["mqa"]["verdict"] == "seeds diverged"
    assert table(page, 2)["mqa"]["verdict on repeated tokens, nats"] == "seeds diverged"
    assert "training diverged with some seeds: mqa (1 seed)." in summary
    assert table(page, 4)["mqa"]["seeds that solve it"] == "2 of 3" and "mqa 2 of 3" in summary


def test_a_baseline_without_a_finished_run_is_not_replaced(write):
    runs = [replace(run, baseline="mha") for run in RUNS]
    page, summary = write(runs)
    assert summary.startswith("No answer yet: no run of mha, the baseline, has finished.")
    assert "verdict" not in page
    # The order of the runs does not change the baseline.
    runs = [replace(run, baseline="mqa") for run in RUNS if run.task == "text"]
    assert table(write(runs)[0], 0)["mqa"]["verdict"] == "baseline"


def test_missing_runs_and_measures_are_reported(write):
    old = [text_run("gqa", 0, 1.0), text_run("gqa", 1, 1.1)]
    del old[0].lines[-1]["slices"]
    page = write(old, failed="exit 4: training diverged")[0]
    assert table(page, 2)["gqa"]["new tokens, nats"] == "n/a"
    assert "failed is not in the report: exit 4: training diverged" in page


def test_the_page_is_self_contained_and_supports_color_schemes(whole):
    page, _ = whole
    assert "http" not in re.sub(r'xmlns(:\w+)?="\S+"', "", page)
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    assert not re.findall(r"import|fetch|eval|Request|src", script)
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert page.count("<svg") == 2 and "#000000" not in page and "currentColor" in page
    ids = re.findall(r'clipPath id="(.*?)"', page)
    assert len(set(ids)) == len(ids) > 0
    # All tags except these are closed, in order.
    ElementTree.fromstring(re.sub("<!doctype html>|<meta .*?>|&nbsp;", "", page))
    # The most important parts come first.
    parts = ["<h1>", "Only a hint: mqa&#x27;s loss is lower", "<svg", "<table", "<details"]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    # These parts are collapsed.
    folded = page[page.index("<details") :]
    assert "would have been detected (80 % power)." in folded
    assert "python -m tools.compare --margin 0.02\n\nmodel._target_=" in folded
    assert "Trained at commit abc123." in folded


UNTUNED = "learning rates tuned for each variant (--tune)"
ENOUGH = "steps={} max_minutes=null, about {} per run at this speed"


def tuned(runs: list[Run]) -> list[Run]:
    """Add a learning rate search for each variant, with the best rate inside its range."""
    firsts = {}
    for run in runs:
        firsts.setdefault(run.settings["name"], run)
    searches = []
    for run in firsts.values():
        for factor, loss in {0.5: 1.1, 1.0: 1.0, 2.0: 1.1}.items():
            searches.append(replace(run, factor=factor, lines=[{"val_loss": loss}]))
    return runs + searches


def trained_enough(losses: dict[str, float], num_seeds: int = 3) -> list[Run]:
    """Runs with these losses and over ten tokens per parameter; losses of seeds differ by 0.001."""
    runs = []
    for name, loss in losses.items():
        for seed in range(num_seeds):
            runs.append(text_run(name, seed, loss + 0.001 * seed, tokens=30_000_000))
    return runs


def answer_of(write, runs: list[Run]) -> str:
    """The summary's text above its table; the page starts with the same line."""
    page, summary = write(runs)
    lines = summary.splitlines()
    assert html.unescape(re.search('<p class="answer">(.*?)</p>', page)[1]) == lines[0]
    assert page.index("<p") == page.index('<p class="answer">')
    (header,) = [number for number, line in enumerate(lines) if line.split()[0] == "variant"]
    return " ".join(lines[:header])


def test_the_answer_names_the_best_variant_and_its_uncertainty(write):
    losses = {"gqa": 1.0, "mqa": 0.98, "mha": 0.99, "retention": 1.2}
    answer = answer_of(write, tuned(trained_enough(losses)))
    # In Dunnett's table, the critical value for three variants and 8 degrees of freedom is 2.88.
    half = 2.88 * 0.001 * (2 / 3) ** 0.5
    interval = f"{0.02 - half:.3f} to {0.02 + half:.3f}"
    assert answer.startswith(
        "Take mqa: its loss is lower than gqa's by 0.020 bits per byte "
        f"(95 % interval {interval}; 3 seeds). mqa needs 50 % of gqa's cache and 9"
    )
    assert "Also better than gqa: mha; which of them is best was not tested." in answer
    assert "Worse: retention." in answer and "A reliable answer" not in answer


def test_the_answer_is_only_a_hint_without_tuned_rates(write):
    answer = answer_of(write, trained_enough({"gqa": 1.0, "mqa": 0.98}))
    assert answer.startswith("Only a hint: mqa's loss is lower than gqa's by 0.020 bits per byte")
    assert f"A reliable answer needs {UNTUNED}. mqa needs" in answer
    some = trained_enough({"gqa": 1.0, "mqa": 0.98})
    some += searched("gqa", {0.5: 1.1, 1.0: 1.0, 2.0: 1.1})
    assert "answer needs learning rates tuned for mqa (--tune)." in answer_of(write, some)


def test_the_answer_reports_that_no_variant_is_better_for_certain(write):
    losses = {"gqa": 1.0, "mqa": 1.002, "mha": 1.0001, "retention": 1.2}
    answer = answer_of(write, tuned(trained_enough(losses)))
    assert answer == (
        "No variant is better than gqa for certain. "
        "As good (at most 0.01 bits per byte worse): mha, mqa (50 % of the cache). "
        "Worse: retention."
    )
    # With untuned rates, the answer adds that it is not reliable.
    answer = answer_of(write, trained_enough(losses))
    assert answer.startswith(
        "No variant is better than gqa for certain, at learning rates that were not tuned. "
        f"A reliable answer needs {UNTUNED}. As good"
    )


def test_a_small_gain_is_not_rounded_to_zero(write):
    runs = tuned(trained_enough({"gqa": 1.0, "mqa": 1.0 - 0.0024}))
    # 2.776 is the 97.5 % point of Student's t with 4 degrees of freedom.
    half = 2.776 * 0.001 * (2 / 3) ** 0.5
    answer = answer_of(write, runs)
    assert f"by 0.0024 bits per byte (95 % interval {0.0024 - half:.4f} to" in answer


def test_variants_with_a_best_rate_at_the_edge_or_diverged_runs_are_not_judged(write):
    runs = trained_enough({"gqa": 1.0, "mqa": 0.98})
    edge = {1.0: 1.0, 2.0: 0.9}
    inside = {0.5: 1.1, 1.0: 1.0, 2.0: 1.1}
    answer = answer_of(write, runs + searched("gqa", edge) + searched("mqa", inside))
    assert answer.startswith("No verdict: the best learning rate of gqa, the baseline, may lie")
    answer = answer_of(write, runs + searched("gqa", inside) + searched("mqa", edge))
    assert answer.startswith("No verdict on any variant compared with gqa. No verdict, because")
    lost = replace(runs[0], lines=[], folder=Path("gqa-7"))
    answer = answer_of(write, tuned([*runs, lost]))
    assert answer.startswith("No verdict: training of gqa, the baseline, diverged with 1 seed.")
    # A variant without remaining runs is still mentioned.
    lost = replace(text_run("mha", 0, 1.0), lines=[])
    assert "diverged with every seed: mha." in answer_of(write, [*runs, lost])


def recalled(solved: dict[str, int], num_seeds: int) -> list[Run]:
    """Runs on recall, which the first `solved` seeds of each variant solve."""
    runs = []
    for name, count in solved.items():
        runs += [recall_run(name, n, 0.95 if n < count else 0.3) for n in range(num_seeds)]
    return runs


def test_the_answer_for_a_task_counts_seeds_and_reports_whether_they_suffice(write):
    # Fisher's exact test of 4 of 4 against 0 of 4 gives p = 2 / 70, below 5 %.
    answer = answer_of(write, tuned(recalled({"gqa": 0, "mqa": 4}, 4)))
    assert answer.startswith(
        "Take mqa: 4 of 4 seeds solve recall (at least 90 % accuracy), compared with 0 of 4 seeds "
        "of gqa;"
    )
    # 3 of 3 against 0 of 3 gives p = 2 / 20.
    answer = answer_of(write, tuned(recalled({"gqa": 0, "mqa": 3}, 3)))
    assert answer.startswith(
        "Too little data to choose: 3 of 4 seeds. A reliable answer needs 4 seeds per variant "
        "(seed=0,1,2,3). Seeds that solve recall: mqa 3 of 3 (50 % of the "
        "cache), gqa 0 of 3."
    )
    # With two variants, the significance level is halved, and 4 seeds are not enough.
    answer = answer_of(write, tuned(recalled({"gqa": 0, "mqa": 4, "mha": 1}, 4)))
    assert answer.startswith("Too little data to choose: 4 of 5 seeds.")
    answer = answer_of(write, recalled({"gqa": 0, "mqa": 5, "mha": 5}, 5))
    assert answer.startswith("Only a hint, for mqa: 5 of 5 seeds") and UNTUNED in answer
    assert "Also better than gqa: mha; which of them is best was not tested." in answer
    # A better rate may be outside the range.
    runs = recalled({"gqa": 0, "mqa": 4}, 4)
    edge = [replace(runs[0], factor=factor, lines=[{"val_loss": factor}]) for factor in (1.0, 0.5)]
    inside = [run for run in tuned(runs) if run.factor and run.settings["name"] == "mqa"]
    answer = answer_of(write, runs + edge + inside)
    assert answer.startswith("Only a hint, for mqa: 4 of 4") and "learning rates for gqa" in answer
    # If no variant can be better, no seeds are missing.
    answer = answer_of(write, recalled({"gqa": 3, "mha": 3}, 3))
    assert (
        answer.startswith("Keep gqa: 3 of 3 seeds solve recall")
        and "A reliable answer" not in answer
    )
    answer = answer_of(write, tuned(recalled({"gqa": 3, "mqa": 4}, 5)))
    assert answer.startswith("No variant solves recall more often than gqa for certain.")
    answer = answer_of(write, recalled({"gqa": 0, "mqa": 0}, 3))
    assert answer.startswith("No variant solves recall: no seed reaches 90 % accuracy.")


def test_the_answer_names_a_smaller_cache_that_solves_a_task_equally_well(write):
    runs = tuned(recalled({"gqa": 3, "mqa": 3, "retention": 0}, 3))
    answer = answer_of(write, runs)
    assert answer.startswith(
        "gqa solves recall with all seeds (3 of 3, at least 90 % accuracy), and so does mqa "
        "(3 of 3), with 50 % of the cache size."
    )


def test_a_text_that_is_too_short_is_reported(write):
    """Here, gqa has 598,400 parameters, and runs train on 1,000 tokens."""
    runs = [text_run(name, seed, 1.0) for name in ("gqa", "mqa") for seed in range(3)]
    parameters = max(run.model.num_parameters() for run in runs)
    for epoch, is_told in ((0.0005, False), (0.02, True)):
        for run in runs:
            run.lines[-1]["epoch"] = epoch
        answer = answer_of(write, runs)
        passes = 10 * parameters / 1000 * epoch
        told = f"but {passes:.0f} passes over this text: use a longer text or a smaller model"
        assert (passes > 4) == is_told == (told in answer), answer


@pytest.mark.parametrize("device", ["cpu x86_64", "cuda x86_64 NVIDIA H200"])
def test_speeds_are_not_compared_if_seeds_of_the_same_variant_differ(write, device):
    runs = [text_run(name, seed, 1.0) for name in ("gqa", "mqa") for seed in range(2)]
    for run in runs:
        run.settings["machine"] |= {"device": device}
    assert "Training speeds are comparable" in write(runs)[1]
    runs[-1].tokens_per_second *= 1.5
    assert (
        "Training speeds are not comparable: the seeds of one variant differ by a factor of 1.5."
        in write(runs)[1]
    )


@pytest.mark.parametrize(
    "machine, said",
    [
        ({}, "are comparable: the machines are of the same kind"),
        ({"threads": 2}, "are not comparable: threads is 2 or None."),
    ],
)
def test_speeds_of_different_machines_are_not_compared(write, machine, said):
    runs = [text_run(name, seed, 1.0) for name in ("gqa", "mqa") for seed in range(2)]
    for run in runs:
        if run.settings["name"] == "gqa":
            run.settings["machine"] |= machine
    page, summary = write(runs)
    assert f"Training speeds {said}" in summary and f"Training speeds {said}" in page


@pytest.mark.parametrize(
    "ratio, num_seeds, doubt",
    [
        (10.1, 3, None),
        (9.9, 3, ("9.9 of 10 tokens per parameter", f"10 tokens per parameter ({ENOUGH})")),
        (10.1, 2, ("2 of 3 seeds", "3 seeds per variant (seed=0,1,2)")),
    ],
)
def test_the_first_line_reports_too_few_seeds_or_tokens(write, ratio, num_seeds, doubt):
    parameters = sum(p.numel() for p in RUNS[0].model.parameters())
    runs = [
        text_run("gqa", seed, 1.0 + 0.01 * seed, name, tokens=round(ratio * parameters))
        for name in ("name=gqa", "name=same")
        for seed in range(num_seeds)
    ]
    first = answer_of(write, tuned(runs))
    if doubt is None:
        assert first.startswith("No variant is better than gqa for certain. Undecided")
    else:
        # Steps of 512 tokens at 100 tokens per second.
        time = timedelta(seconds=round(10 * parameters / 100))
        short, remedy = doubt
        remedy = remedy.format(math.ceil(10 * parameters / 512), time)
        assert first.startswith(f"Too little data to choose: {short}; gqa has the lowest loss")
        assert f"A reliable answer needs {remedy}. Undecided" in first


def test_the_first_line_reports_a_variant_with_fewer_tokens(write):
    sizes = {"gqa": 30_000_000, "mqa": 20_000_000}
    runs = [text_run(name, seed, 1.0, tokens=sizes[name]) for name in sizes for seed in range(3)]
    first = answer_of(write, runs)
    doubt = "Too little data to choose: some runs saw 20,000,000 tokens and others 30,000,000; "
    assert first.startswith(doubt)
    assert f"answer needs the same number of tokens for all runs; {UNTUNED}." in first


def test_settings_are_listed_as_differences_from_the_baseline():
    gqa = text_run("gqa", 0, 1.0)
    assert changes(text_run("gqa", 1, 1.0), gqa) == ""
    assert changes(text_run("mha", 0, 1.0, "model.hidden=100"), gqa) == "hidden=100, kv_heads=4"
    # Each kind of layer is compared with the baseline's only kind.
    window_nope = changes(text_run("window_nope", 0, 1.0), gqa)
    assert window_nope.startswith("kinds.local.window=128, kinds.full.rope_base=None, _target_=")


@pytest.mark.parametrize("count", [2, 5, 30])
def test_plot_rows_are_labeled_without_overlap(count):
    draw = np.random.default_rng(0)
    rows = [ForestRow(f"v{n}", draw.normal(size=5).tolist(), (-1.0, 1.0)) for n in range(count)]
    figure = draw_forest(rows, "loss", {"equal": 0.0, "margin": 0.01})
    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = axes.get_yticklabels()
    assert [label.get_text() for label in labels] == [row.label for row in rows]
    boxes = [label.get_window_extent() for label in labels]
    # Labels are in order, do not overlap, and are inside the figure and away from the plot's edges.
    for above, below in pairwise(boxes):
        assert above.y0 >= below.y1
    assert min(box.x0 for box in boxes) >= 0 and boxes[-1].y0 >= 0
    bottom, top = axes.get_ylim()
    assert bottom - (count - 1) >= 0.4 and 0 - top >= 0.4


def test_outliers_do_not_stretch_the_plot_axis():
    near = [ForestRow(f"v{n}", [0.01 * n, 0.01 * n + 0.01], None) for n in range(5)]
    far = ForestRow("far", [5.0, 5.25, 0.02], (4.0, 6.0))
    figure = draw_forest([*near, far], "loss", {"equal": 0.0})
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    assert -0.1 < low < 0 and 0.05 < high < 0.1
    # Points outside the axis are shown as an arrow at its end, with their values in the row.
    assert [text.get_text() for text in axes.texts[2:]] == ["2 seeds: +5 to +5.25"]
    arrows = [line for line in axes.lines if line.get_marker() == ">"]
    assert [line.get_xydata().tolist() for line in arrows] == [[[high, 5]]]
    # Each seed inside the axis is a dot.
    dots = [line.get_xdata() for line in axes.lines if line.get_marker() == "."]
    assert [len(row) for row in dots] == [2, 2, 2, 2, 2, 3]
    figure.draw_without_rendering()
    assert axes.texts[-1].get_window_extent().x1 <= figure.bbox.x1


def test_long_names_fit_into_a_plot():
    long = "gqa hidden=100 rope_fraction=0.5 gated=True and 2 more"
    runs = [replace(run, settings=run.settings | {"name": long}) for run in RUNS[:3]]
    # With and without a clipped row.
    for others in (RUNS[3:6], RUNS[3:9]):
        figure = report.compare_losses(sort_runs([*runs, *others]), 0.01).figure
        figure.draw_without_rendering()
        (axes,) = figure.axes
        (legend,) = figure.legends
        texts = [axes.xaxis.label, *figure.texts, *axes.get_yticklabels(), *axes.texts]
        texts += legend.get_texts()
        # Only the two direction labels may touch, at the baseline.
        boxes = [text.get_window_extent() for text in texts if text not in axes.texts[:1]]
        assert not any(box.overlaps(other) for box, other in combinations(boxes, 2))
        for text in texts:
            box = text.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, text.get_text()
        assert axes.bbox.width > figure.bbox.width / 3


def test_the_plot_axis_shows_which_direction_is_better():
    losses = report.compare_losses(sort_runs(RUNS[:9]), 0.01).figure
    accuracies = report.compare_accuracies(sort_runs(RUNS[9:])).figure
    # The directions are also labeled above the baseline.
    above = [text.get_text().strip() for text in losses.axes[0].texts[:2]]
    assert above == ["\N{LEFTWARDS ARROW} better", "worse \N{RIGHTWARDS ARROW}"]
    assert losses.get_supxlabel().startswith("\N{LEFTWARDS ARROW} better")
    assert losses.get_supxlabel().endswith("worse \N{RIGHTWARDS ARROW}")
    assert accuracies.get_supxlabel().endswith("better \N{RIGHTWARDS ARROW}")
