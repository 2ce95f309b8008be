"""Paths that the user types for runs: by name, and inside of a run."""

import os
from pathlib import Path


def run_path(path: Path | str) -> Path:
    """The path of a run or a checkpoint; where there is no NAME, it is runs/NAME if that exists."""
    path = Path(path)
    named = Path("runs", path)
    # Unlike Path.exists(), this takes a text of any length, which may be a prompt.
    if not os.path.exists(path) and os.path.exists(named):
        return named
    return path


def is_run(path: Path | str) -> bool:
    """Whether a path, or a name in runs/, is a run or a checkpoint."""
    folder = run_path(path)
    return os.path.isdir(folder) and holding_run(folder) == folder


def holding_run(path: Path | str) -> Path | None:
    """The run or the checkpoint that a path is or is inside of, even if there is no such file."""
    path = run_path(os.path.expanduser(path))
    for folder in (path, *path.parents):
        if (folder / "manifest.json").exists() or any(folder.glob("checkpoints/*/manifest.json")):
            return folder
    return None
