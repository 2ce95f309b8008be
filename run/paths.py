"""Resolve run names and paths that users type, including paths inside a run."""

import os
from pathlib import Path


def run_path(path: Path | str) -> Path:
    """Return the path of a run or checkpoint: runs/NAME if it exists and NAME does not."""
    path = Path(path)
    named = Path("runs", path)
    # Unlike Path.exists(), this accepts text of any length, such as a prompt.
    if not os.path.exists(path) and os.path.exists(named):
        return named
    return path


def is_run(path: Path | str) -> bool:
    """Return whether a path, or a name in runs/, is a run or a checkpoint."""
    folder = run_path(path)
    return os.path.isdir(folder) and holding_run(folder) == folder


def holding_run(path: Path | str) -> Path | None:
    """Return the run or checkpoint at or above a path, even if the path does not exist."""
    path = run_path(os.path.expanduser(path))
    for folder in (path, *path.parents):
        if (folder / "manifest.json").exists() or any(folder.glob("checkpoints/*/manifest.json")):
            return folder
    return None
