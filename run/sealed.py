"""A directory that is complete or absent after a crash: written aside, sealed, renamed.

Its seal, manifest.json, has the size and SHA-256 of every file, and ends with the SHA-256 of its
own lines. See docs/reliability.md.
"""

import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import IO

from run.errors import IntegrityError

FORMAT = 2  # of the manifest
SMALL = 2**20  # bytes: smaller writes may be of buffers that are used again, so a copy is hashed
SEAL = 65  # bytes: the last line of a manifest


class HashedFile:
    """A new file, hashed by a thread while it is written.

    Reading the file again to hash it would make saving a checkpoint a fifth longer, and much longer
    on processors without SHA instructions.
    """

    def __init__(self, path: Path):
        self.file = path.open("xb")
        self.size = 0
        self.hash = sha256()
        self.thread = ThreadPoolExecutor(1)

    def write(self, raw: bytes | memoryview) -> int:
        """Write bytes. More than SMALL of them must not change until the directory is sealed."""
        raw = memoryview(raw).cast("B")
        stable = raw if len(raw) > SMALL else bytes(raw)
        self.thread.submit(self.hash.update, stable)
        self.size += len(raw)
        return self.file.write(raw)

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> dict:
        """Force the file to the disk, and return its entry in the manifest."""
        with self.file, self.thread:
            self.file.flush()
            os.fsync(self.file.fileno())
        return {"size": self.size, "sha256": self.hash.hexdigest()}


class StagingDirectory:
    """A directory while it is written: its files, and metadata to store in its manifest."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, HashedFile] = {}
        self.metadata: dict = {}

    def create(self, name: str) -> HashedFile:
        self.files[name] = HashedFile(self.folder / name)
        return self.files[name]


@contextmanager
def atomic_directory(folder: Path) -> Iterator[StagingDirectory]:
    """Collect the files that are created inside in `folder`, which must not exist yet.

    If anything fails, no folder is left.
    """
    staging = StagingDirectory(folder.with_name(f".tmp-{folder.name}"))
    shutil.rmtree(staging.folder, ignore_errors=True)
    staging.folder.mkdir(parents=True)
    try:
        yield staging

        # The manifest lists files that are on the disk already, ...
        files = {name: file.close() for name, file in staging.files.items()}
        metadata = {"format": FORMAT, "name": folder.name, "files": files, **staging.metadata}
        body = f"{json.dumps(metadata, indent=1)}\n".encode()
        seal = f"{sha256(body).hexdigest()}\n".encode()
        manifest = HashedFile(staging.folder / "manifest.json")
        manifest.write(body + seal)
        manifest.close()

        # ... and the directory gets its name when their names are on the disk, too.
        fsync_directory(staging.folder)
        staging.folder.rename(folder)
        fsync_directory(folder.parent)
    except BaseException:
        for file in staging.files.values():
            with suppress(OSError, ValueError):  # it may be closed already
                file.close()
        shutil.rmtree(staging.folder, ignore_errors=True)
        raise


def verify(folder: Path, fix: str) -> dict:
    """Return the manifest of a directory.

    Raises IntegrityError, with this fix, if it or a file that it lists is not what was written.
    """
    try:
        raw = safe_child(folder, "manifest.json").read_bytes()
        # A manifest that is intact and of this very folder tells what its files must be.
        body = raw[:-SEAL]
        if raw[-SEAL:] != f"{sha256(body).hexdigest()}\n".encode():
            raise ValueError("damaged manifest")
        manifest = json.loads(body)
        if (manifest["format"], manifest["name"]) != (FORMAT, folder.name):
            raise ValueError(f"of another version, or renamed from {manifest['name']}")
        for name, entry in manifest["files"].items():
            with safe_child(folder, name).open("rb") as file:
                is_whole = file_digest(file, "sha256").hexdigest() == entry["sha256"]
            if not is_whole:
                raise ValueError(f"damaged file {name}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{error} (in {folder}). fix: {fix}") from None
    return manifest


def safe_child(folder: Path, name: str) -> Path:
    """folder / name. Raises ValueError if that is not right inside the folder, or is a link."""
    path = folder / name
    if path.parent != folder or path.is_symlink() or folder.is_symlink():
        raise ValueError(f"{path} leads elsewhere")
    return path


def remove(folder: Path) -> None:
    """Remove a directory, or a link but not its target.

    Renames it first: if this is interrupted, what is left does not have its name.
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


def flock(lock: IO, operation: int) -> None:
    """Lock a file until it is closed or the process ends, as fcntl.flock.

    Prints a warning on a file system without locks.
    """
    try:
        fcntl.flock(lock, operation)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
            raise
        print(
            f"warning: no locks on this file system ({lock.name}): run nothing twice in it",
            file=sys.stderr,
        )


def fsync_directory(folder: Path) -> None:
    """Force the names in a directory to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
