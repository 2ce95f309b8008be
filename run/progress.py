"""Messages during long waits: the activity, the estimated time, and how to avoid the wait."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from threading import Event, Thread

from tqdm import tqdm

from run.errors import is_rank0

PATIENCE = 2.0  # seconds after which a wait is announced


def say(text: str) -> None:
    """On rank 0, write a line to standard error, above the progress bar if there is one."""
    if is_rank0():
        with suppress(OSError):  # standard error may be a closed pipe, or a file on a full disk
            tqdm.write(text, file=sys.stderr)


@cache
def warn_once(text: str) -> None:
    """Write a warning, once per process."""
    say(f"warning: {text}")


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds, such as 0:04:10."""
    if seconds == math.inf:
        return "?"
    return str(timedelta(seconds=round(seconds)))


@contextmanager
def waiting(what: str, total: int = 1, *, patience_factor: float = 1.0) -> Iterator[tqdm]:
    """Announce `what` if the code inside takes longer than `patience_factor` x PATIENCE.

    A terminal also shows a progress bar. To let the bar estimate the time left, the code inside may
    call its `update` after each of `total` parts.
    """
    patience = PATIENCE * patience_factor
    # `disable=None` shows the bar only on a terminal.
    bar = tqdm(
        total=total,
        delay=patience,
        leave=False,
        disable=not is_rank0() or None,
        bar_format="{n_fmt} of {total_fmt}, {elapsed} elapsed, {remaining} left",
    )
    is_done = Event()

    def announce() -> None:
        if not is_done.wait(patience):
            say(what)
        while not is_done.wait(1.0):
            bar.refresh()

    Thread(target=announce, daemon=True).start()
    try:
        yield bar
    finally:
        is_done.set()
        bar.delay = 0  # otherwise tqdm would not clear a bar that was never updated
        bar.close()
