"""The report is correct in every measure, and its claims match the data."""

import math
import re
from copy import deepcopy
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from tests.tools.pages import recall_run, searched, table, text_run
from tools.compare import report
from tools.compare.runs import Run

SEEDS = (0, 1, 2)
LOSSES = {"gqa": 1.0, "mqa": 0.98, "retention": 1.2}
# Recall accuracy of each seed.
ACCURACY = {"gqa": (1.0, 0.97, 0.2), "mqa": (0.95, 0.92, 0.91), "retention": (0.2, 0.17, 0.19)}
RUNS = [
    *(text_run(name, seed, LOSSES[name] + 0.001 * seed**2) for name in LOSSES for seed in SEEDS),
    *(recall_run(name, seed, ACCURACY[name][seed]) for name in ACCURACY for seed in SEEDS),
]
INSIDE = {0.5: 1.1, 1.0: 1.0, 2.0: 1.1}  # a search whose best rate is inside the tried range
EDGE = {1.0: 1.0, 2.0: 0.9}


@pytest.fixture
def write(tmp_path):
    """A function that writes a report on runs, and returns report.html and the summary."""

    def written(runs: list[Run], **problems: str) -> tuple[str, str]:
        summary = report.write_report(tmp_path, runs, problems, margin=0.01)
        return (tmp_path / "report.html").read_text(encoding="utf-8"), summary

    return written


def test_each_variant_has_a_row_with_every_measure(write):
    page, _ = write(RUNS)
    rows, recall = table(page, 0), table(page, 1)
    # The best variant comes first.
    assert list(rows) == list(recall) == ["mqa", "gqa", "retention"]
    assert rows["gqa"]["verdict"] == "baseline" and rows["retention"]["verdict"] == "worse"
    assert rows["mqa"]["bits per byte"] == "0.9817"
    # In Dunnett's table, the critical value for two variants and 6 degrees of freedom is 2.86.
    half = 2.86 * np.std([0, 0.001, 0.004], ddof=1) * (2 / 3) ** 0.5
    ends = [float(end) for end in re.findall(r"[+-][\d.]+", rows["retention"]["difference"])]
    assert ends == pytest.approx([0.2, 0.2 - half, 0.2 + half], abs=1.1e-4)
    # Keys and values of 2 bytes, 2 heads of 16 features, 2 layers and 64 tokens.
    assert rows["gqa"]["cache, kB"] == "16.4" and rows["mqa"]["cache, kB"] == "8.2"
    assert rows["gqa"]["rise at 4 x context"] == "+0.5100"
    assert rows["mqa"]["rise at 4 x context"] == ""  # not measured
    assert rows["gqa"]["tokens/s"] == "101"
    assert rows["gqa"]["decoding, ms/token"] == "1.25"
    assert float(rows["mqa"]["repeated"]) == pytest.approx(2 * 0.9817, abs=1e-3)

    # A task is judged by the number of seeds that solve it.
    assert [row["seeds that solve it"] for row in recall.values()] == ["3 of 3", "2 of 3", "0 of 3"]
    # gqa-0 solves the task at its first evaluation, but gqa-1 does not.
    assert recall["mqa"]["million tokens to solve it (median)"] == "0.00"
    assert recall["retention"]["million tokens to solve it (median)"] == "never"
    assert recall["retention"]["accuracy, %"] == "17.0 to 20.0"
    # Guessing among 4 or 8 distinct values: the mean of 1/4 and 1/8.
    assert "18.8 %" in page or "18.7 %" in page


def test_the_page_and_the_summary_say_the_same(write):
    page, summary = write(RUNS, failed="exit 4: training diverged")
    for answer in re.findall('<p class="answer">(.*?)</p>', page):
        assert unescape(answer) in summary
    for text in ("failed is not in the report: exit 4", "abc123", "compare --margin 0.02"):
        assert text in page
    assert "failed is not in the report" in summary
    # The page needs no other file, and its figures have different ids.
    assert "http" not in re.sub(r'xmlns(:\w+)?="\S+"', "", page) and "<script" not in page
    ids = re.findall(r'clipPath id="(.*?)"', page)
    assert page.count("<svg") == 2 and len(set(ids)) == len(ids) > 0


def test_each_size_has_a_separate_baseline(write):
    runs = []
    for variant, loss in (("gqa", 1.0), ("mqa", 1.1)):
        for dim in (32, 64):
            for seed in (0, 1):
                words = (f"model.dim={dim}", f"name={variant}-dim-{dim}")
                runs.append(text_run(variant, seed, loss + dim * (1 + 0.0001 * seed), *words))
    page, _ = write(runs)
    for number, dim in enumerate((32, 64), 1):  # after the table of the sizes
        rows = table(page, number)
        assert list(rows) == [f"gqa-dim-{dim}", f"mqa-dim-{dim}"]
        assert rows[f"gqa-dim-{dim}"]["verdict"] == "baseline"
        assert rows[f"mqa-dim-{dim}"]["difference"].startswith("+0.1000 [+0.0")


def test_a_variant_that_may_not_be_at_its_best_gets_no_verdict(write):
    texts = RUNS[:9]
    page, _ = write([*texts, *searched("mqa", INSIDE), *searched("retention", EDGE)])
    rows = table(page, 0)
    assert rows["mqa"]["verdict"] == "better" and rows["mqa"]["best rate"] == "x 1.00"
    assert rows["retention"]["verdict"] == "best rate at the edge"
    page, summary = write([*texts, *searched("gqa", EDGE)])
    assert {row["verdict"] for row in table(page, 0).values()} == {
        "baseline",
        "best rate at the edge",
    }
    assert "a wider range of learning rates for gqa" in summary

    # If seeds diverged, the remaining ones are not a fair sample. On a task, they do not solve it.
    lost = [replace(run, lines=[]) if run is texts[3] or run is RUNS[12] else run for run in RUNS]
    page, _ = write(lost)
    assert table(page, 0)["mqa"]["verdict"] == "seeds diverged"
    assert table(page, 1)["mqa"]["seeds that solve it"] == "2 of 3"


def test_a_baseline_without_a_finished_run_is_not_replaced(write):
    _, summary = write([replace(run, baseline="mha") for run in RUNS])
    assert summary.count("no run of mha, the baseline, has finished") == 2
    # The order of the runs does not change the baseline.
    page, _ = write([replace(run, baseline="mqa") for run in RUNS[:9]])
    assert table(page, 0)["mqa"]["verdict"] == "baseline"


@pytest.mark.parametrize(
    "key, value",
    [("text", "def"), ("context", 32), ("eval_tokens", 400), ("metric", 0), ("swept", "context")],
)
def test_runs_that_share_too_little_are_not_compared(write, key, value):
    runs = [text_run(name, seed, 1.0 + seed) for name in ("gqa", "mqa") for seed in range(2)]
    for run in runs:
        if key == "swept":  # a comparison of contexts
            run.swept = [value]
    if key == "metric":  # without a byte count, the loss is in nats per token
        runs[-1].lines[-1]["val_bpb"] = None
    elif key == "eval_tokens":
        runs[-1].lines[-1][key] = value
    else:
        runs[-1].settings |= {"context": 32} if key == "swept" else {key: value}
    if key == "swept":
        write(runs)
    else:
        name = "evaluated tokens" if key == "eval_tokens" else key
        with pytest.raises(ValueError, match=f"differ in {name} .*mqa-1"):
            write(runs)


def test_runs_at_several_sizes_need_the_same_text(write):
    runs = [text_run("gqa", seed, 1.0, f"model.dim={dim}") for dim in (32, 64) for seed in (0, 1)]
    runs[-1].settings["text"] = "def"
    with pytest.raises(ValueError, match="text"):
        write(runs)


def tuned(runs: list[Run]) -> list[Run]:
    """Add a learning rate search for each variant, with the best rate inside its range."""
    firsts = {run.name: run for run in runs}
    searches = []
    for run in firsts.values():
        for factor, loss in INSIDE.items():
            searches.append(replace(run, factor=factor, lines=[run.last | {"val_loss": loss}]))
    return runs + searches


def trained_enough(losses: dict[str, float], num_seeds: int = 3) -> list[Run]:
    """Runs with these losses and over ten tokens per parameter; losses of seeds differ by 0.001."""
    runs = []
    for name, loss in losses.items():
        for seed in range(num_seeds):
            runs.append(text_run(name, seed, loss + 0.001 * seed, tokens=30_000_000))
    return runs


def test_the_answer_names_the_best_variant_and_its_uncertainty(write):
    losses = {"gqa": 1.0, "mqa": 0.98, "mha": 0.99, "retention": 1.2}
    # In Dunnett's table, the critical value for three variants and 8 degrees of freedom is 2.88.
    half = 2.88 * 0.001 * (2 / 3) ** 0.5
    gain = f"0.020 bits per byte lower than gqa's (95 % interval {0.02 - half:.3f} to "
    _, certain = write(tuned(trained_enough(losses)))
    assert (
        certain.startswith("Take mqa (also better: mha).")
        and gain in certain
        and "50% of the cache" in certain
    )
    assert "To be sure" not in certain
    # Without tuning, with fewer seeds, or with few tokens, it is only a hint.
    _, hint = write(trained_enough(losses))
    assert (
        hint.startswith("Only a hint (learning rates): mqa") and gain in hint and "--tune" in hint
    )
    # A small gain is not rounded to zero. 2.776 is the 97.5 % point of Student's t, 4 degrees.
    _, small = write(tuned(trained_enough({"gqa": 1.0, "mqa": 1.0 - 0.0024})))
    half = 2.776 * 0.001 * (2 / 3) ** 0.5
    assert f"0.0024 bits per byte lower than gqa's (95 % interval {0.0024 - half:.4f}" in small
    # If nothing is better, the answer has the difference that would have been found.
    page, none = write(tuned(trained_enough({"gqa": 1.0, "mqa": 1.002})))
    assert none.startswith("No variant is better than gqa for certain.")
    assert "80 % power" in page


@pytest.mark.parametrize(
    "ratio, num_seeds, doubt, remedy",
    [
        (10.1, 3, None, None),
        (9.9, 3, "9.9 of 10 needed tokens per parameter", "steps={}"),
        (10.1, 2, "2 of 3 needed seeds per variant", "seed=0,1,2)"),
    ],
)
def test_the_answer_reports_too_few_seeds_or_tokens(write, ratio, num_seeds, doubt, remedy):
    parameters = RUNS[0].model.num_parameters()
    runs = []
    for name in ("name=gqa", "name=same"):
        for seed in range(num_seeds):
            tokens = round(ratio * parameters)
            runs.append(text_run("gqa", seed, 1.0 + 0.01 * seed, name, tokens=tokens))
    _, summary = write(tuned(runs))
    if doubt is None:
        assert summary.startswith("No variant is better than gqa for certain.")
    else:
        assert summary.startswith(f"Too little data to choose: {doubt}.")
        # A step has 512 tokens.
        assert remedy.format(math.ceil(10 * parameters / 512)) in summary


def test_the_answer_reports_a_variant_with_fewer_tokens(write):
    sizes = {"gqa": 30_000_000, "mqa": 20_000_000}
    runs = [text_run(name, seed, 1.0, tokens=sizes[name]) for name in sizes for seed in range(3)]
    _, summary = write(runs)
    assert "20,000,000 tokens and others 30,000,000" in summary.splitlines()[0]


def recalled(solved: dict[str, int], num_seeds: int) -> list[Run]:
    """Runs on recall, which the first `solved` seeds of each variant solve."""
    runs = []
    for name, count in solved.items():
        runs += [recall_run(name, n, 0.95 if n < count else 0.3) for n in range(num_seeds)]
    return runs


@pytest.mark.parametrize(
    "solved, num_seeds, is_tuned, answer",
    [
        # Fisher's exact test of 4 of 4 against 0 of 4 gives p = 2 / 70, below 5 %.
        ({"gqa": 0, "mqa": 4}, 4, True, "Take mqa. 4 of 4 seeds solve recall, and 0 of 4 of gqa."),
        ({"gqa": 0, "mqa": 4}, 4, False, "Only a hint (learning rates): mqa"),
        # 3 of 3 against 0 of 3 gives p = 2 / 20.
        (
            {"gqa": 0, "mqa": 3},
            3,
            True,
            "Too little data to choose: 3 of 4 needed seeds per variant.",
        ),
        # With two variants, the significance level is halved, and 4 seeds are not enough.
        (
            {"gqa": 0, "mqa": 4, "mha": 1},
            4,
            True,
            "Too little data to choose: 4 of 5 needed seeds per variant.",
        ),
        # If no variant can be better, no seeds are missing.
        ({"gqa": 3, "mha": 3}, 3, True, "Keep gqa: 3 of 3 seeds solve recall"),
        ({"gqa": 3, "mqa": 4}, 5, True, "No variant is better than gqa for certain."),
        ({"gqa": 0, "mqa": 0}, 3, True, "No variant solves recall."),
    ],
)
def test_the_answer_for_a_task_counts_seeds(write, solved, num_seeds, is_tuned, answer):
    runs = recalled(solved, num_seeds)
    _, summary = write(tuned(runs) if is_tuned else runs)
    assert summary.startswith(answer)
    if answer.startswith(("Take", "Keep")):
        assert "To be sure" not in summary


def test_a_variant_that_solves_a_task_less_often_is_worse(write):
    page, _ = write(tuned(recalled({"gqa": 4, "mqa": 0}, 4)))
    assert table(page, 0)["mqa"]["verdict"] == "worse"


def test_speeds_are_shown_only_if_they_can_be_compared(write):
    runs = [replace(run, settings=deepcopy(run.settings)) for run in RUNS[:6]]
    page, summary = write(runs)
    assert table(page, 0)["mqa"]["tokens/s"] == "101" and "100% of the training speed" in summary
    runs[-1].tokens_per_second *= 1.5  # another program slowed the other seeds
    page, summary = write(runs)
    assert table(page, 0)["mqa"]["tokens/s"] == "100 to 153"
    assert "looks better" in summary and "training speed" not in summary
    runs[-1].settings["machine"] |= {"threads": 2}
    assert "tokens/s" not in table(write(runs)[0], 0)["mqa"]
