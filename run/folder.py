"""The folder of a run: which one it is, and the lock that keeps other processes out of it."""

import fcntl
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO

from run import errors
from run.checkpoint import load_config
from run.distributed import DistEnv
from run.errors import IntegrityError
from run.settings import Settings, flatten

RUNS = Path("runs")

# With another value of these it would be another run. All else may change, and is reported. `text`
# is the SHA-256 of the text.
FIXED_ON_RESUME = (
    "model.",
    "optimizer._target_",
    "text",
    "seed",
    "context",
    "batch_tokens",
    "document_mask",
)
# What does not change a result.
IGNORED_ON_RESUME = ("name", "run_dir", "resume", "wandb")


@contextmanager
def open_run_dir(settings: Settings, ranks: DistEnv, text_sha256: str = "") -> Iterator[Path]:
    """The folder of a run on a text of this SHA-256, made and locked by rank 0 for all ranks.

    It is `run_dir`, else the next free runs/name, or with resume=true the newest of these that has
    what must not change on resume as it is now, and where none has, the newest. Ends
    with exit code 2 for a folder that is in use, holds something else, holds a run that is not to
    be resumed, or is to be resumed and does not exist; with 74 where no folder can be made.
    """
    with ExitStack() as stack:
        yield ranks.on_rank0(lambda: acquire(settings, text_sha256, stack))


def acquire(settings: Settings, text_sha256: str, stack: ExitStack) -> Path:
    """The folder of a run, locked until `stack` is closed."""
    with errors.user_input():
        try:
            run = choose_run_dir(settings, text_sha256)
            stack.enter_context(lock_folder(run))
        except OSError as error:
            errors.exit_with(
                errors.STORAGE,
                f"no run can be kept there ({error.filename}: {error.strerror}). "
                "fix: another run_dir, or room",
            )
        if has_checkpoint(run) and not settings.resume:
            raise ValueError(
                f"the folder holds a run (run_dir={run}). fix: resume=true, or another run_dir"
            )
    return run


def choose_run_dir(settings: Settings, text_sha256: str) -> Path:
    """The folder of a run, which exists. Raises ValueError where it cannot be this run's."""
    # A folder that the user names.
    if settings.run_dir is not None:
        run = Path(settings.run_dir).expanduser()
        check_run_dir(run, settings.resume)
        run.mkdir(parents=True, exist_ok=True)
        return run

    # One that goes by the name of the run: the newest, of those that can be resumed if there are.
    if not settings.resume:
        return create_run_dir(settings.name)
    runs = []
    for run in RUNS.glob("*"):
        if re.fullmatch(rf"{re.escape(settings.name)}(-\d+)?", run.name) and has_checkpoint(run):
            runs.append(run)
    now = settings.model_dump() | {"text": text_sha256}
    # Of two numbers, the longer one is greater.
    runs.sort(key=lambda run: (is_same_run(run, now), len(run.name), run.name))
    return runs.pop() if runs else create_run_dir(settings.name)


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


def is_same_run(run: Path, now: dict) -> bool:
    """Whether the newest checkpoint of a run can be resumed with the config `now`."""
    newest = max(run.glob("checkpoints/step-*"))
    with suppress(IntegrityError):
        _, refused = changes_since(load_config(newest), now)
        return not refused
    return False


def changes_since(then: dict, now: dict) -> tuple[list[str], list[str]]:
    """What differs between two configs of a run, and which of it must not on resume."""
    then = dict(flatten(then))
    now = dict(flatten(now))
    changed = []
    refused = []
    for key in then | now:
        # An option that is newer than the run is no change as long as it is off.
        differs = (then.get(key) or None) != (now.get(key) or None)
        if differs and not key.startswith(IGNORED_ON_RESUME):
            change = f"{key} (then {then.get(key)}, now {now.get(key)})"
            changed.append(change)
            if key.startswith(FIXED_ON_RESUME):
                refused.append(change)
    return changed, refused


def has_checkpoint(run: Path) -> bool:
    return any(run.glob("checkpoints/step-*"))


def create_run_dir(name: str) -> Path:
    """Make the first of runs/name, runs/name-2 and so on that is not there."""
    RUNS.mkdir(exist_ok=True)
    for number in count(1):
        run = RUNS / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            run.mkdir()
            return run


def lock_folder(run: Path) -> IO:
    """The open lock of a folder, until it is closed or the process ends.

    Raises ValueError where another process has it.
    """
    lock = (run / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(
            f"another process trains in the folder (run_dir={run}). fix: wait, or another run_dir"
        ) from None
    return lock
