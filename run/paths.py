"""The paths of runs, and the folder of files that commands can recreate."""

import os
from pathlib import Path


def run_path(path: Path | str) -> Path:
    """Return the path of a run or checkpoint: `path`, or runs/`path` if only that one exists."""
    path = Path(path)
    named = Path("runs", path)
    # Unlike Path.exists(), this accepts text of any length, such as a prompt.
    if not os.path.exists(path) and os.path.exists(named):
        return named
    return path


def cache_folder() -> Path:
    """Return the folder for prepared text and compiled code.

    It is $ATTEND_CACHE, or else attend/ in the user's cache folder.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("ATTEND_CACHE") or f"{user_cache}/attend"
    return Path(os.path.expanduser(folder)).absolute()
