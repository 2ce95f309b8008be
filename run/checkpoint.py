"""Write, prune, find, verify and read the checkpoints of a run.

A checkpoint is a folder that is either complete or absent (run/sealed.py):
step-00000500/  model.safetensors  state.pt  config.json  tokenizer.model  manifest.json
(or tokenizer.json and its configs)
"""

import errno
import json
import os
import shlex
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.types import Device

from run import sealed
from run.errors import IntegrityError, without_fix
from run.instantiate import instantiate, instantiate_model
from run.paths import run_path
from run.progress import say
from run.sharding import shard_like

NUM_KEPT = 2
MOST_LAYERS = 2**12  # limit for models from untrusted checkpoints
STEPS = "step-" + 8 * "[0-9]"
# Exceptions that can be raised while untrusted content is parsed, or while a model is built from
# it. Any other exception is a bug in this program.
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
FIX = "use an older checkpoint, or start a new run in a different folder"


def prepare_run(run: Path, resume: bool) -> Path | None:
    """Remove the leftovers of a crash, and return the checkpoint to resume from, if any."""
    sealed.remove_leftovers(run / "checkpoints")
    newest = newest_checkpoint(run) if resume else None
    if newest is not None:
        prune(newest)
    return newest


def save(
    run: Path,
    step: int,
    weights: dict[str, Tensor],
    config: dict,
    tokenizer: dict[str, bytes],
    state: dict,
) -> Path:
    """Write a checkpoint with the tokenizer's files, and remove all but the newest NUM_KEPT.

    A crash at any time leaves the older checkpoints intact, and every folder named step-* is
    complete. Raises OSError if the disk rejects the write.
    """
    path = run / "checkpoints" / f"step-{step:08d}"
    with sealed.atomic_directory(path) as staging:
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
        sealed.sync(folder)
    prune(path)
    return path


def write_weights(file: Path, weights: dict[str, Tensor]) -> None:
    """Write a safetensors file. Raises OSError if the disk rejects the write."""
    tensors = {name: weight.contiguous() for name, weight in weights.items()}
    try:
        save_file(tensors, file, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(file)) from None


def prune(newest: Path) -> None:
    """Keep the last NUM_KEPT checkpoints up to `newest`; rename later ones, which are damaged."""
    for path in newest.parent.glob(STEPS):
        if path > newest:
            path.rename(path.with_name(f"damaged-{time.time_ns()}-{path.name}"))
    for path in sorted(newest.parent.glob(STEPS))[:-NUM_KEPT]:
        sealed.remove(path)


def newest_checkpoint(run: Path, unread: Collection[str] = ()) -> Path | None:
    """Return a run's newest checkpoint that passes verification, or None if it has no checkpoint.

    Files named `unread` are not verified. Raises IntegrityError if all checkpoints are damaged.
    """
    checkpoints = sorted((run / "checkpoints").glob(STEPS), reverse=True)
    for checkpoint in checkpoints:
        try:
            sealed.verify(checkpoint, FIX, unread=unread)
            return checkpoint
        except IntegrityError as error:
            say(f"warning: skipping a damaged checkpoint: {without_fix(error)}")
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
    checkpoint exists, and IntegrityError if the checkpoint is damaged.
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
        sealed.verify(path.resolve(), FIX, may_be_renamed=True, unread=STATE)
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


@contextmanager
def report_unreadable(
    file: Path, exceptions: tuple[type[Exception], ...] = UNREADABLE
) -> Iterator[None]:
    """Raise IntegrityError for content that this program did not write, even if it is sealed.

    Wrap only the code that reads: if a bug inside raised one of the `exceptions`, it would be
    reported as a damaged file.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except exceptions as error:
        reason = str(error).partition("\n")[0]
        raise IntegrityError(f"invalid checkpoint file ({file}: {reason}). fix: {FIX}") from None


def load_config(checkpoint: Path) -> dict:
    """Return the config of the run that wrote a checkpoint. Raises IntegrityError if invalid."""
    file = checkpoint / "config.json"
    with report_unreadable(file):
        config = json.loads(file.read_text(encoding="utf-8"))
        if config["model"]["depth"] > MOST_LAYERS:
            raise ValueError(f"too many layers: the limit is {MOST_LAYERS}")
    return config


def load_model_config(checkpoint: Path) -> dict:
    """Return the config of a checkpoint's model. Raises IntegrityError if no model can be built."""
    tree = load_config(checkpoint)["model"]
    file = checkpoint / "config.json"
    with report_unreadable(file):
        model = instantiate_model(tree, "meta", torch.float32)
    with report_unreadable(file, UNRUNNABLE):
        try_out(model)
    return tree


def dry_run(tree: dict) -> nn.Module:
    """Build a model on the meta device, which needs no memory, and run two tokens through it.

    The first call in a process takes a second, because torch then imports further modules.
    """
    with torch.device("meta"):
        return try_out(instantiate(tree))


@torch.no_grad()
def try_out(model: nn.Module) -> nn.Module:
    """Run two tokens through a model, on the model's device."""
    weight = model.embed.weight
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=weight.device)
    model(tokens, model.new_cache(1, 2, weight.dtype, weight.device))
    return model


def load_state(checkpoint: Path, needed: Iterable[str]) -> dict:
    """Read the `needed` entries of the training state.

    Raises IntegrityError if an entry is missing, and for anything except plain tensors, numbers and
    text, because loading it might run code.
    """
    file = checkpoint / "state.pt"
    with report_unreadable(file, (*UNREADABLE, AssertionError, AttributeError)):
        if not is_zipfile(file):
            raise ValueError("not a zip file")  # torch would also read older formats
        state = torch.load(file, map_location="cpu", weights_only=True)
        return {key: state[key] for key in needed}


def load_model(
    checkpoint: Path, device: Device, dtype: torch.dtype = torch.float32, context: int | None = None
) -> nn.Module:
    """Load a checkpoint's model, a Transformer, in evaluation mode.

    `context` replaces the model's context, if given. `dtype` applies to parameters; buffers keep
    their own dtypes. Raises IntegrityError if no model can be built from the config, or if the
    names or shapes of the stored weights do not match the model, as when a weight's size depends on
    the context.
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
        try_out(model)
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
