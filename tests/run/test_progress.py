"""The progress bar is correct from the first step."""

import re
import sys

import pytest

from train import report, take_step


@pytest.mark.parametrize(
    ("words", "end"),
    [(["steps=9"], "1/9"), (["steps=null", "max_epochs=null", "max_minutes=2"], r"1/\?")],
)
def test_the_progress_bar_of_the_first_step_shows_loss_speed_and_time_left(
    run_of, capsys, monkeypatch, words, end
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run = run_of(*words)
    take_step(run)
    run.log.advance(run.progress, run.budget.expected_end(run.progress))
    report(run)
    *_, bar = re.split(r"[\r\n]+", capsys.readouterr().err.strip())
    numbers = r"loss [0-9.]+  [0-9,]+ tokens/s  [0-9.]+ GiB  \d:\d\d:\d\d left"
    assert re.search(rf"^{end} \|.*\| {numbers}", bar), bar
