"""What a terminal is told: a sign of life before each long wait, and a bar that is right from its first step on."""

import re
import time

import pytest

from run import progress


@pytest.fixture
def terminal(capfd, monkeypatch):
    """Standard error as a terminal; what it was told so far is in `capfd`."""
    monkeypatch.setattr(progress, "is_watched", lambda: True)
    return capfd


def drawn(capfd) -> list[str]:
    return [line for line in re.split(r"[\r\n]+", capfd.readouterr().err) if line.strip()]


@pytest.mark.parametrize(
    "words, end",
    [(("steps=9",), "1/9"), (("steps=null", "max_epochs=null", "max_minutes=2"), r"1/\?")],
)
def test_the_first_bar_has_loss_rate_and_time_left(trainer_of, terminal, words, end):
    trainer = trainer_of(*words)
    trainer.train_step()
    trainer.report()
    bar = drawn(terminal)[-1]
    rate = r"loss [0-9.]+  [0-9,]+ tokens/s  [0-9.]+ GiB  0:0[0-2]:\d\d left"
    assert re.search(rf"^{end} \|.*\| {rate}", bar), bar


@pytest.mark.parametrize(
    "seconds, lasts, told",
    [
        (600, 0.1, ["reading, about 0:10:00 (less: read=false)"]),  # at its start
        (0.1, 0.0, []),  # a short one
        (0.0, 0.5, ["reading (less: read=false)"]),  # one that turns out long
    ],
)
def test_a_long_wait_is_announced(terminal, monkeypatch, seconds, lasts, told):
    monkeypatch.setattr(progress, "PATIENCE", 0.3)
    with progress.waiting("reading", seconds, "less: read=false"):
        time.sleep(lasts)
    assert drawn(terminal) == told
