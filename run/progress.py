"""Messages for whoever waits: what is going on, about how long it takes, and how to avoid it."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread

from tqdm import tqdm

from run.errors import is_rank0

PATIENCE = 2.0  # seconds that a wait may take without an announcement


def say(text: str) -> None:
    """Write a line on standard error, above a progress bar if there is one; on rank 0 alone."""
    if is_rank0():
        with suppress(OSError):  # it may be a closed pipe, or a file on a full disk
            tqdm.write(text, file=sys.stderr)


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds, such as 0:04:10."""
    return "?" if seconds == math.inf else str(timedelta(seconds=round(seconds)))


@contextmanager
def waiting(what: str, total: int = 1) -> Iterator[tqdm]:
    """Announce what happens inside if it takes longer than PATIENCE; a terminal shows a clock, too.

    The code inside may call `update` of the bar that it gets after each of `total` parts, from
    which the time left follows.
    """
    # None shows the bar on a terminal only.
    bar = tqdm(
        total=total,
        delay=PATIENCE,
        leave=False,
        disable=not is_rank0() or None,
        bar_format="{n_fmt} of {total_fmt}, {elapsed} gone, {remaining} left",
    )
    is_done = Event()

    def announce() -> None:
        if not is_done.wait(PATIENCE):
            say(what)
        while not is_done.wait(1.0):
            bar.refresh()

    Thread(target=announce, daemon=True).start()
    try:
        yield bar
    finally:
        is_done.set()
        bar.delay = 0  # or tqdm would not clear what was never updated
        bar.close()
