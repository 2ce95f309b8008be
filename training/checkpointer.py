"""Save and restore the state of a run."""

import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from run import checkpoint
from run.distributed import Ranks, shard_like
from run.hardware import processor
from run.progress import print0
from run.settings import as_typed
from training.budget import TimeBudget
from training.environment import Environment
from training.evaluation import Evaluator
from training.logger import Logger
from training.meter import Meter
from training.steps import Progress, end_diverged
from training.trainer import Trainer

# The settings that limit the length of a run. If none has changed, a resumed run keeps its length.
LIMITS = ("steps", "tokens_per_parameter", "max_minutes", "max_epochs")
StateByName = dict[str, dict[str, Any]]  # the state of each parameter, by its name


class SavedMachine(BaseModel):
    """The part of config.json that decides a resumed run's threads, micro-batch and compilation."""

    model_config = ConfigDict(strict=True)

    compiled: bool
    micro_batch: PositiveInt
    threads: PositiveInt
    processes: PositiveInt
    device: str  # the first word is the kind of device

    def is_like(self, ranks: Ranks) -> bool:
        """Whether the kind of device and the number of processes match the saved ones."""
        return self.device.split()[0] == ranks.device.type and self.processes == ranks.world_size


class SavedState(BaseModel):
    """The state of a run, in addition to its weights and its config."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    step: NonNegativeInt
    steps: int | float  # Progress.total_steps
    expected_steps: int | float
    is_fitted: bool  # TimeBudget.is_fitted
    eval_tokens: int | None  # held-out tokens per evaluation; None if not known yet
    seconds: float  # since the run began, excluding the time between its processes
    optimizer: StateByName
    scaler: dict[str, int | float]
    loss_sum: Tensor  # summed over the steps since the last report and over all ranks
    reported_step: NonNegativeInt
    wandb_id: str | None


@dataclass(frozen=True)
class SavedRun:
    """The checkpoint from which a run is resumed, and its config."""

    path: Path
    config: dict
    machine: SavedMachine


def read_saved_run(path: Path) -> SavedRun:
    """Read a checkpoint's config. Raises IntegrityError if it or its `machine` is invalid."""
    config = checkpoint.load_config(path)
    with checkpoint.report_unreadable(path / "config.json"):
        return SavedRun(path, config, SavedMachine.model_validate(config["machine"]))


class Checkpointer:
    """Saves the state of a run's parts to its folder, and restores it."""

    def __init__(
        self,
        env: Environment,
        trainer: Trainer,
        micro_batch_size: int,
        meter: Meter,
        budget: TimeBudget,
        evaluator: Evaluator,
        log: Logger,
    ):
        self.env = env
        self.trainer = trainer
        self.micro_batch_size = micro_batch_size
        self.meter = meter
        self.budget = budget
        self.evaluator = evaluator
        self.log = log

    def save(self, progress: Progress) -> None:
        """Write the step's checkpoint unless it exists. Exits with code 4 if the run diverged."""
        if progress.saved_step == progress.step:
            return
        ranks = self.env.ranks
        self.meter.check_finite(progress)
        with self.env.clock.pause():
            self.meter.share_losses()
            weights = {}
            for name, tensor in self.trainer.model.state_dict().items():
                weights[name] = ranks.gather_to_rank0(tensor)
            state = self.state(progress)
            ranks.on_rank0(self.write, weights, state, progress)
        progress.saved_step = progress.step

    def write(self, weights: dict[str, Tensor], state: SavedState, progress: Progress) -> None:
        """Write a checkpoint. Exits with code 4 if a parameter or optimizer state is not finite."""
        # The update itself may have overflowed, even if loss and gradient were finite.
        parameters = [weights[name] for name, _ in self.trainer.model.named_parameters()]
        for value in tree_leaves([parameters, state.optimizer]):
            if isinstance(value, Tensor) and not value.isfinite().all():
                step = progress.step
                end_diverged(f"step {step}: weights or optimizer state are not finite", progress)
        config = self.env.settings.model_dump() | {
            "machine": fingerprint(self.trainer, self.micro_batch_size),
            **self.env.corpus.identity,
        }
        checkpoint.save(
            self.env.run_dir,
            progress.step,
            weights,
            config,
            self.env.corpus.tokenizer.files,
            dict(state),
        )

    def state(self, progress: Progress) -> SavedState:
        """Collect the state of all parts. All ranks call this together."""
        ranks = self.env.ranks
        # A resumed run must evaluate on the same tokens, even if it is extended.
        if self.budget.is_fitted or progress.is_finished:
            self.evaluator.plan_tokens(progress)
        return SavedState(
            step=progress.step,
            steps=progress.total_steps,
            expected_steps=progress.expected_steps,
            is_fitted=self.budget.is_fitted,
            eval_tokens=progress.eval_tokens,
            seconds=self.env.clock.total(),
            optimizer=optimizer_state(self.trainer.model, self.trainer.optimizers, ranks),
            scaler=self.trainer.scaler.state_dict(),
            loss_sum=self.meter.loss_sum.cpu() * ranks.world_size,
            reported_step=self.meter.reported_step,
            wandb_id=self.log.wandb_id,
        )

    def restore(self, saved: SavedRun, progress: Progress) -> None:
        """Load a checkpoint into all parts, and cut the log after its step."""
        state = self.read_state(saved.path)
        settings = self.env.settings

        # Weights, optimizer and scaler.
        trainer = self.trainer
        checkpoint.load_weights(trainer.model, saved.path)
        load_optimizer_state(trainer.model, trainer.optimizers, state.optimizer)
        if trainer.scaler.is_enabled() and state.scaler:
            trainer.scaler.load_state_dict(state.scaler)

        # Position, length and metrics.
        progress.start_at(state.step)
        if settings.eval_tokens == saved.config["eval_tokens"]:
            progress.eval_tokens = state.eval_tokens
        self.env.clock.add_earlier(state.seconds)
        if all(saved.config[key] == getattr(settings, key) for key in LIMITS):
            progress.total_steps = state.steps
            progress.expected_steps = state.expected_steps
            self.budget.is_fitted = state.is_fitted
        else:
            self.report_rate_change(state, progress)
        self.env.ranks.on_rank0(self.budget.check_time_left, progress)
        self.meter.restore(state.loss_sum, state.reported_step, state.step)
        self.log.wandb_id = state.wandb_id
        self.log.open(state.step)

        print0(f"resuming from step {progress.step}")
        for key, value in fingerprint(trainer, self.micro_batch_size).items():
            if saved.config["machine"].get(key) != value:
                then = as_typed(saved.config["machine"].get(key))
                print0(
                    f"changed: {key} (was {then}, now {as_typed(value)}), which may change rounding"
                )

    def report_rate_change(self, state: SavedState, progress: Progress) -> None:
        """Print how a new run length changes learning rates, if by a factor of 2 or more."""
        if progress.total_steps == math.inf or progress.is_finished:
            return
        schedule, run_factor = self.trainer.schedule, self.trainer.rates.run_factor
        before = schedule(progress.step - 1, state.steps) * run_factor(state.expected_steps)
        now = schedule(progress.step, progress.total_steps) * run_factor(progress.expected_steps)
        if before > 0 and not 0.5 < now / before < 2:
            print0(
                f"changed: learning rates, by a factor of {now / before:.2g}, for the new length"
            )

    def read_state(self, path: Path) -> SavedState:
        """Read the training state of a checkpoint. Raises IntegrityError if it is invalid."""
        content = checkpoint.load_state(path, SavedState.model_fields)
        with checkpoint.report_unreadable(path / "state.pt"):
            state = SavedState.model_validate(content)
            check_optimizer_state(self.trainer.model, state.optimizer)
            if state.loss_sum.shape != self.meter.loss_sum.shape:
                raise ValueError(f"loss_sum has the wrong shape: {[*state.loss_sum.shape]}")
            scaler = self.trainer.scaler.state_dict()
            if scaler and state.scaler and scaler.keys() != state.scaler.keys():
                raise ValueError(f"the gradient scaler's state has wrong keys: {[*state.scaler]}")
        return state


def optimizer_state(model: nn.Module, optimizers: list[Optimizer], ranks: Ranks) -> StateByName:
    """Return each parameter's state, with full tensors on the CPU of rank 0.

    All ranks call this together.
    """
    names = {p: name for name, p in model.named_parameters()}
    state = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                # A parameter that has never had a gradient has no state.
                state[names[p]] = {
                    key: ranks.gather_to_rank0(value) if isinstance(value, Tensor) else value
                    for key, value in optimizer.state.get(p, {}).items()
                }
    return state


def load_optimizer_state(model: nn.Module, optimizers: list[Optimizer], state: StateByName) -> None:
    """Load the result of `optimizer_state` into the optimizers, sharded like the parameters.

    All ranks pass the full state. The config decides options such as the learning rate.
    """
    names = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                for key, value in state.get(names[p], {}).items():
                    if isinstance(value, Tensor):
                        is_sharded = value.shape == p.shape
                        value = shard_like(value, p) if is_sharded else value.to(p.device)
                    optimizer.state[p][key] = value


def check_optimizer_state(model: nn.Module, state: StateByName) -> None:
    """Raise ValueError or RuntimeError if a nonempty state does not match the model's parameters.

    Each tensor of the state must broadcast to its parameter.
    """
    parameters = dict(model.named_parameters())
    different = sorted(parameters.keys() ^ state.keys())
    if state and different:
        raise ValueError(f"the optimizer state does not match the model: {different[:3]}")
    for name, values in state.items():
        shape = parameters[name].shape
        for key, value in values.items():
            if isinstance(value, Tensor) and torch.broadcast_shapes(value.shape, shape) != shape:
                raise ValueError(
                    f"{key} of {name} does not fit the parameter "
                    f"({[*value.shape]}, expected {[*shape]})"
                )


def fingerprint(trainer: Trainer, micro_batch_size: int) -> dict[str, str | int | bool]:
    """Return what affects rounding besides the code and the config, and values chosen for it."""
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
