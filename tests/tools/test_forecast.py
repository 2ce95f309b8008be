"""A comparison says how long it will take, and which differences it will find, before it trains."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t as student_t
from scipy.stats import ttest_1samp

from tools.compare import forecast, jobs, plan
from tools.compare.runs import Run


@pytest.fixture(scope="module")
def planned() -> list[jobs.Job]:
    words = ["attention=gqa,mha", "seed=0,1,2", "model=tiny", "device=cpu", "max_minutes=3"]
    return plan.plan_jobs(words, "params", Path("out"))["text"]


def finish(monkeypatch, finished: list[jobs.Job], seconds: float) -> None:
    """Makes the runs of these jobs finished ones, and of all others unfinished ones."""
    folders = [job.run_dir for job in finished]

    def read(folder: Path) -> Run:
        return Run(folder, {}, [{"seconds": seconds}], folder in folders)

    monkeypatch.setattr(Run, "read", read)


def test_time_is_that_of_the_baseline_by_flops(planned, monkeypatch):
    one, other = (plan.meta_model(job.settings).training_flops() for job in planned[:2])
    assert one != other
    limit = forecast.seconds_left(planned)
    assert limit == pytest.approx(3 * 180 * (1 + other / one), rel=1e-6)
    finish(monkeypatch, planned[:1], 200.0)
    after = forecast.seconds_left(planned)
    assert after == pytest.approx(200 * (2 + 3 * other / one), rel=1e-6)
    finish(monkeypatch, planned, 200.0)
    assert forecast.seconds_left(planned) == 0


def test_time_without_a_limit_is_unknown_until_the_baseline_has_trained(planned, monkeypatch):
    endless = [jobs.Job(job.run_dir, [], job.settings | {"max_minutes": None}) for job in planned]
    assert forecast.seconds_left(endless) is None
    assert "time unknown until gqa-0 has trained" in forecast.forecast("text", endless)
    finish(monkeypatch, endless[:1], 200.0)
    assert "left" in forecast.forecast("text", endless)


@pytest.mark.parametrize("pairs, tests", [(2, 1), (3, 4), (5, 8)])
def test_the_difference_that_is_told_is_found_in_80_percent(pairs, tests):
    """By the verdicts themselves, of a variant that differs among those that do not."""
    difference = forecast.detectable_difference(pairs, tests)
    draws = np.random.default_rng(0).normal(size=(20_000, tests, pairs))
    draws[:, 0] += difference
    p = ttest_1samp(draws, 0, axis=2).pvalue
    # Holm: the smallest p is compared with 0.05 / tests, the next with 0.05 / (tests - 1) ...
    rank = (p < p[:, :1]).sum(axis=1)
    found = p[:, 0] <= 0.05 / (tests - rank)
    assert found.mean() == pytest.approx(0.8, abs=0.015)


def test_the_published_spread_is_that_of_the_intervals():
    """Half of the 95 % intervals of five pairs each, in the table of docs/results.md."""
    halves = (0.0134, 0.0121, 0.0140, 0.0100, 0.0113, 0.0148, 0.0179, 0.0096)
    quantile = student_t.ppf(0.975, 4)
    variances = [(half / quantile) ** 2 * 5 for half in halves]
    expected = (sum(variances) / len(variances)) ** 0.5
    assert abs(forecast.PUBLISHED_SPREAD - expected) < 5e-5


def test_a_difference_is_told_in_deviations_and_bits_per_byte(planned):
    assert "a difference of 3.3 standard deviations" in forecast.forecast("recall", planned)
    assert "bits per byte" not in forecast.forecast("recall", planned)
    assert (
        "80% power for a difference of 3.3 standard deviations (0.0346 bits"
        in forecast.forecast("text", planned)
    )
    for few in (planned[:2], planned[::2]):  # one seed, one variant
        assert "no verdicts" in forecast.forecast("text", few)
