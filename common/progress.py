"""Signs of life for whoever waits: what is going on, about how long it takes, how to avoid it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from time import monotonic

from tqdm import tqdm

PATIENCE = 2.0  # seconds that a wait may take unannounced


def say(text: str) -> None:
    """Write a line on standard error, above a progress bar if there is one."""
    with suppress(OSError):  # nobody reads on, or it is a file on a full disk
        tqdm.write(text, file=sys.stderr)


def is_watched() -> bool:
    """Whether standard error is a terminal, where something may move."""
    return sys.stderr.isatty()


def terminal_size() -> dict[str, int]:
    """Columns and rows of the terminal, for tqdm, which draws nothing on one that claims to have none."""
    columns, rows = 80, 24
    with suppress(OSError, ValueError):  # standard error is no terminal
        size = os.get_terminal_size(sys.stderr.fileno())
        columns = size.columns or columns
        rows = size.lines or rows
    return {"ncols": columns, "nrows": rows}


def duration(seconds: float) -> str:
    """Such as 0:04:10."""
    return str(timedelta(seconds=round(seconds)))


@contextmanager
def waiting(
    what: str, seconds: float | None = None, advice: str = "", is_shown: bool = True
) -> Iterator[None]:
    """Announce what takes more than PATIENCE; a terminal is told each second how long it took so far.

    `seconds` is about how long it will take, if that is known; then a long wait is announced at its
    start. `advice` is how to avoid it.
    """
    if not is_shown:
        yield
        return

    text = what
    if seconds is not None and seconds > PATIENCE:
        text += f", about {seconds:.0f} s" if seconds < 90 else f", about {seconds / 60:.0f} min"
    if advice:
        text += f" ({advice})"
    delay = 0.0 if seconds is not None and seconds > PATIENCE else PATIENCE
    began = monotonic()
    ended = Event()

    def tell() -> None:
        if ended.wait(delay):
            return
        say(text)
        if not is_watched():
            return
        with tqdm(leave=False, bar_format="{desc}", **terminal_size()) as clock:
            while not ended.wait(1):
                clock.set_description_str(duration(monotonic() - began))

    teller = Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
