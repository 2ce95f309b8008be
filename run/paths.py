"""Resolve run names and paths that users type."""

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
