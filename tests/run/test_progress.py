"""Terminal output announces long waits, and the progress bar is correct from the first step."""

import re
import sys
import time

import pytest

from run import progress
from train import report, take_step


def drawn(capsys) -> list[str]:
    return [line for line in re.split(r"[\r\n]+", capsys.readouterr().err) if line.strip()]


@pytest.mark.parametrize(
    "words, end",
    [
        (("steps=9",), "1/9"),
        (("steps=9", "max_minutes=2"), "1/9"),
        (("steps=null", "max_epochs=null", "max_minutes=2"), r"1/\?"),
    ],
)
def test_the_progress_bar_of_the_first_step_shows_loss_speed_and_time_left(
    run_of, capsys, monkeypatch, words, end
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run = run_of(*words)
    take_step(run)
    run.log.advance(run.progress, run.budget.expected_end(run.progress))
    report(run)
    bar = drawn(capsys)[-1]
    rate = r"loss [0-9.]+  [0-9,]+ tokens/s  [0-9.]+ GiB  0:0[0-2]:\d\d left"
    assert re.search(rf"^{end} \|.*\| {rate}", bar), bar


@pytest.mark.parametrize("lasts, told", [(0.0, []), (0.5, ["reading"])])
def test_long_waits_are_announced(capsys, monkeypatch, lasts, told):
    monkeypatch.setattr(progress, "PATIENCE", 0.3)
    with progress.waiting("reading"):
        time.sleep(lasts)
    assert drawn(capsys) == told


def test_a_terminal_shows_a_clock_during_a_long_wait(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "PATIENCE", 0.3)
    with progress.waiting("reading", total=4) as bar:
        bar.update()
        time.sleep(1.6)
    told, *_, clock = drawn(capsys)
    assert told == "reading" and re.match("1 of 4, 00:01 elapsed, 00:0[345] left", clock)


def test_a_slow_step_is_announced_after_five_times_the_usual_delay(run_of, capsys, monkeypatch):
    run = run_of("steps=9")
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    compute = run.trainer.compute_gradients

    def compute_slowly(*arguments):
        time.sleep(0.5)
        return compute(*arguments)

    run.trainer.compute_gradients = compute_slowly
    drawn(capsys)
    take_step(run)
    assert "step 1 is slow (to shorten steps, lower batch_tokens)" in drawn(capsys)
