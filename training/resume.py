"""What a run that is resumed must have as it was, and what is told where it changed."""

import platform
from pathlib import Path

import numpy as np
import torch

from common.config import flatten
from common.hardware import processor
from training.distributed import DistEnv

# What a run that goes on must have as it was: with another it would be another run. All else may change, and is said.
FIXED_ON_RESUME = (
    "model.",
    "optimizer._target_",
    "text",
    "seed",
    "context",
    "batch_tokens",
    "document_mask",
)
IGNORED_ON_RESUME = (
    "name",
    "run_dir",
    "resume",
    "attention.",
    "init_from",
    "wandb",
)  # attention: the model has it


def changes(then: dict, now: dict) -> dict[str, str]:
    """What is not as it was: 'then, now' by the key's path."""
    then, now = dict(flatten(then)), dict(flatten(now))
    keys = [
        key
        for key in {**then, **now}
        if then.get(key) != now.get(key) and not key.startswith(IGNORED_ON_RESUME)
    ]
    return {key: f"{key} (then {then.get(key)}, now {now.get(key)})" for key in keys}


def check_resumed(then: dict, now: dict, where: Path) -> str:
    """What changed that may change, as a text for its owner. Raises ValueError for what may not."""
    found = changes(then, now)
    if fixed := [text for key, text in found.items() if key.startswith(FIXED_ON_RESUME)]:
        fix = "the old values to resume it, or another run_dir, with init_from= to begin with its weights"
        if then.get("init_from") != now.get("init_from"):
            fix = f"init_from={then.get('init_from')} and the other words of then"
        raise ValueError(f"{where} was made with another {', '.join(fixed)}. fix: {fix}")
    return f"changed since {where.name}: {', '.join(found.values())}" if found else ""


def fingerprint(
    ranks: DistEnv, precision: torch.dtype, compiled: bool, micro: int
) -> dict[str, str | int | bool]:
    """What decides on the last bits of a result, beside the program."""
    cuda = ranks.device.type == "cuda"
    chip = (
        torch.cuda.get_device_name(ranks.device)
        if cuda
        else f"{processor()} {torch.backends.cpu.get_cpu_capability()}"
    )
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": f"{ranks.device.type} {platform.machine()} {chip}",
        "threads": torch.get_num_threads(),
        "processes": ranks.world_size,
        "precision": str(precision).removeprefix("torch."),
        "compiled": compiled,
        "micro_batch": micro,
    }
