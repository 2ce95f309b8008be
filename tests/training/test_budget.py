"""Tests of fitting the number of steps to max_minutes on machines whose speed changes."""

import math
import random
import re
from itertools import pairwise

import pytest
import torch

from run.distributed import DistEnv
from train import take_step


def simulate(
    run, monkeypatch, minutes: float, slowness, pauses=()
) -> tuple[float, list[float], list[int]]:
    """Simulate a run in which a step takes 0.05 s times slowness(used share of the time limit).

    `pauses` lists activities, their intervals in steps, and the seconds of the first pause and of
    later pauses. Returns the share of the limit at the end, the schedule of each step, and the
    fitted totals.
    """
    # The clock starts at zero on every machine, because rounding errors may cause another fit.
    monkeypatch.setattr(run.clock, "started", 0.0)
    clock = [0.0]
    monkeypatch.setattr("training.clock.monotonic", lambda: clock[0])
    schedule = run.trainer.schedule
    progress = run.progress
    factors = []
    totals = []
    while not progress.is_finished:
        factors.append(schedule(progress.step, progress.total_steps))
        share = (clock[0] - run.clock.started) / (60 * minutes)
        clock[0] += 0.05 * slowness(share)
        progress.step += 1
        run.budget.fit(progress)
        if run.budget.is_fitted and progress.total_steps not in totals:
            totals.append(progress.total_steps)
        for activity, interval, first, seconds in pauses:
            if progress.is_due(interval):
                is_first = activity not in run.clock.pauses
                with run.clock.pause(activity):
                    clock[0] += first if is_first else seconds
    return (clock[0] - run.clock.started) / (60 * minutes), factors, totals


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "wsd schedule.cooldown=0"])
@pytest.mark.parametrize("when", [0.2, 0.35, 0.5, 0.7, 0.9])
def test_max_minutes_is_met_on_a_machine_that_slows_to_half_speed(
    run_of, monkeypatch, when, schedule
):
    words = f"schedule={schedule} max_minutes=10 steps=null max_epochs=null eval_tokens=512"
    run = run_of(*words.split())
    end, factors, totals = simulate(run, monkeypatch, 10, lambda share: 1 + (share > when))
    assert 0.9 < end < 1.1
    # The rate decays as in a run with a fixed number of steps: to the floor, without rising again.
    peak = factors.index(max(factors))
    assert all(a >= b for a, b in pairwise(factors[peak:]))
    assert factors[-1] < 0.11 or "cooldown=0" in schedule
    # A slowdown near the end affects less than a tenth of the time and does not cause a new fit.
    assert (len(totals) > 1) == (when < 0.9) and totals == sorted(totals, reverse=True)


def test_wsd_decays_later_on_a_machine_that_speeds_up(run_of, monkeypatch):
    run = run_of("max_minutes=10", "steps=null", "max_epochs=null", "eval_tokens=512")
    end, factors, totals = simulate(run, monkeypatch, 10, lambda share: 1 if share > 0.2 else 2)
    assert 0.9 < end < 1 and len(totals) == 2
    # The decay takes 0.6 of all steps, as at a constant speed.
    assert abs(sum(f == 1 for f in factors) / len(factors) - 0.4) < 0.03


def test_a_fitted_number_of_steps_is_kept_if_the_speed_varies_little(run_of, monkeypatch):
    run = run_of("max_minutes=10", "steps=null", "max_epochs=null", "eval_tokens=512")
    generator = random.Random(0)
    end, _, totals = simulate(run, monkeypatch, 10, lambda share: generator.uniform(0.8, 1.2))
    assert 0.9 < end < 1 and len(totals) == 1


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_run_with_slow_steps_is_fitted_immediately(run_of, monkeypatch, capsys, is_compiled):
    run = run_of("max_minutes=1", "steps=null", "max_epochs=null", "eval_tokens=512")
    run.budget.is_compiled = is_compiled
    # A step takes ten seconds; the first one takes 20 if it compiles.
    first = 2 if is_compiled else 1
    end, _, totals = simulate(run, monkeypatch, 1, lambda share: 200 * (first if share == 0 else 1))
    assert 0.5 < end < 1.1 and len(totals) == 1
    assert (
        f"warning: too few steps to train a useful model ({totals[0]})" in capsys.readouterr().err
    )


def test_a_run_ends_if_its_first_step_exceeds_max_minutes(run_of, monkeypatch, capsys):
    run = run_of("max_minutes=1", "steps=null", "max_epochs=null", "eval_tokens=512")
    _, factors, totals = simulate(run, monkeypatch, 1, lambda share: 1400)  # 70 seconds
    assert len(factors) == 1 and totals == [1]
    assert "warning: too few steps to train a useful model (1)" in capsys.readouterr().err


@pytest.mark.parametrize("bound", [40_000, None])
def test_the_expected_last_step_is_shown(run_of, monkeypatch, bound):
    """The expected end by time is shown, not the limit by max_epochs, which is never reached."""
    run = run_of("max_minutes=10", "steps=null", "max_epochs=null", "eval_tokens=512")
    if bound is not None:
        run.progress.total_steps = run.progress.expected_steps = run.budget.bound = bound
    shown = []
    fit = run.budget.fit

    def recorded(progress) -> bool:
        is_final = fit(progress)
        shown.append(run.budget.expected_end(progress))
        return is_final

    monkeypatch.setattr(run.budget, "fit", recorded)
    # A step takes 0.05 s, later 0.1 s: 12,000 steps fit, then 7,800.
    simulate(run, monkeypatch, 10, lambda share: 1 + (share > 0.3))
    assert shown[:2] == [math.inf, math.inf]
    assert all(10_000 < end < 12_000 for end in shown[10:3000])
    assert 7_000 < shown[-1] < 8_200 and shown[-1] == run.progress.total_steps == len(shown)


def test_a_constantly_changing_speed_is_reported_only_a_few_times(run_of, monkeypatch, capsys):
    run = run_of("max_minutes=10", "steps=null", "max_epochs=null", "eval_tokens=512")
    generator = random.Random(0)
    _, _, totals = simulate(
        run, monkeypatch, 10, lambda share: (1 + 3 * share) * generator.uniform(0.7, 1.3)
    )
    told = re.findall(r"the run now ends at step (\d+)", capsys.readouterr().err)
    assert len(totals) > 5 and len(told) < 5
    # The last reported end is close to the true one.
    assert abs(int(told[-1]) - totals[-1]) < 0.2 * totals[-1]


WSD = ("max_minutes=10", "steps=null", "max_epochs=null", "eval_tokens=512")


@pytest.mark.parametrize("activity", ["sample", "save"])
def test_saves_and_samples_count_towards_max_minutes(run_of, monkeypatch, activity):
    run = run_of(*WSD, f"{activity}_every=500")
    # Each pause takes five seconds, a fifth of the time between two pauses.
    pauses = [(activity, 500, 5.0, 5.0)]
    end, factors, _ = simulate(run, monkeypatch, 10, lambda share: 1, pauses)
    assert 0.9 < end < 1 and factors[-1] < 0.11


def test_the_fit_includes_the_first_save_of_a_large_model(run_of, monkeypatch):
    """A checkpoint of 1.2 billion weights is written every 1,000 steps, at 300 MB per second."""
    run = run_of(*WSD, "save_every=1000", "schedule=cosine")
    run.budget.num_parameters = 1.2e9
    pauses = [("save", 1000, 48.0, 48.0)]
    end, _, totals = simulate(run, monkeypatch, 10, lambda share: 1, pauses)
    assert 0.8 < end < 1 and max(totals) < 6500


@pytest.mark.parametrize("has_init_from", [False, True])
def test_compiling_the_first_evaluation_on_a_gpu_counts_towards_max_minutes(
    run_of, monkeypatch, has_init_from
):
    run = run_of(*WSD, "eval_every=100000")  # only at the end
    if has_init_from:  # such a run evaluates before its first step, without compiling
        run.clock.pauses["evaluation"] = 0.05
    run.budget.is_compiled = True
    run.budget.ranks = DistEnv(0, 1, torch.device("cuda"))
    # The first step takes 100 seconds, and the evaluation takes 50 to compile.
    pauses = [("evaluation", 100000, 50.05, 50.05)]
    end, *_ = simulate(run, monkeypatch, 10, lambda share: 1 if share > 0 else 2000, pauses)
    assert 0.9 < end < 1


def test_the_evaluation_is_planned_once_the_length_of_the_run_is_known(run_of):
    run = run_of("max_minutes=10", "steps=null", "max_epochs=4", "eval_tokens=null")
    assert run.progress.total_steps != math.inf
    # Before the number of steps is fitted, a checkpoint does not fix the size of evaluations.
    assert run.checkpointer.state(run.progress).eval_tokens is None
    run.budget.is_fitted = True
    assert run.checkpointer.state(run.progress).eval_tokens > 0


def test_time_is_reserved_for_the_planned_size_of_evaluations(run_of):
    run = run_of("max_minutes=10", "steps=null", "eval_tokens=null", "eval_every=500")
    estimated = run.budget.count_steps_left(run.progress, step_seconds=0.05)
    run.progress.eval_tokens = 100_000  # every 500 steps, as long as 98 steps of 512 tokens
    planned = run.budget.count_steps_left(run.progress, step_seconds=0.05)
    assert planned == pytest.approx(estimated / (1 + 98 / 500), rel=0.03)


def test_the_time_of_earlier_processes_is_not_the_time_of_a_step(run_of):
    words = ("max_minutes=10", "steps=null", "max_epochs=4", "eval_tokens=512")
    run = run_of(*words, folder="cut")
    run.clock.add_earlier(120)  # a fifth of the limit; a step of a tenth would be enough to fit
    take_step(run)
    run.checkpointer.save(run.progress)
    again = run_of(*words, "resume=true", folder="cut")
    assert again.clock.total() > 120
    take_step(again)
    assert not again.budget.fit(again.progress)
    assert again.budget.is_open


def test_a_limit_that_earlier_processes_have_used_up_is_refused(run_of, capsys):
    """Otherwise, the run would end after a few steps near the peak learning rate."""
    run = run_of("max_minutes=null", folder="long")
    run.clock.add_earlier(1800)
    take_step(run)
    run.checkpointer.save(run.progress)
    run_of("max_minutes=40", "resume=true", folder="long")
    with pytest.raises(SystemExit) as end:
        run_of("max_minutes=5", "resume=true", folder="long")
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert "has taken 30.0 minutes). fix: max_minutes=36, or steps=N max_minutes=null" in told
    run_of("steps=9", "max_minutes=null", "resume=true", folder="long")
