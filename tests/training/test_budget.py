"""Tests of fitting the number of steps to max_minutes on machines whose speed changes."""

import math
import random
from itertools import pairwise

import pytest

from train import take_step

NO_OTHER_LIMIT = ("steps=null", "max_epochs=null", "eval_tokens=512")


def simulate(
    run, monkeypatch, slowness, pauses=()
) -> tuple[float, list[float], list[float], list[bool]]:
    """Simulate a run in which a step takes 0.05 s times slowness(used share of the time limit).

    `pauses` lists intervals in steps, and the seconds of a pause. Returns the share of the limit at
    the end, the schedule of each step, the factors of its rates, and whether it was fitted.
    """
    clock = [run.env.clock.started]
    monkeypatch.setattr("training.clock.monotonic", lambda: clock[0])
    start = clock[0]
    progress = run.progress
    schedules = []
    factors = []
    fitted = []
    while not progress.is_finished:
        schedules.append(run.trainer.schedule(progress.step, progress.total_steps))
        factors.append(run.trainer.rates.run_factor(progress.expected_steps))
        clock[0] += 0.05 * slowness((clock[0] - start) / run.budget.limit)
        progress.step += 1
        fitted.append(run.budget.fit(progress))
        for interval, seconds in pauses:
            if progress.is_due(interval):
                with run.env.clock.pause():
                    clock[0] += seconds
    return (clock[0] - start) / run.budget.limit, schedules, factors, fitted


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "wsd schedule.cooldown=0"])
def test_max_minutes_is_met_and_the_rate_decays(run_of, monkeypatch, schedule):
    run = run_of("max_minutes=1", *NO_OTHER_LIMIT, *f"schedule={schedule}".split())
    # Evaluations and saves take 5 % of the time, and steps vary by 20 %.
    generator = random.Random(0)
    end, schedules, _, fitted = simulate(
        run, monkeypatch, lambda share: generator.uniform(0.8, 1.2), [(100, 0.25)]
    )
    assert 0.9 < end < 1.0 and fitted.count(True) == 1
    assert fitted.index(True) == pytest.approx(0.1 * len(fitted), rel=0.2)
    peak = schedules.index(max(schedules))
    assert all(a >= b for a, b in pairwise(schedules[peak:]))
    assert schedules[-1] < 0.11 or "cooldown=0" in schedule


@pytest.mark.parametrize("when", [0.05, 0.9])
def test_a_run_on_a_machine_that_slows_to_half_speed_ends_soon_after_the_limit(
    run_of, monkeypatch, when
):
    run = run_of("max_minutes=5", *NO_OTHER_LIMIT)
    end, *_, fitted = simulate(run, monkeypatch, lambda share: 1 + (share > when))
    assert 0.9 < end < 1.06 and fitted.count(True) == 1


def test_no_rate_changes_by_more_than_five_percent_at_the_fit(run_of, monkeypatch):
    run = run_of("max_minutes=5", *NO_OTHER_LIMIT)
    _, _, factors, fitted = simulate(run, monkeypatch, lambda share: 1 if share > 0.01 else 3)
    at = fitted.index(True)
    assert factors[at + 1] / factors[at] == pytest.approx(1, abs=0.05)
    assert {*factors[at + 1 :]} == {factors[-1]} != {1.0}


@pytest.mark.parametrize(
    ("step_seconds", "least_steps", "end"), [(2.0, 20, 1.0), (7.0, 5, 1.0), (70.0, 1, 1.2)]
)
def test_a_run_with_slow_steps_still_ends(run_of, monkeypatch, step_seconds, least_steps, end):
    run = run_of("max_minutes=1", *NO_OTHER_LIMIT)
    ended, schedules, *_ = simulate(run, monkeypatch, lambda share: step_seconds / 0.05)
    assert least_steps <= len(schedules) and ended <= end


def test_steps_are_not_fitted_if_another_limit_comes_first(run_of, monkeypatch):
    run = run_of("max_minutes=10", "steps=500", "eval_tokens=512")
    end, _, factors, _ = simulate(run, monkeypatch, lambda share: 1)
    assert run.progress.step == 500 and end < 0.1 and len({*factors}) == 1


def test_a_resumed_run_keeps_its_fitted_steps_unless_a_limit_changes(run_of):
    words = ("max_minutes=10", *NO_OTHER_LIMIT)
    run = run_of(*words, folder="cut")
    take_step(run)
    run.progress.total_steps = run.progress.expected_steps = 70
    run.budget.is_fitted = True
    run.checkpointer.save(run.progress)
    again = run_of(*words, "resume=true", "eval_every=9", folder="cut")
    assert again.progress.total_steps == again.progress.expected_steps == 70
    assert again.budget.is_fitted and not again.budget.fit(again.progress)
    longer = run_of(*words, "max_minutes=20", "resume=true", folder="cut")
    assert longer.progress.total_steps == math.inf and not longer.budget.is_fitted
    exact = run_of("steps=90", "max_minutes=null", "resume=true", folder="cut")
    assert exact.progress.total_steps == 90 and exact.budget.is_fitted


def test_the_time_of_earlier_processes_is_not_the_time_of_a_step(run_of):
    words = ("max_minutes=10", *NO_OTHER_LIMIT)
    run = run_of(*words, folder="cut")
    run.env.clock.add_earlier(120)  # a fifth of the limit
    take_step(run)
    run.checkpointer.save(run.progress)
    again = run_of(*words, "resume=true", folder="cut")
    assert again.env.clock.total() > 120
    take_step(again)
    assert not again.budget.fit(again.progress) and not again.budget.is_fitted


def test_a_limit_that_earlier_processes_have_used_up_is_refused(run_of):
    """Otherwise, the run would end after a few steps near the peak learning rate."""
    run = run_of("max_minutes=null", folder="long")
    run.env.clock.add_earlier(1800)
    take_step(run)
    run.checkpointer.save(run.progress)
    run_of("max_minutes=40", "resume=true", folder="long")
    with pytest.raises(SystemExit) as end:
        run_of("max_minutes=5", "resume=true", folder="long")
    assert end.value.code == 2
    run_of("steps=9", "max_minutes=null", "resume=true", folder="long")
