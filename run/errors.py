"""Exit codes, and the line on standard error with which an expected problem ends a command.

A bug is not an expected problem: it shows its traceback.
"""

import errno
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from types import FrameType
from typing import IO, NoReturn

# Exit codes.
BUG = 1
OVERRIDE = 1  # an unknown key, or a value that cannot be read
INPUT = 2
INTEGRITY = 3
DIVERGED = 4
STORAGE = 74
PREEMPTED = 75
INTERRUPTED = 130

# Errors of a disk that is full, read-only, broken or, on a network, gone.
NO_ROOM = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EIO,
    errno.EFBIG,
    errno.ESTALE,
    errno.ENOTCONN,
}
# Errors of a file system that lacks an operation: a lock, or the sync of a folder.
UNSUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class IntegrityError(Exception):
    """A file on disk differs from the one that was written."""


class OverrideError(Exception):
    """The key of an override is unknown, or its value cannot be read."""


def begin_command() -> None:
    """Prepare the standard streams and Ctrl-C. Called before a command imports anything slow."""
    # A stream may be closed. A file that is opened later would get its number, and with it what
    # libraries write to the stream.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8"))

    # Characters that a stream's encoding lacks are written as \uXXXX.
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # a notebook's streams have no encoding
            stream.reconfigure(errors="backslashreplace")

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_quietly)


def end_quietly(number: int, frame: FrameType | None) -> NoReturn:
    """End the process on Ctrl-C until report_errors() does: there is nothing to save yet."""
    os._exit(INTERRUPTED)


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
    with suppress(OSError):
        flush(sys.stderr)
    raise SystemExit(code)


def flush(stream: IO | None) -> None:
    """Write what a stream has buffered; discard it if that fails.

    Otherwise Python would try again at the end, and exit with a code of its own. Raises OSError,
    except for a reader that has ended, such as `head`.
    """
    if stream is None:
        return
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


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
def naming(path: os.PathLike | str) -> Iterator[None]:
    """Let an OSError raised inside name a file, unless it names one already.

    Python names the file that cannot be opened, but not the one that cannot be read or written.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def user_input() -> Iterator[None]:
    """Report a ValueError or OSError raised inside as bad input, with exit code 2.

    Only for checking configs and opening data: elsewhere such an error is a bug.
    """
    try:
        yield
    except BrokenPipeError:  # of standard output
        raise
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        source = error.filename
        if source is None:
            is_remote = isinstance(error, (ConnectionError, TimeoutError, socket.gaierror))
            source = "the network" if is_remote else "the files of this command"
        problem = f"{error.strerror or error} ({source}). fix: check {source}"
        exit_with(INPUT, problem, rank0_only=True)
    except ValueError as error:
        exit_with(INPUT, *str(error).splitlines(), rank0_only=True)


@contextmanager
def report_errors() -> Iterator[None]:
    """Report problems that are expected at any time in a command. Wraps the whole command."""
    if signal.getsignal(signal.SIGINT) is end_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        with naming("standard output"):
            flush(sys.stdout)
    except IntegrityError as error:
        exit_with(INTEGRITY, error)
    except OverrideError as error:
        exit_with(OVERRIDE, error)
    except KeyboardInterrupt:
        exit_with(INTERRUPTED, "interrupted. fix: call it again")
    except BrokenPipeError:  # the reader of our output has ended
        flush(sys.stdout)
        raise SystemExit(0) from None
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        place = error.filename or "standard output, or a file of this command"
        exit_with(STORAGE, f"{error.strerror} ({place}). fix: make room, or another place")
    finally:
        with suppress(OSError):
            flush(sys.stderr)
