"""The folder of a run: which one it is, and that nobody else trains in it."""

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

from omegaconf import OmegaConf
from yaml import YAMLError

from common import errors
from common.atomic_dir import flock
from training.distributed import DistEnv
from training.resume import changes


@contextmanager
def open_run_dir(config: dict, ranks: DistEnv, sweeping: bool = False) -> Iterator[Path]:
    """run_dir, or the next free runs/name, or when it is to go on the newest of those with the same words, or at all.

    Locked for all ranks. One of a sweep never takes up a run that has other words. Ends with exit code 2 for a folder
    that is in use, holds something else, or a run already and is not to be resumed; and for a run_dir that is to be
    resumed and does not exist.
    """
    with ExitStack() as held:
        yield ranks.on_rank0(lambda: acquire(config, sweeping, held))


def acquire(config: dict, sweeping: bool, held: ExitStack) -> Path:
    with errors.user_input():
        try:
            run = resolve_run_dir(config, sweeping)
            if run is None:
                run, lock = new_folder(config["name"])
            else:
                if config["resume"] and config["run_dir"] is not None and not run.exists():
                    fix = "the folder of a run, or leave resume out to begin one there"
                    raise ValueError(
                        f"there is nothing to resume (run_dir={run} does not exist). fix: {fix}"
                    )
                there = {path.name for path in run.iterdir()} if run.is_dir() else set()
                if there and not {".lock", "checkpoints"} & there:
                    raise ValueError(
                        f"the folder holds other files (run_dir={run}). fix: another run_dir"
                    )
                run.mkdir(parents=True, exist_ok=True)
                lock = locked(run)
            held.enter_context(lock)
        except OSError as error:
            problem = f"no run can be kept there ({error.filename}: {error.strerror})"
            errors.exit_with(errors.STORAGE, f"{problem}. fix: another run_dir, or room")
        if list(run.glob("checkpoints/step-*")) and not config["resume"]:
            raise ValueError(
                f"the folder holds a run (run_dir={run}). fix: resume=true, or another run_dir"
            )
    return run


def resolve_run_dir(config: dict, sweeping: bool) -> Path | None:
    """The folder that is asked for; None where that is a new one in runs/."""
    if config["run_dir"] is not None:
        return Path(config["run_dir"]).expanduser()
    name = config["name"]
    taken = {
        run.name: run
        for run in Path("runs").glob(f"{name}*")
        if re.fullmatch(rf"{re.escape(name)}(-\d+)?", run.name)
    }
    if config["resume"] and taken:
        saved = [run for run in taken.values() if list(run.glob("checkpoints/step-*"))]
        alike = [run for run in taken.values() if same_words(run, config)]
        if among := alike or ([] if sweeping else saved or taken.values()):
            return max(among, key=lambda run: int(run.name[len(name) + 1 :] or 1))
    return None


def new_folder(name: str) -> tuple[Path, IO]:
    """The first of runs/name, runs/name-2 and so on that is not in use, and its open lock.

    A folder with nothing but a lock is of a run that ended before it began: it is taken again.
    """
    for number in count(1):
        run = Path("runs", name if number == 1 else f"{name}-{number}")
        run.mkdir(parents=True, exist_ok=True)
        if {path.name for path in run.iterdir()} - {".lock"}:
            continue
        try:
            lock = locked(run)
        except ValueError:  # in use
            continue
        if {path.name for path in run.iterdir()} == {".lock"}:
            return run, lock
        lock.close()  # another process used it in between


def same_words(run: Path, config: dict) -> bool:
    """Whether it was begun with these settings, how long and how often it looks apart."""
    try:
        changed = changes(OmegaConf.to_container(OmegaConf.load(run / "config.yaml")), config)
    except (OSError, ValueError, YAMLError):
        return False
    return not [
        key for key in changed if key not in ("steps", "max_minutes") and not key.endswith("_every")
    ]


def locked(run: Path) -> IO:
    """Its open lock. Raises ValueError where another process has it."""
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
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%F %T}")
    lock.flush()
    return lock
