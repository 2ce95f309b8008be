"""Messages on standard error."""

import math
import sys
from contextlib import suppress
from datetime import timedelta
from functools import cache

from tqdm import tqdm

from run.errors import is_rank0


def print0(text: str) -> None:
    """On rank 0, write a line to standard error, above the progress bar if there is one."""
    if is_rank0():
        with suppress(OSError):  # standard error may be a closed pipe, or a file on a full disk
            tqdm.write(text, file=sys.stderr)


@cache
def warn_once(text: str) -> None:
    """Write a warning, once per process."""
    print0(f"warning: {text}")


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds, such as 0:04:10; "?" if infinite."""
    if seconds == math.inf:
        return "?"
    return str(timedelta(seconds=round(seconds)))
