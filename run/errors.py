"""Exit codes, and the one-line messages on standard error for expected problems.

A bug is not an expected problem: it shows a traceback.
"""

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, NoReturn

# Exit codes.
BUG = 1
OVERRIDE = 1  # an unknown key or preset, or a value that cannot be parsed
INPUT = 2
INTEGRITY = 3
DIVERGED = 4
STORAGE = 74
PREEMPTED = 75
INTERRUPTED = 130

# Errors of a full, read-only or broken disk, or of a network disk that has disappeared.
NO_ROOM = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EIO,
    errno.EFBIG,
    errno.ESTALE,
    errno.ENOTCONN,
}
# Errors of a file system that does not support locking a file or syncing a folder.
UNSUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class IntegrityError(Exception):
    """A file on disk is damaged, or its content is invalid."""


class OverrideError(Exception):
    """The key or preset of an override is unknown, or its value cannot be parsed."""


def is_rank0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def exit_with(code: int, *problems: object) -> NoReturn:
    """Print a line for each problem, "error: what (values). fix: how", and raise SystemExit(code).

    A problem has a fix only if the fix is certain.
    """
    assert code != 0
    clear = "\r\033[K" if sys.stderr.isatty() else ""  # clears a progress bar
    with suppress(OSError):  # the reader of standard error may have exited
        for problem in problems:
            line = " ".join(str(problem).split())
            print(f"{clear}error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def without_fix(problem: object) -> str:
    """Return the description of a problem, without its fix."""
    return str(problem).partition(". fix: ")[0]


@contextmanager
def exit_on_invalid_input() -> Iterator[None]:
    """Report a ValueError or OSError raised inside as invalid input, with exit code 2.

    An OverrideError exits with OVERRIDE, and an OSError with an errno in NO_ROOM is raised again.
    Use this only where input is checked or opened, because elsewhere, such an error is a bug.
    """
    try:
        yield
    except OverrideError as error:
        exit_with(OVERRIDE, error)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        exit_with(INPUT, f"{error.strerror or error} ({error.filename or 'the input'})")
    except ValueError as error:
        exit_with(INPUT, *str(error).splitlines())


@contextmanager
def report_errors() -> Iterator[None]:
    """Report the expected problems that can occur at any time in a command."""
    try:
        yield
        flush(sys.stdout)
    except IntegrityError as error:
        exit_with(INTEGRITY, error)
    except OverrideError as error:
        exit_with(OVERRIDE, error)
    except KeyboardInterrupt:
        exit_with(INTERRUPTED, "interrupted")
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        place = error.filename or "standard output or an output file"
        exit_with(STORAGE, f"{error.strerror} ({place}). fix: free space, or use another disk")
    finally:
        flush_all()


@contextmanager
def hard_exit() -> Iterator[None]:
    """Exit through os._exit, with the exit code that the process would have had.

    An ordinary exit would wait for compiler threads and, under torchrun, for gloo's destructor.
    """
    exit_code = BUG
    try:
        yield
        exit_code = 0
    except SystemExit as exit_request:
        exit_code = exit_request.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        flush_all()
        os._exit(exit_code)


def flush(stream: IO | None) -> None:
    """Flush a stream; if that fails, redirect it to os.devnull and raise OSError.

    Otherwise, the flush at Python's exit would also fail, and change the exit code.
    """
    if stream is None or stream.closed:
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise


def flush_all() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            flush(stream)
