"""The folder for files that commands can recreate: prepared text and compiled code."""

import os
import shlex
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from run.progress import say
from run.sealed import acquire

NAME = "attend"  # our folder in the user's cache


def writable_cache(wanted: Path) -> Path:
    """Return `wanted` if it is writable, else the user's cache, else a temporary folder.

    Only the temporary folder is created.
    """
    for folder in (wanted, user_cache()):
        if folder is not None and is_writable(folder):
            return folder
    return temporary_cache() or wanted


def compiler_cache(wanted: Path) -> Path:
    """Return a writable cache whose path torch.compile can pass to a C++ compiler.

    torch.compile builds the compiler command as an unquoted string, and splits it as a shell would.
    """
    for folder in (wanted, user_cache()):
        if folder is not None and is_writable(folder) and is_one_word(str(folder)):
            return folder
    return temporary_cache() or wanted


def cache_with_locks() -> Path | None:
    """Return a cache for torch.compile that supports file locks, and is not the clone's folder.

    This is the user's cache or a temporary folder; it is created. Returns None if there is neither.
    """
    folder = user_cache()
    if folder is not None and is_one_word(str(folder)) and has_locks(folder):
        return folder
    return temporary_cache()


def is_one_word(path: str) -> bool:
    """Return whether a shell would read an unquoted path as one word."""
    with suppress(ValueError):  # an unbalanced quote
        return shlex.split(path) == [path]
    return False


def user_cache() -> Path | None:
    """Return this project's folder in the user's cache; None if the user has no home folder."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # the XDG specification says to ignore relative paths
        root = os.path.expanduser("~/.cache")
    return Path(root, NAME) if os.path.isabs(root) else None


def is_writable(folder: Path) -> bool:
    """Return whether this user can write to a folder, or create it if it does not exist."""
    folder = folder.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def has_locks(folder: Path) -> bool:
    """Return whether files in a folder can be written and locked; create a missing folder."""
    lock = FileLock(folder / ".lock", blocking=False, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return acquire(lock)
    except Timeout:  # another process has locked it
        return True
    except OSError:
        return False
    finally:
        lock.release()


@cache
def temporary_cache() -> Path | None:
    """Create and report a folder that only this user owns; return None if that fails."""
    try:
        folder = Path(tempfile.gettempdir(), f"{NAME}-{os.getuid()}")
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        # Another user may have created the folder, and this process would load that user's code.
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            folder = Path(tempfile.mkdtemp(prefix=f"{NAME}-"))
    except OSError:
        return None
    say(
        f"warning: the cache is in {folder}, which may be deleted: .cache and {user_cache()} are "
        "not writable, lack file locks, or have a path that torch.compile cannot use. fix: set "
        "XDG_CACHE_HOME to the absolute path of a folder"
    )
    return folder
