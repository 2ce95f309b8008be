"""How differences change with the size of a model."""

import math

import pytest

from tests.tools.pages import table, text_run
from tools.compare import report
from tools.compare.ladder import judge_trend
from tools.compare.statistics import Verdict


def verdict(difference: float, half: float) -> Verdict:
    return Verdict(difference, difference - half, difference + half, math.nan, "")


@pytest.mark.parametrize(
    "smallest, largest, half, text",
    [
        (-0.01, -0.05, 0.01, "lead grows"),
        (0.02, -0.05, 0.01, "lead grows"),
        (-0.05, -0.01, 0.01, "lead shrinks"),
        (0.01, 0.05, 0.01, "deficit grows"),
        (0.05, 0.01, 0.01, "deficit shrinks"),
        (-0.01, -0.05, 0.021, "cannot tell"),
        (-0.01, -0.05, math.nan, "cannot tell"),  # one seed
    ],
)
def test_a_trend_needs_intervals_that_do_not_overlap(smallest, largest, half, text):
    assert judge_trend(verdict(smallest, half), verdict(largest, half)) == text


@pytest.mark.parametrize("steps, trend", [(1000, "lead grows"), (100, "cannot tell")])
def test_a_report_on_several_sizes_has_the_trend(tmp_path, steps, trend):
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
    report.write_report(tmp_path, runs, {}, margin=0.01)
    rows = table((tmp_path / "report.html").read_text(encoding="utf-8"), 0)
    assert rows["kda"]["trend"] == trend and rows["kda"]["verdict there"] == "better"
    assert rows["kda"]["dim 96"].startswith("-0.0500 [")
    assert (tmp_path / "text-ladder.svg").exists()


def test_sizes_with_different_baselines_have_no_trend(tmp_path):
    runs = []
    for dim, names in ((64, ("gqa", "kda", "mha")), (96, ("kda", "gqa", "mha"))):
        for name in names:
            for seed in range(3):
                runs.append(text_run(name, seed, 1 + 0.01 * seed, f"model.dim={dim}"))
    summary = report.write_report(tmp_path, runs, {}, margin=0.01)
    assert "trend" not in summary and not (tmp_path / "text-ladder.svg").exists()
