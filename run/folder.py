"""The folder of a run: how it is chosen, and the lock that excludes other processes."""

import os
import shlex
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from run import errors, sealed
from run.checkpoint import STEPS, load_config
from run.distributed import DistEnv
from run.errors import IntegrityError
from run.progress import say, warn_once
from run.settings import Settings, as_typed, flatten

RUNS = Path("runs")

# A run cannot be resumed with different values for these keys. All other keys may change, and the
# changes are reported. `text` is the SHA-256 of the text, and `row_order` is the version of the
# order in which its rows are read.
FIXED_ON_RESUME = (
    "model.",
    "optimizer._target_",
    "text",
    "row_order",
    "seed",
    "context",
    "batch_tokens",
    "document_mask",
)
# Files that a run writes before its first step.
FIRST_FILES = (".lock", "config.yaml", "metrics.jsonl", "samples.txt")
# Keys that do not affect any result, so changes to them are not reported.
IGNORED_ON_RESUME = ("name", "run_dir", "resume", "wandb", "profile", "overrides")


@contextmanager
def open_run_dir(settings: Settings, ranks: DistEnv) -> Iterator[Path]:
    """Create and lock the folder of a run on rank 0, and yield it on all ranks.

    The folder is `run_dir`, or else the next free runs/name.

    On exit, a new folder is removed if the run has not logged any metrics yet.

    Exits with code 2 if the folder is in use or has other files, if it has a run but resume=false,
    or if it does not exist but resume=true. Exits with code 74 if it cannot be created.
    """
    run, is_new = ranks.on_rank0(choose_run_dir, settings)
    # Only rank 0 acquires the lock. The system releases it if the process is killed; a soft lock,
    # which relies on the existence of a file, would remain.
    lock = FileLock(run / ".lock", blocking=False, fallback_to_soft=False)
    try:
        ranks.on_rank0(lock_run_dir, run, lock, settings.resume)
        yield run
    finally:
        if is_new and lock.is_locked:
            remove_if_unused(run)
        lock.release()


def check_before_text(settings: Settings) -> None:
    """Check a run's folder before preparing the text; report if there is no run to resume.

    Raises ValueError if `run_dir` cannot be used for training, or is missing with resume=true.
    """
    if settings.run_dir is not None:
        run = Path(os.path.expanduser(settings.run_dir))
        check_run_dir(run, settings.resume)
        if settings.resume and not has_checkpoint(run):
            say(f"nothing to resume: {run} has no checkpoint. Starting a new run there")
    elif settings.resume:
        saved = [*RUNS.glob(f"*/checkpoints/{STEPS}")]
        newest = max(saved, key=os.path.getmtime).parents[1] if saved else RUNS / "NAME"
        raise ValueError(f"resume=true needs the folder of the run. fix: run_dir={newest}")


def choose_run_dir(settings: Settings) -> tuple[Path, bool]:
    """Choose a run's folder, and create it if missing; return the folder and whether it is new."""
    with report_folder_errors():
        if settings.run_dir is not None:
            run = Path(os.path.expanduser(settings.run_dir))
            check_run_dir(run, settings.resume)
            is_new = not run.exists()
            run.mkdir(parents=True, exist_ok=True)
            return run, is_new
        return create_run_dir(settings.name), True


def remove_if_unused(run: Path) -> None:
    """Remove a folder that contains only FIRST_FILES, and no metrics yet."""
    names = {path.name for path in run.glob("*")}
    metrics = run / "metrics.jsonl"
    has_metrics = metrics.exists() and metrics.stat().st_size > 0
    if names <= set(FIRST_FILES) and not has_metrics:
        shutil.rmtree(run, ignore_errors=True)


def lock_run_dir(run: Path, lock: FileLock, resume: bool) -> None:
    """Acquire the lock of a folder; unless `resume`, check that the folder has no run."""
    with report_folder_errors():
        try:
            if not sealed.acquire(lock):
                warn_once(
                    f"the file system of {run} does not support locks: do not start two runs in "
                    "the same folder"
                )
        except Timeout:
            raise ValueError(
                f"another process is training in this folder (run_dir={run}). fix: wait, or "
                "choose a different run_dir"
            ) from None
        check_run_dir(run, resume)


@contextmanager
def report_folder_errors() -> Iterator[None]:
    """Exit with code 2 for a ValueError raised inside, and with code 74 for an OSError."""
    with errors.user_input():
        try:
            yield
        except OSError as error:
            errors.exit_with(
                errors.STORAGE,
                f"cannot write to the run folder ({error.filename or ''}: {error.strerror}). fix: "
                "choose a different run_dir, or free disk space",
            )


def add_saved_overrides(overrides: list[str]) -> list[str]:
    """Prepend a run's saved overrides to `overrides`, which include `run_dir=RUN resume=true`.

    Overrides that the user adds replace saved overrides of the same key or group. Returns
    `overrides` unchanged if there is no run to resume.
    """
    given = {}
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
        given[key] = value.strip("\"'")
    if given.get("resume", "").lower() != "true" or given.get("run_dir", "null") == "null":
        return overrides
    run = Path(os.path.expanduser(given["run_dir"]))
    if not has_checkpoint(run):
        return overrides
    with suppress(IntegrityError):  # reported when the run is restored
        saved = newest_config(run).get("overrides", [])
        kept = [
            word for word in saved if not is_replaced(word.lstrip("+~").partition("=")[0], given)
        ]
        return kept + overrides
    return overrides


def is_replaced(key: str, given: Collection[str]) -> bool:
    """Return whether `given` has the key or its group, such as schedule for schedule.floor."""
    return key in given or key.partition(".")[0] in given


def resume_command(run: Path) -> str:
    """Return the command that resumes a run, as shown to the user."""
    program = "torchrun ... train.py" if "RANK" in os.environ else "python train.py"
    return f"{program} {shlex.quote(f'run_dir={run}')} resume=true"


def check_run_dir(run: Path, resume: bool) -> None:
    """Raise ValueError if a folder has other files, or if it has a run and `resume` is false.

    With `resume`, the folder must exist.
    """
    if resume and not run.exists():
        raise ValueError(
            f"nothing to resume (run_dir={run} does not exist). fix: set run_dir to an existing "
            "run, or leave resume out to start a run there"
        )
    names = {path.name for path in run.glob("*")}
    if names and names.isdisjoint({".lock", "checkpoints"}):
        raise ValueError(
            f"the folder contains files but no run (run_dir={run}). fix: choose a different run_dir"
        )
    if has_checkpoint(run) and not resume:
        raise ValueError(
            f"the folder already contains a run (run_dir={run}). fix: resume=true, or choose a "
            "different run_dir"
        )


def newest_config(run: Path) -> dict:
    """Return the config in a run's newest checkpoint. Raises IntegrityError if it is damaged."""
    return load_config(max(run.glob(f"checkpoints/{STEPS}")))


def changes_since(then: dict, now: dict) -> tuple[list[str], list[str]]:
    """List the changes between two configs of a run, and the changes that prevent resuming it."""
    then = dict(flatten(then))
    now = dict(flatten(now))
    changed = []
    refused = []
    for key in then | now:
        # A missing key equals a key that is off (null, false, 0), so an option that was added to
        # the program after the run began is not a change while it is off.
        differs = (then.get(key) or None) != (now.get(key) or None)
        if differs and not key.startswith(IGNORED_ON_RESUME):
            values = (as_typed(then.get(key)), as_typed(now.get(key)))
            change = f"{key} (was {values[0]}, now {values[1]})"
            changed.append(change)
            if key.startswith(FIXED_ON_RESUME):
                refused.append(change)
    return changed, refused


def has_checkpoint(run: Path) -> bool:
    return any(run.glob(f"checkpoints/{STEPS}"))


def create_run_dir(name: str) -> Path:
    """Create the first folder of runs/name, runs/name-2 and so on that does not exist."""
    RUNS.mkdir(exist_ok=True)
    run = RUNS / name
    for number in count(2):
        # Another process may create it at the same time, so mkdir() decides whether it is new.
        with suppress(FileExistsError):
            run.mkdir()
            return run
        run = RUNS / f"{name}-{number}"
