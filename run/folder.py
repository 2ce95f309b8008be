"""The folder of a run: which one it is, and the lock that keeps other processes out of it."""

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import IO

from run import errors
from run.distributed import DistEnv
from run.sealed import flock

RUNS = Path("runs")


@contextmanager
def open_run_dir(settings: dict, ranks: DistEnv, is_sweep: bool = False) -> Iterator[Path]:
    """The folder of a run, made and locked by rank 0 for all ranks.

    It is `run_dir`, else the next free runs/name, or with resume=true the newest of these. Ends
    with exit code 2 for a folder that is in use, holds something else, holds a run that is not to
    be resumed, or is to be resumed and does not exist; with 74 where no folder can be made.
    """
    with ExitStack() as stack:
        yield ranks.on_rank0(lambda: acquire(settings, is_sweep, stack))


def acquire(settings: dict, is_sweep: bool, stack: ExitStack) -> Path:
    """The folder of a run, locked until `stack` is closed."""
    with errors.user_input():
        try:
            run, lock = resolve_run_dir(settings, is_sweep)
        except OSError as error:
            errors.exit_with(
                errors.STORAGE,
                f"no run can be kept there ({error.filename}: {error.strerror}). "
                "fix: another run_dir, or room",
            )
        stack.enter_context(lock)
        if has_checkpoint(run) and not settings["resume"]:
            raise ValueError(
                f"the folder holds a run (run_dir={run}). fix: resume=true, or another run_dir"
            )
    return run


def resolve_run_dir(settings: dict, is_sweep: bool) -> tuple[Path, IO]:
    """The folder of a run and its open lock. Raises ValueError where it cannot be this run's."""
    # A folder that the user names.
    if settings["run_dir"] is not None:
        run = Path(settings["run_dir"]).expanduser()
        check_run_dir(run, settings["resume"])
        run.mkdir(parents=True, exist_ok=True)
        return run, lock_folder(run)

    # One that goes by the name of the run.
    run = newest_run(settings["name"]) if settings["resume"] else None
    if run is None:
        return create_run_dir(settings["name"])
    if is_sweep:
        raise ValueError(
            f"a sweep cannot tell its runs of one name apart (resume=true, {run} is there). "
            "fix: python -m tools.compare, which resumes its runs"
        )
    return run, lock_folder(run)


def check_run_dir(run: Path, resume: bool) -> None:
    """Raises ValueError for a folder of other files, and for one that cannot be resumed."""
    if resume and not run.exists():
        raise ValueError(
            f"there is nothing to resume (run_dir={run} does not exist). "
            "fix: the folder of a run, or leave resume out to begin one there"
        )
    names = {path.name for path in run.glob("*")}
    if names and names.isdisjoint({".lock", "checkpoints"}):
        raise ValueError(f"the folder holds other files (run_dir={run}). fix: another run_dir")


def newest_run(name: str) -> Path | None:
    """The newest of runs/name, runs/name-2 and so on, preferring those with a checkpoint."""
    runs = {}
    for run in RUNS.glob(f"{name}*"):
        # glob would take runs/name-of-another, too
        match = re.fullmatch(rf"{re.escape(name)}(-(\d+))?", run.name)
        if match is not None:
            runs[run] = int(match[2] or 1)
    saved = [run for run in runs if has_checkpoint(run)]
    return max(saved or runs, key=runs.get, default=None)


def has_checkpoint(run: Path) -> bool:
    return any(run.glob("checkpoints/step-*"))


def create_run_dir(name: str) -> tuple[Path, IO]:
    """The first of runs/name, runs/name-2 and so on that is free, and its open lock.

    A folder with nothing but a lock is of a run that ended before it began: it is used again.
    """
    for number in count(1):
        run = RUNS / (name if number == 1 else f"{name}-{number}")
        run.mkdir(parents=True, exist_ok=True)
        if not is_empty(run):
            continue
        try:
            lock = lock_folder(run)
        except ValueError:  # in use
            continue
        if is_empty(run):
            return run, lock
        lock.close()  # another process has used it in between


def is_empty(run: Path) -> bool:
    """Whether a folder holds nothing but a lock."""
    return all(path.name == ".lock" for path in run.iterdir())


def lock_folder(run: Path) -> IO:
    """The open lock of a folder. Raises ValueError where another process has it."""
    lock = (run / ".lock").open("a+")
    try:
        flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            lock.seek(0)
            owner = lock.read() or "another process"
        raise ValueError(
            f"the folder is in use (run_dir={run}: {owner}). fix: wait, or another run_dir"
        ) from None

    # Record the owner for whoever finds the folder locked.
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%F %T}")
    lock.flush()
    return lock
