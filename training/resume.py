"""What must stay as it was when a run is resumed, and what may change."""

import platform
from pathlib import Path

import numpy as np
import torch

from run.config import flatten
from run.distributed import DistEnv
from run.hardware import processor

# With another value of these it would be another run. All else may change, and is reported.
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
    "attention.",  # which the model repeats, as it does the next two
    "ffn.",
    "norm.",
    "wandb",
)


def changed_settings(then: dict, now: dict) -> dict[str, str]:
    """Keys whose values differ between two configs -> 'key (then value, now value)'."""
    then = dict(flatten(then))
    now = dict(flatten(now))
    changed = {}
    for key in then | now:
        if then.get(key) != now.get(key) and not key.startswith(IGNORED_ON_RESUME):
            changed[key] = f"{key} (then {then.get(key)}, now {now.get(key)})"
    return changed


def check_resumed(then: dict, now: dict, path: Path) -> str:
    """What has changed, and may, as a line. Raises ValueError for what may not."""
    changed = changed_settings(then, now)
    refused = [text for key, text in changed.items() if key.startswith(FIXED_ON_RESUME)]
    if refused:
        raise ValueError(
            f"{path} was made with another {', '.join(refused)}. fix: the overrides used then to "
            "resume it, or another run_dir, with init_from= to begin with its weights"
        )
    # All else is the user's to decide, and is reported.
    if not changed:
        return ""
    return f"changed since {path.name}: {', '.join(changed.values())}"


def fingerprint(
    ranks: DistEnv, precision: torch.dtype, is_compiled: bool, micro_batch_size: int
) -> dict[str, str | int | bool]:
    """What determines the last bits of a result, besides the program and its config."""
    if ranks.device.type == "cuda":
        chip = torch.cuda.get_device_name(ranks.device)
    else:
        chip = f"{processor()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": f"{ranks.device.type} {platform.machine()} {chip}",
        "threads": torch.get_num_threads(),
        "processes": ranks.world_size,
        "precision": str(precision).removeprefix("torch."),
        "compiled": is_compiled,
        "micro_batch": micro_batch_size,
    }
