"""A directory that is either complete or absent after a crash.

The directory is written under another name, sealed, and then renamed. Its seal, manifest.json,
lists the SHA-256 of every file, and ends with the SHA-256 of the preceding lines. See
docs/reliability.md.
"""

import errno
import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from hashlib import file_digest
from pathlib import Path

from filelock import FileLock

from run.errors import UNSUPPORTED, IntegrityError
from run.progress import warn_once


@contextmanager
def atomic_directory(folder: Path) -> Iterator[Path]:
    """Yield an empty directory to write files to, and rename it to `folder` at the end.

    `folder` must not exist yet. If anything fails, no directory is left behind.
    """
    assert not folder.exists()
    staging = folder.with_name(f".tmp-{folder.name}")
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    try:
        yield staging

        # The files, and the manifest that lists them, must reach the disk first, ...
        hashes = {}
        for path in sorted(staging.iterdir()):
            sync(path)
            hashes[path.name] = sha256_of(path)
        content = json.dumps({"name": folder.name, "files": hashes}, indent=1)
        manifest = staging / "manifest.json"
        manifest.write_text(content, encoding="utf-8")
        sync(manifest)

        # ... then their names in the directory, and only then does the directory get its name.
        sync(staging)
        staging.rename(folder)
        sync(folder.parent)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        # Python does not name a file that cannot be written or synced.
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(folder)
        raise


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk.

    Warns if a network file system does not support this.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # A directory above the run may belong to a different user and be unreadable.
        is_unreadable = error.errno == errno.EACCES and path.is_dir()
        if error.errno not in UNSUPPORTED and not is_unreadable:
            raise
        kind = "folders" if path.is_dir() else "files"
        warn_once(
            f"{kind} cannot be synced here ({error.strerror}): a power cut may lose the newest "
            "checkpoint, but no checkpoint is lost if the process is killed"
        )


def acquire(lock: FileLock) -> bool:
    """Acquire a lock; return False on a file system without locks.

    Raises Timeout if the lock is non-blocking and another process holds it.
    """
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def verify(
    folder: Path, fix: str, *, may_be_renamed: bool = False, unread: Collection[str] = ()
) -> dict[str, str]:
    """Verify a sealed directory, and return the SHA-256 of each file by name.

    Files named `unread`, which the caller does not read, are not read here either. Raises
    IntegrityError, with this `fix`, if a file or the manifest has changed, and OSError if a network
    disk has disappeared, which says nothing about the files.
    """
    try:
        return matching_files(folder, may_be_renamed, unread)
    except OSError as error:
        if error.errno in (errno.ESTALE, errno.ENOTCONN):  # a network disk has disappeared
            raise
        problem = error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        problem = error
    raise IntegrityError(f"{problem} (in {folder}). fix: {fix}")


def matching_files(folder: Path, may_be_renamed: bool, unread: Collection[str]) -> dict[str, str]:
    """Return the SHA-256 of each file by name. Raises many types of errors for a damaged folder."""
    content = safe_child(folder, "manifest.json").read_text(encoding="utf-8")
    # A damaged manifest is not valid JSON, lacks a key, or has a wrong name or hash. Earlier
    # versions appended the manifest's own hash, which is skipped.
    manifest, _ = json.JSONDecoder().raw_decode(content)
    if manifest["name"] != folder.name and not may_be_renamed:
        raise ValueError(f"the folder was renamed from {manifest['name']}")
    for name, digest in manifest["files"].items():
        if name not in unread and sha256_of(safe_child(folder, name)) != digest:
            raise ValueError(f"damaged file {name}")
    return manifest["files"]


def safe_child(folder: Path, name: str) -> Path:
    """Return folder / name. Raises ValueError unless it is a direct child and not a link."""
    path = folder / name
    if path.parent != folder or path.is_symlink() or folder.is_symlink():
        raise ValueError(f"{path} is a link, or not directly in the folder")
    return path


def remove(folder: Path) -> None:
    """Remove a directory; for a link, remove only the link.

    The directory is renamed first, so that an interrupted removal leaves no incomplete directory
    under its name.
    """
    trash = folder.with_name(f".trash-{folder.name}")
    shutil.rmtree(trash, ignore_errors=True)
    folder.rename(trash)
    if trash.is_symlink():
        trash.unlink()
    shutil.rmtree(trash, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove the unfinished directories that a crash left in `parent`."""
    for pattern in (".tmp-*", ".trash-*"):
        for leftover in parent.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)
