"""Messages for whoever waits: what is going on, about how long it takes, and how to avoid it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from time import monotonic

from tqdm import tqdm

ROWS = 24  # of a terminal: tqdm draws nothing on one that claims to have none
PATIENCE = 2.0  # seconds that a wait may take without an announcement


def say(text: str) -> None:
    """Write a line on standard error, above a progress bar if there is one."""
    with suppress(OSError):  # it may be a closed pipe, or a file on a full disk
        tqdm.write(text, file=sys.stderr)


def is_watched() -> bool:
    """Whether standard error is a terminal, on which a progress bar can be drawn."""
    return sys.stderr.isatty()


def terminal_columns() -> int:
    """The width of the terminal; 80 for one that claims to have none."""
    columns = 0
    with suppress(OSError, ValueError):  # standard error is no terminal
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    return columns or 80


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds, such as 0:04:10."""
    return str(timedelta(seconds=round(seconds)))


@contextmanager
def waiting(
    what: str, seconds: float | None = None, advice: str = "", is_shown: bool = True
) -> Iterator[None]:
    """Announce what happens inside if it takes longer than PATIENCE.

    A terminal shows the time elapsed, every second. `seconds` is about how long it will take, if
    that is known; then a long wait is announced at its start. `advice` is how to avoid it.
    """
    if not is_shown:
        yield
        return

    message = what
    delay = PATIENCE
    if seconds is not None and seconds > PATIENCE:
        delay = 0.0
        message += f", about {seconds:.0f} s" if seconds < 90 else f", about {seconds / 60:.0f} min"
    if advice:
        message += f" ({advice})"
    start = monotonic()
    is_done = Event()

    # A thread announces the wait and shows the clock until the block inside is done.
    def announce() -> None:
        if is_done.wait(delay):
            return
        say(message)
        if not is_watched():
            return
        with tqdm(leave=False, bar_format="{desc}", ncols=terminal_columns(), nrows=ROWS) as clock:
            while not is_done.wait(1):
                clock.set_description_str(duration(monotonic() - start))

    announcer = Thread(target=announce, daemon=True)
    announcer.start()
    try:
        yield
    finally:
        is_done.set()
        announcer.join()
