"""The checkpoints of a run: folders that are either complete or absent after a crash.

step-00000500/  model.safetensors  state.pt  config.json  tokenizer.model  manifest.json
(or tokenizer.json and its configs)

A folder is written under another name, synced to disk, and then renamed. Its manifest lists the
SHA-256 of every other file. Prepared text is stored in the same way. See docs/dev/testing.md.
"""

import errno
import json
import os
import shlex
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from hashlib import file_digest
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.types import Device

from run.distributed import shard_like
from run.errors import UNSUPPORTED, IntegrityError, without_fix
from run.instantiate import instantiate, instantiate_model
from run.paths import run_path
from run.progress import print0, warn_once

NUM_KEPT = 2
MOST_LAYERS = 2**12  # limit for models from untrusted checkpoints
STEPS = "step-" + 8 * "[0-9]"
UNFINISHED = ".tmp-"  # begins the names of folders that are being written or removed
# Exceptions that can be raised while untrusted content is parsed, or a model is built from it.
UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    EOFError,
    SafetensorError,
    UnpicklingError,
)
# Exceptions that a model built from an untrusted config can raise when it runs: its layers may not
# fit together, or torch may reject its numbers.
UNRUNNABLE = (ValueError, ArithmeticError)
STATE = ("state.pt",)  # not read where only the model is needed
FIX = "use another checkpoint, or start a new run in a different folder"


# Folders that are complete or absent.


@contextmanager
def atomic_directory(folder: Path) -> Iterator[Path]:
    """Yield an empty directory to write files to, and rename it to `folder` at the end.

    `folder` must not exist yet. If an error prevents the renaming, the new directory is removed.
    """
    assert not folder.exists()
    staging = folder.with_name(UNFINISHED + folder.name)
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    try:
        yield staging

        # First, the files and the manifest that lists them must reach the disk.
        hashes = {}
        for path in sorted(staging.iterdir()):
            sync(path)
            hashes[path.name] = sha256_of(path)
        content = json.dumps({"name": folder.name, "files": hashes}, indent=1)
        manifest = staging / "manifest.json"
        manifest.write_text(content, encoding="utf-8")
        sync(manifest)

        # Then their names in the directory must reach it. Only then is the directory renamed.
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
    """Flush a file, or the entries of a directory, to disk; warn where that is not supported."""
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
        warn_once("cannot sync to disk: a power cut may lose the newest files")


def acquire(lock: FileLock) -> bool:
    """Acquire a lock; warn and return False on a file system without locks.

    Raises Timeout if the lock is non-blocking and another process holds it.
    """
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        warn_once("this file system cannot lock files: do not start two commands in one folder")
        return False
    return True


def verify(
    folder: Path, fix: str, *, may_be_renamed: bool = False, unread: Collection[str] = ()
) -> dict[str, str]:
    """Verify a folder by its manifest, and return the SHA-256 of each file by name.

    The files in `unread`, which the caller does not read, are not read here either. Raises
    IntegrityError, with this `fix`, if a file, the manifest or, unless `may_be_renamed`, the name
    of the folder has changed, and OSError if a network disk has disappeared, which says nothing
    about the files.
    """
    try:
        # A damaged manifest is not valid JSON, lacks a key, or has a wrong name or hash. Earlier
        # versions appended the manifest's own hash, which is skipped.
        content = (folder / "manifest.json").read_text(encoding="utf-8")
        manifest, _ = json.JSONDecoder().raw_decode(content)
        if manifest["name"] != folder.name and not may_be_renamed:
            raise ValueError(f"the folder was renamed from {manifest['name']}")
        for name, digest in manifest["files"].items():
            if name not in unread and sha256_of(folder / name) != digest:
                raise ValueError(f"damaged file {name}")
        return manifest["files"]
    except OSError as error:
        if error.errno in (errno.ESTALE, errno.ENOTCONN):  # a network disk has disappeared
            raise
        problem = error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        problem = error
    raise IntegrityError(f"{problem} (in {folder}). fix: {fix}")


def remove(folder: Path) -> None:
    """Rename a folder, then remove it, so that no crash leaves it incomplete under its name."""
    unfinished = folder.with_name(UNFINISHED + folder.name)
    folder.rename(unfinished)
    shutil.rmtree(unfinished, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove the unfinished folders that a crash left in `parent`."""
    for leftover in parent.glob(f"{UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)


# The checkpoints of a run.


def save(
    run: Path,
    step: int,
    weights: dict[str, Tensor],
    config: dict,
    tokenizer: dict[str, bytes],
    state: dict,
) -> Path:
    """Write a checkpoint with the tokenizer's files, and keep only the newest NUM_KEPT checkpoints.

    A crash at any time leaves the older checkpoints intact, and every folder named step-* is
    complete. Raises OSError if the disk rejects the write.
    """
    path = run / "checkpoints" / f"step-{step:08d}"
    with atomic_directory(path) as staging:
        write_weights(staging / "model.safetensors", weights)
        torch.serialization.set_crc32_options(False)  # the manifest has a better checksum
        try:
            with (staging / "state.pt").open("wb") as file:
                torch.save(state, file)
        except RuntimeError as error:
            # For a full disk, torch raises a RuntimeError whose context is the OSError.
            raise error.__context__ or error from None
        (staging / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        for name, content in tokenizer.items():
            (staging / name).write_bytes(content)
    # The entries in the parent folders must also reach the disk.
    for folder in (run, run.parent):
        sync(folder)
    prune(path.parent)
    return path


def write_weights(file: Path, weights: dict[str, Tensor]) -> None:
    """Write a safetensors file. Raises OSError if the disk rejects the write."""
    tensors = {name: weight.contiguous() for name, weight in weights.items()}
    try:
        save_file(tensors, file, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(file)) from None


def begin_at(newest: Path) -> None:
    """Rename the checkpoints after `newest`, which are damaged: their steps are saved again.

    Raises ValueError if another process has saved one in the meantime.
    """
    for path in newest.parent.glob(STEPS):
        if path > newest:
            try:
                verify(path, FIX)
            except IntegrityError:
                path.rename(path.with_name(f"damaged-{time.time_ns()}-{path.name}"))
            else:
                raise ValueError(f"another process has saved {path}. fix: run the command again")
    prune(newest.parent)


def prune(checkpoints: Path) -> None:
    """Remove all but the last NUM_KEPT checkpoints in a folder."""
    for path in sorted(checkpoints.glob(STEPS))[:-NUM_KEPT]:
        remove(path)


def newest_checkpoint(run: Path, unread: Collection[str] = ()) -> Path | None:
    """Return a run's newest checkpoint that passes verification, or None if it has no checkpoint.

    The files in `unread` are not verified. Raises IntegrityError if all checkpoints are damaged.
    """
    checkpoints = sorted((run / "checkpoints").glob(STEPS), reverse=True)
    for checkpoint in checkpoints:
        try:
            verify(checkpoint, FIX, unread=unread)
            return checkpoint
        except IntegrityError as error:
            print0(f"warning: skipping a damaged checkpoint: {without_fix(error)}")
    if checkpoints:
        raise IntegrityError(
            f"all checkpoints are damaged ({len(checkpoints)} in {run}). fix: start a new run in "
            "a different folder"
        )
    return None


def find_model(path: Path | str | None) -> Path:
    """Return the newest checkpoint of the run at `path`, or `path` itself if it is a checkpoint.

    If `path` is None, returns the newest checkpoint of the run in runs/ that saved last. The
    training state, which the caller does not read, is not verified. Raises ValueError if no
    checkpoint exists, and IntegrityError if `path` is a damaged checkpoint, or if all checkpoints
    of the run are damaged.
    """
    if path is None:
        saved = Path("runs").glob(f"*/checkpoints/{STEPS}")
        newest = max(saved, key=lambda folder: folder.stat().st_mtime_ns, default=None)
        if newest is None:
            raise ValueError("no trained model (in runs/). fix: python train.py")
        path = newest.parents[1]
    path = run_path(os.path.expanduser(path))
    if (path / "manifest.json").exists():
        # The user chose this folder, so it may be a renamed copy, or a link.
        verify(path.resolve(), FIX, may_be_renamed=True, unread=STATE)
        return path
    checkpoint = newest_checkpoint(path, unread=STATE)
    if checkpoint is not None:
        return checkpoint
    if (path / "config.yaml").exists():
        raise ValueError(f"the run has no checkpoint yet ({path})")
    problem = f"not a run or checkpoint ({path})"
    if (path / "config.json").exists():  # a model of transformers
        call = shlex.join(["python", "-m", "tools.import_hf", str(path), "--out", "models/NAME"])
        problem += f". fix: {call}"
    raise ValueError(problem)


# What a checkpoint holds.


@contextmanager
def report_unreadable(
    file: Path, exceptions: tuple[type[Exception], ...] = UNREADABLE
) -> Iterator[None]:
    """Raise IntegrityError for content that cannot be used, even if it passes `verify`.

    Wrap as little code as possible: a bug that raises one of the `exceptions` inside is reported as
    an invalid file.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except exceptions as error:
        reason = str(error).partition("\n")[0]
        raise IntegrityError(f"invalid checkpoint file ({file}: {reason}). fix: {FIX}") from None


def load_config(checkpoint: Path) -> dict:
    """Read a checkpoint's config. Raises IntegrityError if this fails or it exceeds MOST_LAYERS."""
    file = checkpoint / "config.json"
    with report_unreadable(file):
        config = json.loads(file.read_text(encoding="utf-8"))
        if config["model"]["depth"] > MOST_LAYERS:
            raise ValueError(f"too many layers: the limit is {MOST_LAYERS}")
    return config


def load_model_config(checkpoint: Path) -> dict:
    """Return a checkpoint's model config. Raises IntegrityError if the model cannot be run."""
    tree = load_config(checkpoint)["model"]
    file = checkpoint / "config.json"
    with report_unreadable(file):
        model = instantiate_model(tree, "meta", torch.float32)
    with report_unreadable(file, UNRUNNABLE):
        run_two_tokens(model)
    return tree


def dry_run(tree: dict) -> nn.Module:
    """Build a model on the meta device, which needs no memory, and run two tokens through it.

    The first call in a process takes a second, because torch then imports further modules.
    """
    with torch.device("meta"):
        return run_two_tokens(instantiate(tree))


@torch.no_grad()
def run_two_tokens(model: nn.Module) -> nn.Module:
    """Run two tokens through a model, on the model's device."""
    weight = model.embed.weight
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=weight.device)
    model(tokens, model.new_cache(1, 2, weight.dtype, weight.device))
    return model


def load_state(checkpoint: Path, needed: Iterable[str]) -> dict:
    """Read the `needed` entries of the training state.

    Raises IntegrityError if an entry is missing, and for content that torch.load refuses with
    weights_only=True, because loading it might run code.
    """
    file = checkpoint / "state.pt"
    with report_unreadable(file, (*UNREADABLE, AssertionError, AttributeError)):
        if not is_zipfile(file):
            raise ValueError("not a zip file")  # torch would also read older formats
        state = torch.load(file, map_location="cpu", weights_only=True)
        missing = sorted({*needed} - {*state})
        if missing:
            raise ValueError(
                f"it lacks {', '.join(missing)}, so another version may have written it"
            )
        return {key: state[key] for key in needed}


def load_model(
    checkpoint: Path, device: Device, dtype: torch.dtype = torch.float32, context: int | None = None
) -> nn.Module:
    """Load a checkpoint's model, a Transformer, in evaluation mode.

    `context` replaces the model's context, if given. `dtype` applies as in `instantiate_model`:
    vectors and buffers may keep wider dtypes. Raises IntegrityError if no model can be built from
    the config, or if the names or shapes of the stored weights do not match the model, as when
    `context` changes the size of a weight.
    """
    tree = load_config(checkpoint)["model"]
    if context is not None:
        tree["context"] = context
    # Before allocating memory, compare names and shapes with a model on the meta device.
    file = checkpoint / "config.json"
    with report_unreadable(file):
        shapes = instantiate_model(tree, "meta", dtype)
    check_weights(shapes, checkpoint)
    model = instantiate_model(tree, device, dtype)
    load_weights(model, checkpoint)
    with report_unreadable(file, UNRUNNABLE):
        run_two_tokens(model)
    return model.eval()


def check_weights(model: nn.Module, checkpoint: Path) -> None:
    """Raise IntegrityError if names or shapes of the stored weights do not match the model."""
    file = checkpoint / "model.safetensors"
    expected = {(name, *weight.shape) for name, weight in model.state_dict().items()}
    with report_unreadable(file), safe_open(file, "pt") as opened:
        names = opened.keys()
        stored = {(name, *opened.get_slice(name).get_shape()) for name in names}
        different = sorted(stored ^ expected)
        if different:
            raise ValueError(f"the weights do not match the model: {different[:3]}")


@torch.no_grad()
def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load parameters and persistent buffers, which may be sharded.

    Raises IntegrityError if names or shapes do not match the model.
    """
    check_weights(model, checkpoint)
    file = checkpoint / "model.safetensors"
    for name, weight in model.state_dict().items():
        # Reopen the file for each tensor. This releases the pages read before, so that memory holds
        # little more than the model.
        with safe_open(file, "pt") as opened:
            weight.copy_(shard_like(opened.get_tensor(name), weight))
