"""What a terminal is told: a sign of life before each long wait, and a bar that is right from its first step on."""

import os
import pty
import re
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from run import progress
from tests.conftest import LONG, ROOT


@pytest.fixture
def terminal(capfd, monkeypatch):
    """Standard error as a terminal; what it was told so far is in `capfd`."""
    monkeypatch.setattr(progress, "is_watched", lambda: True)
    return capfd


def drawn(capfd) -> list[str]:
    return [line for line in re.split(r"[\r\n]+", capfd.readouterr().err) if line.strip()]


def test_the_first_bar_has_loss_rate_and_time_left(trainer_of, terminal):
    trainer = trainer_of("log_every=100", "eval_every=100", "sample_every=100", "save_every=100")
    trainer.train_step()
    trainer.show_progress()
    bar = drawn(terminal)[0]
    assert re.search(r"^1/6 \|.*\| loss [0-9.]+  [0-9,]+ tokens/s  .*  0:00:\d\d left", bar), bar


def test_a_run_whose_end_is_the_clocks_tells_its_time_left(trainer_of, terminal):
    trainer = trainer_of("steps=null", "max_epochs=null", "max_minutes=2", "log_every=100")
    trainer.train_step()
    trainer.show_progress()
    bar = drawn(terminal)[0]
    assert re.search(r"^step 1  loss [0-9.]+  .*  0:0[12]:\d\d left", bar), bar


def test_compilation_is_not_in_the_time_left(trainer_of, terminal, monkeypatch):
    """A compilation of ten minutes, by a clock that jumps, leaves the rate what the steps make it."""
    jump = 0.0
    monkeypatch.setattr("training.trainer.monotonic", lambda: time.monotonic() + jump)
    trainer = trainer_of()
    accumulate = trainer._accumulate

    def slow(rows: slice) -> None:
        nonlocal jump
        jump += 600
        accumulate(rows)

    trainer._accumulate = slow
    monkeypatch.setattr(trainer, "compile", lambda: None)
    trainer.compile_first_step()
    trainer._accumulate = accumulate
    trainer.train_step()
    drawn(terminal)
    trainer.log_metrics()
    assert 0 < 5 * 512 / trainer.tokens_per_second < 60
    assert "0:00:" in drawn(terminal)[-1]


def test_the_loss_of_the_bar_is_that_of_the_metrics(trainer_of, terminal):
    trainer = trainer_of("log_every=100")
    for _ in range(3):
        trainer.train_step()
    trainer.show_progress()
    shown = float(re.search(r"loss ([0-9.]+)", drawn(terminal)[-1])[1])
    trainer.log_metrics()
    reported = float(re.search(r"loss ([0-9.]+)", drawn(terminal)[-1])[1])
    assert shown == reported > 0


def test_a_bar_is_drawn_at_most_once_a_second(trainer_of, terminal):
    trainer = trainer_of()
    for _ in range(3):
        trainer.train_step()
        trainer.show_progress()
    assert len([line for line in drawn(terminal) if "loss" in line]) <= 2


def test_a_long_wait_is_announced_and_ticks(terminal):
    with progress.waiting("reading", 600, "less: read=false"):
        time.sleep(2.5)
    told = drawn(terminal)
    assert told[0] == "reading, about 10 min (less: read=false)"
    assert [line for line in told[1:] if re.match("0:00:0[1-9]", line)]


def test_a_short_wait_is_not_announced(terminal):
    with progress.waiting("reading", 0.5):
        pass
    assert drawn(terminal) == []


def test_a_wait_that_turns_out_long_is_announced(terminal, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    with progress.waiting("reading"):
        time.sleep(0.5)
    assert drawn(terminal)[0] == "reading"


def test_a_terminal_without_a_size_is_told_too():
    """A pseudo-terminal has 0 columns until somebody says how many."""
    code = "import time; from run import progress\nwith progress.waiting('x', 9): time.sleep(2.5)"
    screen, terminal = pty.openpty()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=terminal, timeout=LONG)
    os.close(terminal)
    told = b""
    with suppress(OSError):  # the other end is closed
        while chunk := os.read(screen, 4096):
            told += chunk
    os.close(screen)
    assert done.returncode == 0 and b"x, about 9 s" in told and b"0:00:01" in told
