"""The folder for files that commands can recreate: prepared text and compiled code."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $ATTEND_CACHE, or else attend/ in the user's cache folder."""
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("ATTEND_CACHE") or f"{user_cache}/attend"
    return Path(os.path.expanduser(folder)).absolute()
