"""The report is correct in every measure, and its claims match the data."""

import math
import re
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from tests.tools.pages import recall_run, searched, table, text_run
from tools.compare import report
from tools.compare.comparison import AT_EDGE, DIVERGED
from tools.compare.ladder import judge_trend
from tools.compare.runs import Run
from tools.compare.statistics import Verdict

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
    page, summary = write(RUNS, failed="exit 4: training diverged")
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

    for text in (page, summary):
        assert "exit 4: training diverged" in text
    # The page needs no other file, and its figures have different ids.
    assert "http" not in re.sub(r'xmlns(:\w+)?="\S+"', "", page) and "<script" not in page
    ids = re.findall(r'clipPath id="(.*?)"', page)
    assert page.count("<svg") == 2 and len(set(ids)) == len(ids) > 0


def test_a_variant_that_may_not_be_at_its_best_gets_no_verdict(write):
    texts = RUNS[:9]
    page, _ = write([*texts, *searched(RUNS[3], INSIDE), *searched(RUNS[6], EDGE)])
    rows = table(page, 0)
    assert rows["mqa"]["verdict"] == "better" and rows["mqa"]["best rate"] == "x 1.00"
    assert rows["retention"]["verdict"] == AT_EDGE
    page, _ = write([*texts, *searched(RUNS[0], EDGE)])
    assert [row["verdict"] for row in table(page, 0).values()] == [AT_EDGE, "baseline", AT_EDGE]


def test_diverged_seeds_give_no_verdict_on_text_and_do_not_solve_a_task(write):
    """The remaining seeds are not a fair sample."""
    lost = [RUNS[3], RUNS[12]]
    page, _ = write([replace(run, lines=[]) if run in lost else run for run in RUNS])
    assert table(page, 0)["mqa"]["verdict"] == DIVERGED
    assert table(page, 1)["mqa"]["seeds that solve it"] == "2 of 3"


def test_a_baseline_without_a_finished_run_is_not_replaced(write):
    page, _ = write([replace(run, baseline="mha") for run in RUNS])
    assert "mha" in page and "<td" not in page
    # The order of the runs does not change the baseline.
    page, _ = write([replace(run, baseline="mqa") for run in RUNS[:9]])
    assert table(page, 0)["mqa"]["verdict"] == "baseline"


@pytest.mark.parametrize(
    ("key", "settings", "metrics"),
    [
        ("text", {"text": "def"}, {}),
        ("text", {"text": "def", "model": RUNS[0].settings["model"] | {"dim": 32}}, {}),
        ("context", {"context": 32}, {}),
        ("evaluated tokens", {}, {"eval_tokens": 400}),
        ("metric", {}, {"val_bpb": None}),  # without a byte count, the loss is in nats per token
    ],
)
def test_runs_that_share_too_little_are_not_compared(write, key, settings, metrics):
    runs = [text_run(name, seed, 1.0 + seed) for name in ("gqa", "mqa") for seed in range(2)]
    runs[-1].settings |= settings
    runs[-1].lines[-1] |= metrics
    with pytest.raises(ValueError, match=f"differ in {key} .*mqa-1"):
        write(runs)


def test_a_comparison_of_contexts_has_runs_of_different_contexts(write):
    runs = [text_run(name, 0, 1.0) for name in ("gqa", "mqa")]
    for run in runs:
        run.swept = ["context"]
    runs[1].settings["context"] = 32
    write(runs)


def test_a_comparison_of_vocabularies_has_one_held_out_text(write):
    runs = [text_run(name, 0, 1.0) for name in ("gqa", "mqa")]
    for run in runs:
        run.swept = ["data.vocab_size"]
    # Other ids, but the same bytes.
    runs[1].settings |= {"text": "def", "data": runs[0].settings["data"] | {"vocab_size": 512}}
    runs[1].lines[-1] |= {"eval_tokens": 999, "val_loss": 1.5}
    write(runs)
    runs[1].lines[-1] |= {"val_loss": 1.6}
    with pytest.raises(ValueError, match="differ in held-out bytes"):
        write(runs)


def tuned(runs: list[Run]) -> list[Run]:
    """Add a learning rate search for each variant, with the best rate inside its range."""
    firsts = {run.name: run for run in runs}
    searches = []
    for run in firsts.values():
        searches += searched(run, INSIDE)
    return runs + searches


def long_runs(losses: dict[str, float], tokens: int = 30_000_000, num_seeds: int = 3) -> list[Run]:
    """Runs with these losses and these many tokens; the losses of seeds differ by 0.001."""
    return [
        text_run(name, seed, loss + 0.001 * seed, tokens=tokens)
        for name, loss in losses.items()
        for seed in range(num_seeds)
    ]


def test_the_answer_names_the_best_variant_and_its_uncertainty(write):
    losses = {"gqa": 1.0, "mqa": 0.98, "mha": 0.99, "retention": 1.2}
    # In Dunnett's table, the critical value for three variants and 8 degrees of freedom is 2.88.
    half = 2.88 * 0.001 * (2 / 3) ** 0.5
    _, certain = write(tuned(long_runs(losses)))
    _, hint = write(long_runs(losses))
    assert certain.startswith("Take mqa (also better: mha).")
    assert hint.startswith("Only a hint") and "--tune" in hint and "--tune" not in certain
    for figure in ("0.020 ", f"{0.02 - half:.3f} to ", "50% of the cache"):
        assert figure in certain and figure in hint
    # If no variant is better, none is named.
    _, none = write(tuned(long_runs({"gqa": 1.0, "mqa": 1.002})))
    assert none.startswith("No variant is better than gqa")
    # A small gain is not rounded to zero.
    _, small = write(tuned(long_runs({"gqa": 1.0, "mqa": 1.0 - 0.0024})))
    half = 2.776 * 0.001 * (2 / 3) ** 0.5  # 97.5 % point of Student's t with 4 degrees of freedom
    assert "0.0024 " in small and f"{0.0024 - half:.4f} to " in small


def test_runs_in_different_precisions_give_only_a_hint(write):
    runs = tuned(long_runs({"gqa": 1.0, "mqa": 0.9}))
    assert write(runs)[1].startswith("Take mqa")
    runs[4].settings |= {"machine": runs[4].settings["machine"] | {"precision": "bfloat16"}}
    assert write(runs)[1].startswith("Only a hint (runs in bfloat16 and float32)")


def test_too_few_seeds_or_tokens_give_no_answer_but_a_remedy(write):
    losses = {"gqa": 1.0, "mqa": 1.0}
    parameters = RUNS[0].model.num_parameters()
    enough = round(10.1 * parameters)
    few = round(9.9 * parameters)
    steps = math.ceil(10 * parameters / 512)  # a step has 512 tokens
    uneven = long_runs({"gqa": 1.0}) + long_runs({"mqa": 1.0}, tokens=20_000_000)
    for runs, remedy in (
        (long_runs(losses, few), f"steps={steps}"),
        (long_runs(losses, enough, num_seeds=2), "seed=0,1,2"),
        (uneven, "same number of tokens"),
    ):
        _, summary = write(tuned(runs))
        assert summary.startswith("Too little data") and remedy in summary
    _, summary = write(tuned(long_runs(losses, enough)))
    assert not summary.startswith("Too little data")


def recalled(solved: dict[str, int], num_seeds: int) -> list[Run]:
    """Runs on recall, which the first `solved` seeds of each variant solve."""
    runs = []
    for name, count in solved.items():
        runs += [recall_run(name, n, 0.95 if n < count else 0.3) for n in range(num_seeds)]
    return runs


@pytest.mark.parametrize(
    "solved, num_seeds, answer",
    [
        # Fisher's exact test of 4 of 4 against 0 of 4 gives p = 2 / 70, below 5 %.
        ({"gqa": 0, "mqa": 4}, 4, "Take mqa."),
        # 3 of 3 against 0 of 3 gives p = 2 / 20.
        ({"gqa": 0, "mqa": 3}, 3, "Too little data to choose: 3 of 4 "),
        # With two variants, the significance level is halved, and 4 seeds are not enough.
        ({"gqa": 0, "mqa": 4, "mha": 1}, 4, "Too little data to choose: 4 of 5 "),
        # If no variant can be better, no seeds are missing.
        ({"gqa": 3, "mha": 3}, 3, "Keep gqa"),
        ({"gqa": 3, "mqa": 4}, 5, "No variant is better"),
    ],
)
def test_the_answer_for_a_task_counts_seeds(write, solved, num_seeds, answer):
    _, summary = write(tuned(recalled(solved, num_seeds)))
    assert summary.startswith(answer)


def test_a_variant_that_solves_a_task_less_often_is_worse(write):
    page, _ = write(tuned(recalled({"gqa": 4, "mqa": 0}, 4)))
    assert table(page, 0)["mqa"]["verdict"] == "worse"


def test_speeds_are_shown_only_if_they_can_be_compared(write):
    runs = [replace(run, settings=deepcopy(run.settings)) for run in RUNS[:6]]
    page, summary = write(runs)
    assert table(page, 0)["mqa"]["tokens/s"] == "101" and "training speed" in summary
    runs[-1].tokens_per_second *= 1.5  # another program slowed the other seeds
    page, summary = write(runs)
    assert table(page, 0)["mqa"]["tokens/s"] == "100 to 153" and "training speed" not in summary
    runs[-1].settings["machine"] |= {"threads": 2}
    page, _ = write(runs)
    assert "tokens/s" not in table(page, 0)["mqa"]


@pytest.mark.parametrize("steps, trend", [(1000, "lead grows"), (100, "cannot tell")])
def test_each_size_has_a_baseline_and_all_sizes_have_a_trend(write, tmp_path, steps, trend):
    """The warm-up of 20 steps is too long for 100 steps, so the smallest size does not count."""
    runs = []
    for dim, lead in ((64, 0.01), (96, 0.05)):
        for name in ("gqa", "kda"):
            for seed in range(4):
                loss = 1.2 - 0.001 * dim + 0.001 * seed**2 - lead * (name == "kda")
                words = (f"model.dim={dim}", f"name={name}-dim-{dim}", "schedule.warmup=20")
                run = text_run(name, seed, loss, *words)
                run.last["step"] = steps if dim == 64 else 1000
                runs.append(run)
    page, _ = write(runs)
    row = table(page, 0)["kda"]
    assert row["trend"] == trend and row["verdict, largest size"] == "better"
    assert row["dim 96"].startswith("-0.0500 [")
    assert (tmp_path / "text-ladder.svg").exists()
    for number, dim in enumerate((64, 96), 1):
        rows = table(page, number)
        assert rows[f"gqa-dim-{dim}"]["verdict"] == "baseline"
        assert rows[f"kda-dim-{dim}"]["difference"] == row[f"dim {dim}"]


def test_sizes_with_different_baselines_have_no_trend(write, tmp_path):
    runs = []
    for dim, names in ((64, ("gqa", "kda")), (96, ("kda", "gqa"))):
        for name in names:
            runs += [text_run(name, seed, 1 + 0.01 * seed, f"model.dim={dim}") for seed in SEEDS]
    write(runs)
    assert not (tmp_path / "text-ladder.svg").exists()


@pytest.mark.parametrize(
    "smallest, largest, half, trend",
    [
        (0.02, -0.05, 0.01, "lead grows"),
        (-0.05, -0.01, 0.01, "lead shrinks"),
        (0.01, 0.05, 0.01, "deficit grows"),
        (-0.01, -0.05, 0.021, "cannot tell"),
        (-0.01, -0.05, math.nan, "cannot tell"),  # one seed
    ],
)
def test_a_trend_needs_intervals_that_do_not_overlap(smallest, largest, half, trend):
    ends = [Verdict(x, x - half, x + half, math.nan, "") for x in (smallest, largest)]
    assert judge_trend(*ends) == trend
