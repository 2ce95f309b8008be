"""The folder of a run: how it is chosen and locked, and what may change when the run resumes."""

import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from run import checkpoint, errors
from run.compose import MODEL_GROUPS, compose, original_of, size_words
from run.distributed import Ranks
from run.settings import Settings, as_typed, flatten

RUNS = Path("runs")

# Keys and groups of keys that may change when a run is resumed, except optimizer._target_. A change
# of any other key is refused; most of them would change the model, the batches or the loss.
RESUMABLE = (
    "data.path",
    "data.validation",
    "steps",
    "tokens_per_parameter",
    "max_minutes",
    "max_epochs",
    "micro_batch",
    "clip",
    "optimizer",
    "schedule",
    "device",
    "precision",
    "compile",
    "sharded",
    "activation_checkpointing",
    "eval_every",
    "eval_tokens",
    "save_every",
    "sample_every",
    "log_every",
    "profile",
    "wandb",
)
NOT_SETTINGS = ("machine", "text", "row_order")  # other keys of a checkpoint's config


def resume_settings(overrides: list[str], saved: dict, run: Path) -> tuple[Settings, list[str]]:
    """Return the settings of a resumed run, and a line for each key that `overrides` change.

    They are the settings `saved` in its newest checkpoint, with these changes. A key in `overrides`
    may repeat its saved value, so a command can be repeated with resume=true. Raises ValueError for
    a change of a key that is not RESUMABLE.
    """
    # A run that began with `init_from` has the size of that model, and its learning rates are not
    # scaled.
    began = []
    if saved.get("init_from") is not None:
        began = [f"init_from={saved['init_from']}", *size_words(saved["model"])]
    # Only these data presets have paths. data.path may be typed without data=PRESET.
    presets = {"data.sources.Text": "text", "data.pretokenized.Pretokenized": "tokens"}
    preset = presets.get(saved["data"]["_target_"])
    if preset and not any(word.startswith("data=") for word in overrides):
        began.append(f"data={preset}")
    typed = by_name(compose([*began, *overrides]).model_dump())
    then = by_name(saved)
    # `init_from` is saved as a path, even if it was given as the name of a run, which may be gone.
    if then.get("init_from") == str(Path("runs", typed["init_from"] or "")):
        typed["init_from"] = then["init_from"]
    names = [
        key for key in keys_set_by(overrides, then | typed) if key not in ("run_dir", "resume")
    ]
    changes = changes_of(names, then, typed)
    refused = []
    for key in changes:
        is_allowed = key in RESUMABLE or key.partition(".")[0] in RESUMABLE
        if not is_allowed or key == "optimizer._target_":
            refused.append(changes[key])
    if refused:
        raise ValueError(
            f"a resumed run cannot change {', '.join(refused)}. fix: leave this out; or start a "
            "new run, without run_dir and resume, for example from the weights of this run: "
            f"{shlex.quote(f'init_from={run}')}"
        )

    # Set the changed keys; remove those that the typed preset of a group does not have.
    tree = {key: deepcopy(value) for key, value in saved.items() if key not in NOT_SETTINGS}
    for key in changes:
        group, _, option = key.rpartition(".")
        branch = tree
        for name in group.split(".") if group else []:
            branch[name] = branch.get(name) or {}  # optimizer.reference may be null
            branch = branch[name]
        branch.pop(option, None)
        if key in typed:
            branch[option] = typed[key]
    try:
        return Settings(**tree | {"run_dir": str(run), "resume": True}), [*changes.values()]
    except ValidationError as error:
        keys = ", ".join(sorted({str(problem["loc"][0]) for problem in error.errors()}))
        raise ValueError(
            f"{run} was trained by a version of this program that has other settings ({keys}). "
            f"fix: resume it with that version, or start a new run from its weights: "
            f"{shlex.quote(f'init_from={run}')}"
        ) from None


def changes_of(keys: Iterable[str], then: dict, typed: dict) -> dict[str, str]:
    """Return a description of the change of each key whose value differs."""
    changes = {}
    for key in keys:
        was, now = then.get(key), typed.get(key)
        if was != now:
            changes[key] = f"{key} (was {as_typed(was)}, now {as_typed(now)})"
    return changes


def by_name(tree: dict) -> dict[str, object]:
    """Return the values of a config by the names that overrides use, such as attention.kv_heads."""
    values = {}
    for key, value in flatten(tree):
        original = original_of(key)
        if original is None:
            values[key] = value
        elif original.partition(".")[0] in MODEL_GROUPS:
            values[original] = value
    return values


def keys_set_by(overrides: list[str], keys: Iterable[str]) -> list[str]:
    """Return the `keys` that the overrides set by name, by group or by experiment."""
    names = []
    for word in overrides:
        name = word.lstrip("+~").partition("=")[0]
        names.append(name)
        if name == "experiment":
            default = by_name(compose([]).model_dump())
            chosen = by_name(compose([word]).model_dump())
            names += [key for key in default | chosen if default.get(key) != chosen.get(key)]
    return [key for key in keys if any(f"{key}.".startswith(f"{name}.") for name in names)]


def resume_command(run: Path) -> str:
    """Return the command that resumes a run, as shown to the user."""
    program = "torchrun ... train.py" if "RANK" in os.environ else "python train.py"
    return f"{program} {shlex.quote(f'run_dir={run}')} resume=true"


def given_run_dir(settings: Settings) -> Path | None:
    """Return the folder given by `run_dir`; None if runs/name is to be used.

    Raises ValueError if the folder contains files but no run, or a run although resume=false, or if
    resume=true is given without an existing folder.
    """
    if settings.run_dir is None:
        if settings.resume:
            raise ValueError("resume=true needs the folder of the run. fix: run_dir=runs/NAME")
        return None
    run = Path(os.path.expanduser(settings.run_dir))
    if settings.resume and not run.exists():
        raise ValueError(
            f"nothing to resume (run_dir={run} does not exist). fix: set run_dir to an existing "
            "run, or leave resume out to start a run there"
        )
    names = {path.name for path in run.glob("*")}
    if names and names.isdisjoint({".lock", "checkpoints"}):
        raise ValueError(
            f"the folder contains files but no run (run_dir={run}). fix: choose a different run_dir"
        )
    if has_checkpoint(run) and not settings.resume:
        raise ValueError(
            f"the folder already contains a run (run_dir={run}). fix: resume=true, or choose a "
            "different run_dir"
        )
    return run


def has_checkpoint(run: Path) -> bool:
    return any(run.glob(f"checkpoints/{checkpoint.STEPS}"))


@contextmanager
def open_run_dir(settings: Settings, ranks: Ranks, resumed: Path | None = None) -> Iterator[Path]:
    """Create and lock the folder of a run on rank 0, and yield it on all ranks.

    The folder is `run_dir`, or else the next free runs/name. `resumed` is the checkpoint from which
    the run continues. Exits with code 2 if another process uses the folder or its contents do
    not fit the run, and with code 74 if it cannot be written to.
    """
    run = ranks.on_rank0(create_run_dir, settings)
    # Only rank 0 acquires the lock. The system releases it if the process is killed; a soft lock,
    # which relies on the existence of a file, would remain.
    lock = FileLock(run / ".lock", blocking=False, fallback_to_soft=False)
    try:
        ranks.on_rank0(lock_run_dir, run, lock, resumed)
        yield run
    finally:
        lock.release()


@errors.exit_on_invalid_input()
def create_run_dir(settings: Settings) -> Path:
    """Create `run_dir`, or else the first of runs/name, runs/name-2 and so on that is not taken."""
    run = given_run_dir(settings)
    with report_unwritable():
        if run is not None:
            run.mkdir(parents=True, exist_ok=True)
            return run
        RUNS.mkdir(exist_ok=True)
        run = RUNS / settings.name
        for number in count(2):
            # Another process may create it at the same time, so mkdir() decides whether it is new.
            with suppress(FileExistsError):
                run.mkdir()
                return run
            run = RUNS / f"{settings.name}-{number}"


@errors.exit_on_invalid_input()
def lock_run_dir(run: Path, lock: FileLock, resumed: Path | None) -> None:
    """Acquire the lock of a run's folder, and remove what a crash left there."""
    with report_unwritable():
        try:
            checkpoint.acquire(lock)
        except Timeout:
            raise ValueError(
                f"another process is training in this folder (run_dir={run}). fix: wait, or "
                "choose a different run_dir"
            ) from None
    # Another process may have trained there since the settings were read.
    if resumed is None and has_checkpoint(run):
        raise ValueError(
            f"another process has trained in this folder (run_dir={run}). fix: run the command "
            "again with resume=true, or choose a different run_dir"
        )
    checkpoint.remove_leftovers(run / "checkpoints")
    if resumed is not None:
        checkpoint.begin_at(resumed)


@contextmanager
def report_unwritable() -> Iterator[None]:
    """Exit with code 74 for an OSError raised inside."""
    try:
        yield
    except OSError as error:
        errors.exit_with(
            errors.STORAGE,
            f"cannot write to the run folder ({error.filename or ''}: {error.strerror}). fix: "
            "choose a different run_dir, or free disk space",
        )
