"""What must stay as it was when a run is resumed, and what may change."""

import platform
from pathlib import Path

import torch

from run import checkpoint, errors, progress
from run.folder import changes_since
from run.hardware import processor
from training.optimizer_state import load_optimizer_state


def restore(trainer, path: Path) -> None:
    """Load a checkpoint into a trainer. Ends with exit code 2 where it is another run's."""
    settings = trainer.settings
    saved = checkpoint.load_config(path)
    with checkpoint.report_unreadable(path / "config.json"):
        bounds = (saved["steps"], saved["max_epochs"])
        machine = saved["machine"]
        if settings.compile == "auto":
            trainer.is_compiled = machine["compiled"]
        # The micro-batch affects rounding.
        micro_batch = machine["micro_batch"]
        rows = trainer.loader.batch_size // trainer.ranks.world_size
        if settings.micro_batch is None and rows % micro_batch == 0:
            trainer.micro_batch_size = micro_batch
    with errors.user_input():
        changes = check_resumed(saved, trainer.saved_config(), path)

    state = checkpoint.load_state(path, trainer.state())
    with checkpoint.report_unreadable(path / "state.pt"):
        load_optimizer_state(trainer.model, trainer.optimizers, state["optimizer"])
        if state["scaler"]:
            trainer.scaler.load_state_dict(state["scaler"])
        trainer.loss_sum.copy_(state["loss_sum"] / trainer.ranks.world_size)
        trainer.clock.started -= state["seconds"]
    checkpoint.load_weights(trainer.model, path)

    # Keep the fitted number of steps, unless another is asked for: other minutes do not change it,
    # since the steps of the schedule are those of the time that was planned.
    is_same = bounds == (settings.steps, settings.max_epochs)
    if is_same:
        trainer.steps = state["steps"]
    if state["is_fitted"] and (is_same or settings.steps is not None):
        trainer.budget = None
    trainer.step = trainer.saved_step = state["step"]
    trainer.first_step = trainer.timed_step = trainer.step  # where this process begins
    trainer.reported_step = state["reported_step"]
    trainer.timed_from = trainer.clock.training()
    trainer.log_state = state["log"]
    progress.say(f"resuming step {trainer.step}\n{changes}".rstrip())


def check_resumed(then: dict, now: dict, path: Path) -> str:
    """What has changed, and may, as a line. Raises ValueError for what may not."""
    changed, refused = changes_since(then, now)
    if refused:
        raise ValueError(
            f"{path} was made with another {', '.join(refused)}. fix: the overrides used then to "
            "resume it; to begin another run, resume=false, and init_from= for its weights"
        )
    return f"changed since {path.name}: {', '.join(changed)}" if changed else ""


def fingerprint(trainer) -> dict[str, str | int | bool]:
    """What determines the last bits of a result, besides the program and its config."""
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
        "micro_batch": trainer.micro_batch_size,
    }
