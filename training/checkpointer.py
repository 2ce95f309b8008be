"""Save and restore a run, and check for changes that prevent resuming it."""

import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt
from torch import Tensor
from torch.utils._pytree import tree_leaves

from data.corpus import Corpus
from run import checkpoint, errors
from run.distributed import DistEnv
from run.folder import changes_since, resume_command
from run.hardware import processor
from run.progress import say, waiting
from run.settings import Settings
from training.budget import TimeBudget
from training.clock import Clock
from training.evaluation import Evaluator
from training.logger import Logger
from training.meter import Meter
from training.optimizer_state import check_optimizer_state, load_optimizer_state, optimizer_state
from training.steps import Progress, end_diverged
from training.trainer import Trainer


class SavedMachine(BaseModel):
    """The machine properties in config.json, which decide what a resumed run keeps."""

    model_config = ConfigDict(strict=True)

    compiled: bool
    micro_batch: PositiveInt
    threads: PositiveInt
    processes: PositiveInt
    device: str  # the first word is the kind of device

    def is_like(self, ranks: DistEnv) -> bool:
        """Return whether the kind of device and the number of processes match the saved ones."""
        return self.device.split()[0] == ranks.device.type and self.processes == ranks.world_size


class SavedState(BaseModel):
    """The state of a run, in addition to its weights and its config."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    step: NonNegativeInt
    steps: int | float  # Progress.total_steps
    expected_steps: int | float  # Progress.expected_steps
    is_fitted: bool  # whether `steps` is fitted to max_minutes
    seconds: float  # since the run began, excluding the time between its processes
    optimizer: dict[str, dict[str, Any]]  # by parameter name
    scaler: dict[str, int | float]
    eval_tokens: int | None  # held-out tokens per evaluation; None if not known yet
    loss_sum: Tensor  # summed over the steps since the last report and over all ranks
    reported_step: NonNegativeInt
    log: dict[str, int | str | None]  # file sizes to which resuming truncates the logs; wandb id


@dataclass(frozen=True)
class SavedRun:
    """The checkpoint from which a run is resumed, and its config."""

    path: Path
    config: dict
    bound: tuple[str, float] | None  # the result of `given_bound`
    machine: SavedMachine


def read_saved_run(path: Path) -> SavedRun:
    """Read the config of a checkpoint. Raises IntegrityError if train.py did not write it."""
    config = checkpoint.load_config(path)
    with checkpoint.report_unreadable(path / "config.json"):
        return SavedRun(
            path=path,
            config=config,
            bound=given_bound(config),
            machine=SavedMachine.model_validate(config["machine"]),
        )


class Checkpointer:
    """Saves the state of a run's parts to its folder, and restores it."""

    def __init__(
        self,
        settings: Settings,
        overrides: Sequence[str],
        run_dir: Path,
        *,
        corpus: Corpus,
        trainer: Trainer,
        micro_batch_size: int,
        meter: Meter,
        budget: TimeBudget,
        evaluator: Evaluator,
        log: Logger,
        clock: Clock,
    ):
        self.settings = settings
        self.overrides = list(overrides)  # saved for the command that resumes the run
        self.run_dir = run_dir
        self.corpus = corpus
        self.trainer = trainer
        self.ranks = trainer.ranks
        self.meter = meter
        self.budget = budget
        self.evaluator = evaluator
        self.log = log
        self.clock = clock
        self.micro_batch_size = micro_batch_size

    def save(self, progress: Progress) -> None:
        """Write the step's checkpoint unless it exists. Exits with code 4 if the run diverged."""
        if progress.saved_step == progress.step:
            return
        self.meter.check_finite(progress)
        message = "saving a checkpoint (to save less often, raise save_every)"
        with self.clock.pause("save"), waiting(message):
            self.meter.share_losses()
            weights = {}
            for name, tensor in self.trainer.model.state_dict().items():
                weights[name] = self.ranks.gather_to_rank0(tensor)
            state = self.state(progress)
            self.ranks.on_rank0(self.write, weights, state, progress)
        progress.saved_step = progress.step

    def write(self, weights: dict[str, Tensor], state: SavedState, progress: Progress) -> None:
        """Write a checkpoint on rank 0. Exits with code 4 if a value is not finite."""
        # The update itself may have overflowed, even if loss and gradient were finite.
        parameters = [weights[name] for name, _ in self.trainer.model.named_parameters()]
        for value in tree_leaves([parameters, state.optimizer]):
            if isinstance(value, Tensor) and not value.isfinite().all():
                step = progress.step
                end_diverged(f"step {step} made weights or optimizer state non-finite", progress)
        checkpoint.save(
            self.run_dir,
            progress.step,
            weights,
            self.saved_config(),
            self.corpus.tokenizer.files,
            dict(state),
        )

    def state(self, progress: Progress) -> SavedState:
        """Collect the state of all parts. All ranks call this together."""
        # A checkpoint is saved before its step's evaluation, and a resumed run must evaluate on the
        # same tokens. Unless an evaluation has already fixed their number, it is planned once
        # the length of the run is known.
        if progress.is_finished or not self.budget.is_open:
            self.evaluator.plan_tokens(progress)
        return SavedState(
            step=progress.step,
            steps=progress.total_steps,
            expected_steps=progress.expected_steps,
            is_fitted=self.budget.is_fitted,
            seconds=self.clock.total(),
            optimizer=optimizer_state(self.trainer.model, self.trainer.optimizers),
            scaler=self.trainer.scaler.state_dict(),
            eval_tokens=progress.eval_tokens,
            loss_sum=self.meter.loss_sum.cpu() * self.ranks.world_size,
            reported_step=self.meter.reported_step,
            log=self.log.resume_point,
        )

    def saved_config(self) -> dict:
        """Return the settings, the overrides, the identity of the text, and the machine."""
        machine = fingerprint(self.trainer, self.micro_batch_size)
        return self.settings.model_dump() | {
            "overrides": self.overrides,
            "machine": machine,
            **self.corpus.identity,
        }

    def restore(self, saved: SavedRun, progress: Progress) -> None:
        """Load a checkpoint into all parts, and open the log where it ended.

        Exits with code 2 if the checkpoint is from another run.
        """
        with errors.user_input():
            changes = check_resumed(saved.config, self.saved_config(), saved.path)
        state = self.read_state(saved.path)

        # Weights, optimizer and scaler.
        trainer = self.trainer
        checkpoint.load_weights(trainer.model, saved.path)
        load_optimizer_state(trainer.model, trainer.optimizers, state.optimizer)
        if trainer.scaler.is_enabled() and state.scaler:
            trainer.scaler.load_state_dict(state.scaler)

        # Position, metrics and clock.
        progress.start_at(state.step)
        if state.step >= state.steps:
            progress.ended_step = state.step
        if self.settings.eval_tokens is None:
            progress.eval_tokens = state.eval_tokens
        self.clock.add_earlier(state.seconds)
        self.budget.start_timing()
        self.meter.restore(state.loss_sum, state.reported_step, state.step)

        # A fitted number of steps is kept, even if max_minutes changes, unless the user changes the
        # limit by steps, tokens or passes. A run that is not fitted yet obeys the new max_minutes.
        # If the user now gives a number of steps for a fitted run that still has a time limit, the
        # number is exact, so it is not fitted again.
        settings = self.settings
        has_same_bound = saved.bound == given_bound(settings.model_dump())
        gives_steps = settings.steps is not None or settings.tokens_per_parameter is not None
        if state.is_fitted and has_same_bound:
            progress.total_steps = state.steps
        if has_same_bound and (state.is_fitted or self.budget.is_open):
            progress.expected_steps = state.expected_steps
        is_exact = gives_steps and self.budget.has_limit
        if state.is_fitted and (has_same_bound or is_exact):
            self.budget.mark_fitted()
        self.ranks.on_rank0(self.budget.check_time_left, progress)

        # Truncate the log to the checkpoint's step, unless the log of a finished run is complete.
        if progress.is_finished:
            progress.is_complete = self.ranks.on_rank0(self.log.has_end, state.log, state.step)
        if not progress.is_complete:
            self.log.open(state.log)
        say(f"resuming step {progress.step}\n{changes}".rstrip())

    def read_state(self, path: Path) -> SavedState:
        """Read the training state of a checkpoint. Raises IntegrityError if it is invalid."""
        content = checkpoint.load_state(path, SavedState.model_fields)
        with checkpoint.report_unreadable(path / "state.pt"):
            state = SavedState.model_validate(content)
            check_optimizer_state(self.trainer.model, state.optimizer)
            if state.loss_sum.shape != self.meter.loss_sum.shape:
                raise ValueError(f"loss_sum does not fit this run: shape {[*state.loss_sum.shape]}")
            scaler = self.trainer.scaler.state_dict()
            if scaler and state.scaler and scaler.keys() != state.scaler.keys():
                raise ValueError(f"the gradient scaler's state does not match: {[*state.scaler]}")
        return state


def given_bound(config: dict) -> tuple[str, float] | None:
    """Return the key and value of the setting, other than max_minutes, that bounds the steps."""
    for key in ("steps", "tokens_per_parameter", "max_epochs"):
        value = config.get(key)  # the checkpoint may be older than this key
        if value is not None:
            return key, value
    return None


def check_resumed(then: dict, now: dict, path: Path) -> str:
    """Return a line that lists the allowed changes. Raises ValueError for any other change."""
    is_same_text = then.get("text") == now.get("text")
    if is_same_text and then.get("row_order") != now.get("row_order"):
        raise ValueError(
            f"{path} was saved by a version that reads the rows of a text in a different order. "
            "fix: resume with that version; to start a new run from its weights, leave out run_dir "
            f"and resume, and add {shlex.quote(f'init_from={path.parent.parent}')}"
        )
    changed, refused = changes_since(then, now)
    if refused:
        run = path.parent.parent
        other = "for a different model, start a new run without run_dir and resume"
        # Weights can be trained further at another context, but only in the same architecture.
        keys = {change.partition(" ")[0] for change in refused} - {"model.context"}
        if not any(key.startswith("model.") for key in keys):
            other = (
                "to start a new run from its weights, leave out run_dir, resume and overrides of "
                f"the model, and add {shlex.quote(f'init_from={run}')}"
            )
        raise ValueError(
            f"{path} was saved with a different {', '.join(refused)}. fix: {resume_command(run)}, "
            f"which uses the run's overrides; {other}"
        )
    return f"changed since {path.name}: {', '.join(changed)}" if changed else ""


def fingerprint(trainer: Trainer, micro_batch_size: int) -> dict[str, str | int | bool]:
    """Return all values, except program and config, that determine the exact bits of a result."""
    ranks = trainer.ranks
    if ranks.device.type == "cuda":
        chip = torch.cuda.get_device_name(ranks.device)
    else:
        chip = f"{processor()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "torch": torch.__version__,
        "device": f"{ranks.device.type} {platform.machine()} {chip}",
        "threads": torch.get_num_threads(),
        "processes": ranks.world_size,
        "precision": str(trainer.precision).removeprefix("torch."),
        "compiled": trainer.is_compiled,
        "micro_batch": micro_batch_size,
    }
