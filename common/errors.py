"""Expected problems end a command with one line on standard error and an exit code; bugs show their traceback."""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

pass

BUG, INPUT, INTEGRITY, DIVERGED, STORAGE, PREEMPTED, INTERRUPTED = 1, 2, 3, 4, 74, 75, 130
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}


class IntegrityError(Exception):
    """What lies on disk is not what was written there."""


def exit_with(code: int, *problems: object, rank0_only: bool = False) -> NoReturn:
    """Raises SystemExit(code), after a line for each problem: what (values). fix: how. `rank0_only`: every rank finds it."""
    if not rank0_only or os.environ.get("RANK", "0") == "0":
        for problem in problems:
            text = " ".join(str(problem).split())
            with suppress(OSError):
                start_line()
                print(
                    "error:",
                    text if "fix: " in text else f"{text}. fix: change it",
                    file=sys.stderr,
                )
    raise SystemExit(code)


def start_line() -> None:
    """On a terminal, go to an empty line: a progress bar may stand in this one."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)


@contextmanager
def user_input() -> Iterator[None]:
    """Only while a config is checked or data is opened: there, a ValueError is the user's to mend."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        where = f" ({error.filename})" if error.filename else ""
        what = "path" if error.filename or isinstance(error, FileNotFoundError) else "network"
        exit_with(
            INPUT, f"{error.strerror or error}{where}. fix: check the {what}", rank0_only=True
        )
    except ValueError as error:
        exit_with(INPUT, error, rank0_only=True)


@contextmanager
def report_errors(*of_config: type[Exception]) -> Iterator[None]:
    """Around a whole command: problems that may come at any time. `of_config` are those of the config's own library."""
    try:
        yield
    except of_config as error:
        text = re.split(r"\nTo append|\nConfig search path|\nSee https", str(error))[0]
        fix = "configs/ has the keys; a value with spaces or commas is quoted twice: 'key=\"a b\"'"
        if "Could not override 'data.path'" in text:
            fix = "data=text or data=tokens, which have one"
        elif "Could not override" in text:
            fix = "configs/ lists the keys of what is chosen; a kind of layer has its own: attention.kinds.NAME.KEY"
        exit_with(BUG, f"{text.rstrip('.')}. fix: {fix}")
    except IntegrityError as error:
        exit_with(INTEGRITY, error)
    except KeyboardInterrupt:
        exit_with(INTERRUPTED, "interrupted. fix: call it again")
    except BrokenPipeError:  # who read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        exit_with(STORAGE, f"{error.strerror} ({error.filename}). fix: make room, or another place")
