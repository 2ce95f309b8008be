"""Exit codes, and the one-line messages on standard error for expected problems.

A bug is not an expected problem: it shows a traceback.
"""

import errno
import os
import re
import select
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from time import sleep
from types import FrameType
from typing import IO, NoReturn

# Exit codes.
BUG = 1
OVERRIDE = 1  # an unknown key, or a value that cannot be parsed
INPUT = 2
INTEGRITY = 3
DIVERGED = 4
STORAGE = 74
PREEMPTED = 75
INTERRUPTED = 130

TIME_TO_REPORT = 10.0  # seconds for which other ranks wait until local rank 0 prints a problem

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
DISCONNECTED = {errno.ESTALE, errno.ENOTCONN}  # errors of a network disk that has disappeared
# Errors of a file system that does not support locking a file or syncing a folder.
UNSUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class IntegrityError(Exception):
    """A file on disk differs from the file that was written."""


class HardExit(SystemExit):
    """Ends the command after all cleanup, but without waiting for threads; see `report_errors`."""


class OverrideError(Exception):
    """The key of an override is unknown, or its value cannot be parsed."""


def begin_command() -> None:
    """Prepare the standard streams and Ctrl-C. Call this before slow imports."""
    # A stream may be closed. The next file that is opened would get its file descriptor, and would
    # receive the text that libraries write to the stream.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8"))

    # Characters missing from a stream's encoding are written as \uXXXX.
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # a notebook's streams have no encoding
            stream.reconfigure(errors="backslashreplace")

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_quietly)


def end_quietly(number: int, frame: FrameType | None) -> NoReturn:
    """Exit on Ctrl-C until report_errors() handles it, because there is nothing to save yet."""
    os._exit(INTERRUPTED)


def exit_with(code: int, *problems: object, once_per_machine: bool = False) -> NoReturn:
    """Print a line for each problem, "error: what (values). fix: how", and raise SystemExit(code).

    Set `once_per_machine` for problems that occur on every rank of a machine, so that only local
    rank 0 prints the lines. The other ranks wait up to TIME_TO_REPORT for it to exit.
    """
    assert code != 0
    if once_per_machine and os.environ.get("LOCAL_RANK", "0") != "0":
        wait_for_local_rank0()
    else:
        for problem in problems:
            line = " ".join(str(problem).split())
            if "fix: " not in line:
                line += ". fix: --help lists all options"
            with suppress(OSError):  # standard error may be closed
                start_line()
                print("error:", line, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            flush(stream)
    raise SystemExit(code)


def wait_for_local_rank0() -> None:
    """Wait until local rank 0 has had time to print the problem.

    torchrun ends all ranks as soon as one exits, so the line could be lost. When local rank 0
    exits, torchrun ends this rank with SIGTERM.
    """
    with suppress(ValueError):  # only the main thread can change handlers
        # The handler of `Signals` would print a second message.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sleep(TIME_TO_REPORT)


def flush(stream: IO | None) -> None:
    """Flush a stream; discard its buffer if that fails.

    If the buffer were kept, Python would flush again at exit, and change the exit code. If flushing
    fails, raises OSError unless the reader, such as `head`, has exited.
    """
    if stream is None or stream.closed:
        return
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


def is_end_of_reader(error: OSError) -> bool:
    """Return whether an error means that the reader of standard output, such as `head`, has exited.

    Other pipes can also break, such as a pipe to a killed process or to a server.
    """
    if not isinstance(error, BrokenPipeError) or sys.stdout is None:
        return False
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), select.POLLOUT)
    except (OSError, ValueError, AttributeError):  # not a file, as in a notebook
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def is_rank0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def without_fix(problem: object) -> str:
    """Return the description of a problem, without its fix."""
    return str(problem).partition(". fix: ")[0]


def suggest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word closest to a mistyped word, or None if none is close.

    Words are compared by their last part: lr suggests optimizer.lr, and gqq suggests attention=gqa.
    If several known words have the same last part, the first one is suggested. A word is also close
    if it is an abbreviation, such as doc_mask, or within one edit per four letters; one edit is
    always allowed.
    """
    typed = last_part(word).lower()
    by_last_part = {}
    for name in known:
        by_last_part.setdefault(last_part(name), name)
    if typed in by_last_part:
        return by_last_part[typed]
    for name in by_last_part:
        if abbreviates(typed, name):
            return by_last_part[name]
    distances = {name: edit_distance(typed, name) for name in by_last_part}
    closest = min(distances, key=distances.get, default=None)
    if closest is None or distances[closest] > max(1, len(typed) // 4):
        return None
    return by_last_part[closest]


def abbreviates(short: str, word: str) -> bool:
    """Return whether each part of `short`, between underscores, is a prefix of a part of `word`."""
    parts = short.split("_")
    whole_parts = word.split("_")
    if len(parts) != len(whole_parts):
        return False
    pairs = zip(parts, whole_parts, strict=True)
    return all(len(part) >= 3 and whole.startswith(part) for part, whole in pairs)


def edit_distance(a: str, b: str) -> int:
    """Return the optimal string alignment distance: the smallest number of insertions, deletions,
    replacements and swaps of adjacent letters that turns a into b.
    """
    # A row holds the distances from a prefix of a to all prefixes of b.
    earlier = []
    previous = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            distance = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (letter != other))
            is_swap = i > 1 and j > 1 and a[i - 2 : i] == b[j - 1] + b[j - 2]
            if is_swap:
                distance = min(distance, earlier[j - 2] + 1)
            row.append(distance)
        earlier = previous
        previous = row
    return previous[-1]


def as_typed(value: object) -> str:
    """Return a config value as the user would type it: null for None, true for True."""
    names = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return names[value]
    if isinstance(value, list):
        return f"[{','.join(as_typed(item) for item in value)}]"
    return str(value)


def shown(value: object) -> str:
    """Return a value as messages show it: as the user would type it, with text in quotes."""
    return repr(value) if isinstance(value, str) else as_typed(value)


def last_part(word: str) -> str:
    """Return the part of a word after its last dot or equals sign."""
    return re.split("[.=]", word)[-1]


def start_line() -> None:
    """On a terminal, clear the current line, which may show a progress bar."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)


@contextmanager
def naming(path: os.PathLike | str) -> Iterator[None]:
    """Add a file's name to an OSError raised inside, unless the error already names a file.

    Python names a file that cannot be opened, but not a file that cannot be read or written.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def user_input() -> Iterator[None]:
    """Report a ValueError or OSError raised inside as invalid input, with exit code 2.

    An OverrideError has its own exit code. Use this only to check configs and open data, because
    elsewhere, such an error is a bug.
    """
    try:
        yield
    except OverrideError as error:
        exit_with(OVERRIDE, error, once_per_machine=True)
    except OSError as error:
        if error.errno in NO_ROOM or is_end_of_reader(error):
            raise
        source = error.filename
        if source is None:
            is_remote = isinstance(error, (ConnectionError, TimeoutError, socket.gaierror))
            source = "the network" if is_remote else "the input files"
        problem = f"{error.strerror or error} ({source}). fix: check {source}"
        exit_with(INPUT, problem, once_per_machine=True)
    except ValueError as error:
        exit_with(INPUT, *str(error).splitlines(), once_per_machine=True)


@contextmanager
def report_errors() -> Iterator[None]:
    """Report expected problems that can occur at any time in a command. Wraps the whole command."""
    if signal.getsignal(signal.SIGINT) is end_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        with naming("standard output"):
            flush(sys.stdout)
    except HardExit as exit_request:
        flush(sys.stdout)
        flush(sys.stderr)
        os._exit(exit_request.code)
    except IntegrityError as error:
        exit_with(INTEGRITY, error)
    except OverrideError as error:
        exit_with(OVERRIDE, error)
    except KeyboardInterrupt:
        exit_with(INTERRUPTED, "interrupted. fix: run the command again")
    except OSError as error:
        if is_end_of_reader(error):
            flush(sys.stdout)
            raise SystemExit(0) from None
        if error.errno not in NO_ROOM:
            raise
        place = error.filename or "standard output or an output file"
        fix = "free disk space, or write elsewhere"
        if error.errno in DISCONNECTED:
            fix = "check the network disk, then run the command again"
        exit_with(STORAGE, f"{error.strerror} ({place}). fix: {fix}")
    finally:
        with suppress(OSError):
            flush(sys.stderr)
