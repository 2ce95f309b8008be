"""Exit codes, and the line on standard error with which an expected problem ends a command.

A bug is not an expected problem: it shows its traceback.
"""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import NoReturn

# Exit codes.
BUG = 1
OVERRIDE = 1  # an unknown key, or a value that cannot be read
INPUT = 2
INTEGRITY = 3
DIVERGED = 4
STORAGE = 74
PREEMPTED = 75
INTERRUPTED = 130

# Errors of a disk that is full, read-only or broken.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}


class IntegrityError(Exception):
    """A file on disk differs from the one that was written."""


class OverrideError(Exception):
    """The key of an override is unknown, or its value cannot be read."""


def exit_with(code: int, *problems: object, rank0_only: bool = False) -> NoReturn:
    """Print a line for each problem, "error: what (values). fix: how", and raise SystemExit(code).

    `rank0_only` is for problems that every rank finds: rank 0 alone prints them.
    """
    assert code != 0
    if not rank0_only or is_rank0():
        for problem in problems:
            line = " ".join(str(problem).split())
            if "fix: " not in line:
                line += ". fix: --help lists what can be given"
            with suppress(OSError):  # standard error may be closed
                start_line()
                print("error:", line, file=sys.stderr)
    raise SystemExit(code)


def is_rank0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def without_fix(problem: object) -> str:
    """The description of a problem, without its fix."""
    return str(problem).partition(". fix: ")[0]


def suggest(word: str, known: list[str]) -> str | None:
    """The known word that is closest to a mistyped one, or None if none is close.

    Words are compared by their last part: for lr, optimizer.lr is suggested, and for gqq,
    attention=gqa. If several known words have the same last part, the first one is suggested.
    """
    by_last_part = {}
    for name in known:
        by_last_part.setdefault(last_part(name), name)
    matches = get_close_matches(last_part(word).lower(), by_last_part, n=1, cutoff=0.65)
    if not matches:
        return None
    (closest,) = matches
    return by_last_part[closest]


def last_part(word: str) -> str:
    """The part of a word after its last dot or equals sign."""
    return re.split("[.=]", word)[-1]


def start_line() -> None:
    """On a terminal, clear the current line, which may show a progress bar."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)


@contextmanager
def user_input() -> Iterator[None]:
    """Report a ValueError or OSError raised inside as bad input, with exit code 2.

    Only for checking configs and opening data: elsewhere such an error is a bug.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        source = error.filename or "the network"
        problem = f"{error.strerror or error} ({source}). fix: check {source}"
        exit_with(INPUT, problem, rank0_only=True)
    except ValueError as error:
        exit_with(INPUT, *str(error).splitlines(), rank0_only=True)


@contextmanager
def report_errors() -> Iterator[None]:
    """Report problems that are expected at any time in a command. Wraps the whole command."""
    try:
        yield
    except IntegrityError as error:
        exit_with(INTEGRITY, error)
    except OverrideError as error:
        exit_with(OVERRIDE, error)
    except KeyboardInterrupt:
        exit_with(INTERRUPTED, "interrupted. fix: call it again")
    except BrokenPipeError:
        # The reader of our output has ended, such as `head`. Python must not flush into its pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        exit_with(STORAGE, f"{error.strerror} ({error.filename}). fix: make room, or another place")
