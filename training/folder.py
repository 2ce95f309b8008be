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

from data.sealed import hold
from training import errors
from training.distributed import Ranks


@contextmanager
def claimed(config: dict, ranks: Ranks) -> Iterator[Path]:
    """run_dir, or the next free runs/name, or the newest of those when it is to go on; locked for all ranks.

    Ends with exit code 2 for a folder that is in use, or holds a run already and is not to be resumed.
    """
    with ExitStack() as held:
        yield ranks.agreed(lambda: claim(config, held))


def claim(config: dict, held: ExitStack) -> Path:
    with errors.input_problems():
        try:
            run = chosen(config)
            run.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(run))
        except OSError as error:
            problem = f"no run can be kept there ({error.filename}: {error.strerror})"
            errors.fail(errors.STORAGE, f"{problem}. fix: another run_dir, or room")
        if list(run.glob("checkpoints/step-*")) and not config["resume"]:
            raise ValueError(f"the folder holds a run (run_dir={run}). fix: resume=true, or another run_dir")
    return run


def chosen(config: dict) -> Path:
    if config["run_dir"] is not None:
        return Path(config["run_dir"]).expanduser()
    name = config["name"]
    taken = {
        run.name: run for run in Path("runs").glob(f"{name}*") if re.fullmatch(rf"{re.escape(name)}(-\d+)?", run.name)
    }
    if config["resume"] and taken:
        saved = [run for run in taken.values() if list(run.glob("checkpoints/step-*"))]
        return max(saved or taken.values(), key=lambda run: int(run.name[len(name) + 1 :] or 1))
    for number in count(1):
        run = Path("runs", name if number == 1 else f"{name}-{number}")
        try:
            run.mkdir(parents=True)
            return run
        except FileExistsError:
            continue


def locked(run: Path) -> IO:
    """Its open lock. Raises ValueError where another process has it."""
    lock = (run / ".lock").open("a+")
    try:
        hold(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            lock.seek(0)
            owner = lock.read() or "another process"
        raise ValueError(f"the folder is in use (run_dir={run}: {owner}). fix: wait, or another run_dir") from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%F %T}")
    lock.flush()
    return lock


def newest_run(root: Path) -> Path:
    """The run that saved last. Raises ValueError where there is none."""
    saved = sorted(root.glob("*/checkpoints/step-*"), key=lambda path: path.stat().st_mtime_ns)
    if not saved:
        raise ValueError(f"no trained model (in {root}/). fix: python train.py, or --run FOLDER")
    return saved[-1].parents[1]
