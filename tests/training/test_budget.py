"""The number of steps that max_minutes has room for, on machines whose speed changes."""

import math
import random
import re
from itertools import pairwise

import pytest
import torch

from run.distributed import DistEnv


def simulate(
    run, monkeypatch, minutes: float, slowness, pauses=()
) -> tuple[float, list[float], list[int]]:
    """Run without training: a step takes 0.05 s times slowness(share of the limit that is gone).

    `pauses` are activities, their intervals in steps, and the seconds of the first and the others.
    Returns the share of the limit at the end, the schedule of each step, and the fitted numbers.
    """
    clock = [run.clock.started]
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
def test_minutes_hold_on_a_machine_that_slows_by_half(run_of, monkeypatch, when, schedule):
    words = f"schedule={schedule} max_minutes=10 steps=null max_epochs=null eval_tokens=512"
    run = run_of(*words.split())
    end, factors, totals = simulate(run, monkeypatch, 10, lambda share: 1 + (share > when))
    assert 0.9 < end < 1.1
    # The rate falls as it does in a run that is planned for so many steps: to the floor, never up.
    peak = factors.index(max(factors))
    assert all(a >= b for a, b in pairwise(factors[peak:]))
    assert factors[-1] < 0.11 or "cooldown=0" in schedule
    # Near the end, the slower steps that are left take less than a tenth of the time.
    assert (len(totals) > 1) == (when < 0.9) and totals == sorted(totals, reverse=True)


def test_wsd_decays_later_on_a_machine_that_gets_faster(run_of, monkeypatch):
    run = run_of("max_minutes=10", "steps=null", "max_epochs=null", "eval_tokens=512")
    end, factors, totals = simulate(run, monkeypatch, 10, lambda share: 1 if share > 0.2 else 2)
    assert 0.9 < end < 1 and len(totals) == 2
    # The decay takes 0.6 of all steps, as in a run that was as fast from its beginning.
    assert abs(sum(f == 1 for f in factors) / len(factors) - 0.4) < 0.03


def test_a_fitted_number_stays_at_a_speed_that_varies_little(run_of, monkeypatch):
    run = run_of("max_minutes=10", "steps=null", "max_epochs=null", "eval_tokens=512")
    generator = random.Random(0)
    end, _, totals = simulate(run, monkeypatch, 10, lambda share: generator.uniform(0.8, 1.2))
    assert 0.9 < end < 1 and len(totals) == 1


@pytest.mark.parametrize("is_compiled", [False, True])
def test_steps_that_are_slow_are_fitted_at_once(run_of, monkeypatch, capsys, is_compiled):
    run = run_of("max_minutes=1", "steps=null", "max_epochs=null", "eval_tokens=512")
    run.budget.is_compiled = is_compiled
    # A step takes ten seconds, and the first one 20 if it compiles.
    first = 2 if is_compiled else 1
    end, _, totals = simulate(run, monkeypatch, 1, lambda share: 200 * (first if share == 0 else 1))
    assert 0.5 < end < 1.1 and len(totals) == 1
    assert f"warning: too few steps to learn from ({totals[0]})" in capsys.readouterr().err


def test_a_run_whose_first_step_takes_all_of_the_time_ends_with_it(run_of, monkeypatch, capsys):
    run = run_of("max_minutes=1", "steps=null", "max_epochs=null", "eval_tokens=512")
    _, factors, totals = simulate(run, monkeypatch, 1, lambda share: 1400)  # 70 seconds
    assert len(factors) == 1 and totals == [1]
    assert "warning: too few steps to learn from (1)" in capsys.readouterr().err


@pytest.mark.parametrize("bound", [40_000, None])
def test_the_end_is_shown_as_it_is_expected(run_of, monkeypatch, bound):
    """Not as the bound of the epochs, which the clock never lets a run reach."""
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
    # A step takes 0.05 s, later 0.1: there is room for 12,000, then 7,800.
    simulate(run, monkeypatch, 10, lambda share: 1 + (share > 0.3))
    assert shown[:2] == [math.inf, math.inf]
    assert all(10_000 < end < 12_000 for end in shown[10:3000])
    assert 7_000 < shown[-1] < 8_200 and shown[-1] == run.progress.total_steps == len(shown)


def test_a_speed_that_changes_all_the_time_is_told_a_few_times(run_of, monkeypatch, capsys):
    run = run_of("max_minutes=10", "steps=null", "max_epochs=null", "eval_tokens=512")
    generator = random.Random(0)
    _, _, totals = simulate(
        run, monkeypatch, 10, lambda share: (1 + 3 * share) * generator.uniform(0.7, 1.3)
    )
    told = re.findall(r"the run now ends at step (\d+)", capsys.readouterr().err)
    assert len(totals) > 5 and len(told) < 5
    # What was told last is near the end.
    assert abs(int(told[-1]) - totals[-1]) < 0.2 * totals[-1]


WSD = ("max_minutes=10", "steps=null", "max_epochs=null", "eval_tokens=512")


@pytest.mark.parametrize("activity", ["sample", "save"])
def test_saves_and_samples_are_in_the_minutes(run_of, monkeypatch, activity):
    run = run_of(*WSD, f"{activity}_every=500")
    # Five seconds each, a fifth of the time between two of them.
    pauses = [(activity, 500, 5.0, 5.0)]
    end, factors, _ = simulate(run, monkeypatch, 10, lambda share: 1, pauses)
    assert 0.9 < end < 1 and factors[-1] < 0.11


def test_a_large_model_is_fitted_with_its_first_save(run_of, monkeypatch):
    """A checkpoint of 1.2 billion weights, written at 300 MB a second, every 1,000 steps."""
    run = run_of(*WSD, "save_every=1000", "schedule=cosine")
    run.budget.num_parameters = 1.2e9
    pauses = [("save", 1000, 48.0, 48.0)]
    end, _, totals = simulate(run, monkeypatch, 10, lambda share: 1, pauses)
    assert 0.8 < end < 1 and max(totals) < 6500


def test_the_graph_of_the_first_evaluation_is_in_the_minutes_on_a_gpu(run_of, monkeypatch):
    run = run_of(*WSD, "eval_every=100000")  # at the end alone
    run.budget.is_compiled = True
    run.budget.ranks = DistEnv(0, 1, torch.device("cuda"))
    # The first step takes 100 seconds, the first evaluation 50 more than the others.
    pauses = [("evaluation", 100000, 50.05, 0.05)]
    end, *_ = simulate(run, monkeypatch, 10, lambda share: 1 if share > 0 else 2000, pauses)
    assert 0.9 < end < 1
