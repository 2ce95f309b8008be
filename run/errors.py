"""Exit codes, and the one line on standard error that an expected problem ends a command with.

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
OVERRIDE = 1  # unknown, or not a value
INPUT = 2
INTEGRITY = 3
DIVERGED = 4
STORAGE = 74
PREEMPTED = 75
INTERRUPTED = 130

# Errors of a disk that is full, read-only or broken.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}


class IntegrityError(Exception):
    """A file on disk is not what was written."""


class OverrideError(Exception):
    """An override has no place in the config, or its value cannot be read."""


def exit_with(code: int, *problems: object, rank0_only: bool = False) -> NoReturn:
    """Print a line for each problem, "error: what (values). fix: how", and raise SystemExit(code).

    `rank0_only` is for problems that every rank finds: rank 0 alone prints them.
    """
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
    """What a problem is, without how to fix it."""
    return str(problem).partition(". fix: ")[0]


def suggest(word: str, known: list[str]) -> str | None:
    """The known word that a mistyped one most likely stands for, if any.

    They are compared by their last part: lr is optimizer.lr, and gqq is attention=gqa.
    """
    names = {last_part(name): name for name in reversed(known)}
    near = get_close_matches(last_part(word).lower(), names, n=1, cutoff=0.65)
    return names.get("".join(near))


def last_part(word: str) -> str:
    return re.split("[.=]", word)[-1]


def start_line() -> None:
    """Clear the line of a terminal, in which a progress bar may stand."""
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
    """Report the expected problems that may come up at any time in a command. Wraps all of it."""
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
