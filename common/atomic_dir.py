"""A folder that is whole or not there, whenever a crash comes: written aside, sealed by a manifest, renamed.

manifest.json has size and SHA-256 of every file and ends with the SHA-256 of its own lines. docs/reliability.md.
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

from common.errors import IntegrityError

FORMAT = 2
COPIED = 2**20  # bytes: what is shorter may change once it is written, and is hashed from a copy
SEAL = 65  # bytes: the last line of a manifest


class HashedFile:
    """Bytes on their way to the disk, and a thread that hashes them meanwhile."""

    def __init__(self, path: Path):
        self.file, self.hash, self.size, self.thread = (
            path.open("xb"),
            sha256(),
            0,
            ThreadPoolExecutor(1),
        )

    def write(self, raw: bytes | memoryview) -> int:
        """More than COPIED bytes must stay as they are until the folder is sealed."""
        raw = memoryview(raw).cast("B")
        self.thread.submit(self.hash.update, raw if len(raw) > COPIED else bytes(raw))
        self.size += len(raw)
        return self.file.write(raw)

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> dict:
        """Onto the disk itself -> what the manifest says of it."""
        with self.file, self.thread:
            self.file.flush()
            os.fsync(self.file.fileno())
        return {"size": self.size, "sha256": self.hash.hexdigest()}


class StagingDirectory:
    """A folder in the making: its files, and what else its manifest is to say."""

    def __init__(self, folder: Path):
        self.folder, self.files, self.about = folder, {}, {}

    def create(self, name: str) -> HashedFile:
        self.files[name] = HashedFile(self.folder / name)
        return self.files[name]


@contextmanager
def atomic_directory(folder: Path) -> Iterator[StagingDirectory]:
    """What is written inside becomes `folder`, which must not be there; where it fails, nothing stays."""
    unsealed = StagingDirectory(folder.with_name(f".tmp-{folder.name}"))
    shutil.rmtree(unsealed.folder, ignore_errors=True)
    unsealed.folder.mkdir(parents=True)
    try:
        yield unsealed
        files = {name: file.close() for name, file in unsealed.files.items()}
        about = {"format": FORMAT, "name": folder.name, "files": files, **unsealed.about}
        body = f"{json.dumps(about, indent=1)}\n".encode()
        manifest = HashedFile(unsealed.folder / "manifest.json")
        manifest.write(body + f"{sha256(body).hexdigest()}\n".encode())
        manifest.close()
        fsync_directory(unsealed.folder)
        unsealed.folder.rename(folder)
        fsync_directory(folder.parent)
    except BaseException:
        for file in unsealed.files.values():
            with suppress(OSError, ValueError):  # closed already
                file.close()
        shutil.rmtree(unsealed.folder, ignore_errors=True)
        raise


def verify(folder: Path, fix: str) -> dict:
    """The manifest. Raises IntegrityError where it, or a file that it names, is not what was written."""
    try:
        raw = safe_child(folder, "manifest.json").read_bytes()
        if raw[-SEAL:] != f"{sha256(raw[:-SEAL]).hexdigest()}\n".encode():
            raise IntegrityError(f"damaged manifest ({folder}). fix: {fix}")
        manifest = json.loads(raw[:-SEAL])
        if (manifest["format"], manifest["name"]) != (FORMAT, folder.name):
            made = f"format {manifest['format']}, {manifest['name']}"
            raise IntegrityError(
                f"made by another version, or renamed ({folder}: {made}). fix: {fix}"
            )
        for name, said in manifest["files"].items():
            with safe_child(folder, name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if (
                    size != said["size"]
                    or file_digest(file, "sha256").hexdigest() != said["sha256"]
                ):
                    raise IntegrityError(f"damaged file ({folder / name}). fix: {fix}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise IntegrityError(f"not whole ({folder}: {error}). fix: {fix}") from None
    return manifest


def safe_child(folder: Path, name: str) -> Path:
    path = folder / name
    if path.parent != folder or path.is_symlink() or folder.is_symlink():
        raise ValueError(f"{path} leads elsewhere")
    return path


def remove(folder: Path) -> None:
    """All of it, or, where this is cut off, what no longer has its name. A link goes, not what it leads to."""
    trash = folder.with_name(f".trash-{folder.name}")
    shutil.rmtree(trash, ignore_errors=True)
    folder.rename(trash)
    if trash.is_symlink():
        trash.unlink()
    shutil.rmtree(trash, ignore_errors=True)


def remove_leftovers(place: Path) -> None:
    """Removes what a crash left in `place`."""
    for left in (*place.glob(".tmp-*"), *place.glob(".trash-*")):
        shutil.rmtree(left, ignore_errors=True)


def flock(lock: IO, how: int) -> None:
    """Locks a file until it is closed or the process ends, as fcntl.flock."""
    try:
        fcntl.flock(lock, how)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
            raise
        print(
            f"warning: no locks on this file system ({lock.name}): run nothing twice in it",
            file=sys.stderr,
        )


def fsync_directory(folder: Path) -> None:
    """What it holds, onto the disk itself."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
