"""Messages for whoever waits: what is going on, about how long it takes, and how to avoid it."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Timer

from tqdm import tqdm

PATIENCE = 2.0  # seconds that a wait may take without an announcement


def say(text: str) -> None:
    """Write a line on standard error, above a progress bar if there is one."""
    with suppress(OSError):  # it may be a closed pipe, or a file on a full disk
        tqdm.write(text, file=sys.stderr)


def is_watched() -> bool:
    """Whether standard error is a terminal, on which a progress bar can be drawn."""
    return sys.stderr.isatty()


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds, such as 0:04:10."""
    return "?" if seconds == math.inf else str(timedelta(seconds=round(seconds)))


@contextmanager
def waiting(
    what: str, seconds: float = 0.0, advice: str = "", is_shown: bool = True
) -> Iterator[None]:
    """Announce what happens inside if it takes longer than PATIENCE.

    `seconds` is about how long it will take; a wait that will be long is announced at its start.
    `advice` is how to avoid it.
    """
    message = what
    delay = PATIENCE
    if seconds > PATIENCE:
        delay = 0.0
        message += f", about {duration(seconds)}"
    if advice:
        message += f" ({advice})"
    announcer = Timer(delay, say, [message])
    announcer.daemon = True
    if is_shown:
        announcer.start()
    try:
        yield
    finally:
        announcer.cancel()
