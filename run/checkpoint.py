"""Checkpoints of a run: written, pruned, found, verified and read.

A checkpoint is a folder that is either complete or absent (run/sealed.py):
step-00000500/  model.safetensors  state.pt  config.json  tokenizer.model  manifest.json
(or tokenizer.json and the configs that belong to it)
"""

import errno
import json
import os
import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.types import Device

from run import sealed
from run.errors import IntegrityError, suggest, without_fix
from run.instantiate import instantiate, instantiate_model
from run.paths import holding_run, run_path
from run.progress import say
from run.sharding import shard_like

NUM_KEPT = 2
MOST_LAYERS = 2**12  # of a model from an untrusted checkpoint
STEPS = "step-" + 8 * "[0-9]"
# Exceptions that untrusted content can raise while it is parsed, or a model is built from it. Any
# other exception is a bug of ours.
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
# Exceptions that a model of an untrusted config can raise when it runs: layers that do not fit
# together, and numbers that torch rejects.
UNRUNNABLE = (ValueError, ArithmeticError)
FIX = "use an older checkpoint, or start a new run in another folder"


def prepare_run(run: Path, resume: bool) -> Path | None:
    """Remove the leftovers of a crash, and return the checkpoint to resume, if there is one."""
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
    """Write a checkpoint with the files of a tokenizer, and remove all but the newest NUM_KEPT.

    A crash at any instant leaves the older checkpoints: a folder named step-* is complete.
    Raises OSError if the disk rejects the write.
    """
    path = run / "checkpoints" / f"step-{step:08d}"
    with sealed.atomic_directory(path) as staging:
        write_weights(staging / "model.safetensors", weights)
        torch.serialization.set_crc32_options(False)  # the manifest has a better checksum
        try:
            with (staging / "state.pt").open("wb") as file:
                torch.save(state, file)
        except RuntimeError as error:
            # torch reports a full disk as its own error; the context of that error is the cause.
            raise error.__context__ or error from None
        (staging / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        for name, content in tokenizer.items():
            (staging / name).write_bytes(content)
    # The entries of the parent folders must reach the disk too.
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
    """Keep the last NUM_KEPT checkpoints up to `newest`; rename later, damaged ones."""
    for path in newest.parent.glob(STEPS):
        if path > newest:
            path.rename(path.with_name(f"damaged-{time.time_ns()}-{path.name}"))
    for path in sorted(newest.parent.glob(STEPS))[:-NUM_KEPT]:
        sealed.remove(path)


def newest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run that verifies, or None if the run has no checkpoint.

    Raises IntegrityError if all checkpoints are damaged.
    """
    checkpoints = sorted((run / "checkpoints").glob(STEPS), reverse=True)
    for checkpoint in checkpoints:
        try:
            sealed.verify(checkpoint, FIX)
            return checkpoint
        except IntegrityError as error:
            say(f"warning: skipped a checkpoint: {without_fix(error)}")
    if checkpoints:
        raise IntegrityError(
            f"all checkpoints are damaged ({len(checkpoints)} in {run}). "
            "fix: start a new run in another folder"
        )
    return None


def find_model(path: Path | str | None, option: str = "--run ") -> Path:
    """The newest checkpoint of the run at `path`, or `path` itself if it is a checkpoint.

    Without a path: the newest checkpoint of the run in runs/ that saved last. Raises ValueError if
    no checkpoint exists, with a fix that begins with `option`, and IntegrityError if it is damaged.
    """
    if path is None:
        saved = Path("runs").glob(f"*/checkpoints/{STEPS}")
        newest = max(saved, key=lambda folder: folder.stat().st_mtime_ns, default=None)
        if newest is None:
            configs = sorted(Path("runs").glob("*/config.yaml"), key=os.path.getmtime)
            if configs:
                raise unsaved_run(configs[-1])
            raise ValueError("no trained model (in runs/). fix: python train.py, or --run FOLDER")
        path = newest.parents[1]
    path = run_path(os.path.expanduser(path))
    if (path / "manifest.json").exists():
        # The user has chosen this folder, so it may be a copy under another name, or a link.
        sealed.verify(path.resolve(), FIX, may_be_renamed=True)
        return path
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        renamed = [file.parent for file in path.glob("checkpoints/*/manifest.json")]
        if renamed:
            fix = f"{option}{shlex.quote(str(renamed[0]))}"
            raise ValueError(f"no checkpoint named step-* ({path}). fix: {fix}")
        if (path / "config.yaml").exists():
            raise unsaved_run(path / "config.yaml")
        raise ValueError(f"not a run ({path}). fix: {fix_for_path(path, option)}")
    return checkpoint


def unsaved_run(config: Path) -> ValueError:
    """The error for a run, given its config.yaml, that has saved no checkpoint yet."""
    save_every = "save_every"
    with suppress(OSError, yaml.YAMLError, TypeError, LookupError):
        save_every = yaml.safe_load(config.read_text(encoding="utf-8"))["save_every"]
    run = config.parent
    return ValueError(
        f"the run has no checkpoint yet ({run}: the first is due at step {save_every}, or when it "
        f"ends). fix: wait for it, or end the run with Ctrl-C, which saves; if it was killed: "
        f"python train.py {shlex.quote(f'run_dir={run}')} resume=true, with the same overrides"
    )


def fix_for_path(path: Path, option: str) -> str:
    """A fix that names a run after `option`, in place of a path that is not a run."""
    # A file or a folder inside a run, or a mistyped one.
    run = holding_run(path)
    if run is None:
        names = [folder.parents[1].name for folder in Path("runs").glob(f"*/checkpoints/{STEPS}")]
        nearest = suggest(path.name, names)
        run = nearest and Path("runs", nearest)
    if run is not None:
        return f"{option}{shlex.quote(str(run))}"

    # A model of transformers, or one of its files.
    folder = path if path.is_dir() else path.parent
    if (folder / "config.json").exists():
        name = f"models/{folder.resolve().name}"
        call = shlex.join(["python", "-m", "tools.import_hf", str(folder), "--out", name])
        return f"{call}; then {option}{shlex.quote(name)}"
    return (
        "python train.py, or for a Hugging Face model python -m tools.import_hf FOLDER --out NAME"
    )


@contextmanager
def report_unreadable(
    file: Path, exceptions: tuple[type[Exception], ...] = UNREADABLE
) -> Iterator[None]:
    """Raise IntegrityError for content that this program did not write, even if it is sealed.

    Wrap only the reading: a bug that raises one of the `exceptions` inside would be reported as a
    damaged file.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except exceptions as error:
        reason = str(error).partition("\n")[0]
        raise IntegrityError(f"invalid checkpoint file ({file}: {reason}). fix: {FIX}") from None


def load_config(checkpoint: Path) -> dict:
    """The config of the run that wrote a checkpoint. Raises IntegrityError if it is invalid."""
    file = checkpoint / "config.json"
    with report_unreadable(file):
        config = json.loads(file.read_text(encoding="utf-8"))
        if config["model"]["depth"] > MOST_LAYERS:
            raise ValueError(f"more than {MOST_LAYERS} layers")
    return config


def load_model_config(checkpoint: Path) -> dict:
    """The config of a checkpoint's model. Raises IntegrityError if the model cannot be built."""
    tree = load_config(checkpoint)["model"]
    file = checkpoint / "config.json"
    with report_unreadable(file):
        model = instantiate_model(tree, "meta", torch.float32)
    with report_unreadable(file, UNRUNNABLE):
        try_out(model)
    return tree


def dry_run(tree: dict) -> nn.Module:
    """Build a model, and run two tokens through it, without memory.

    The first call in a process takes a second, for torch's own imports.
    """
    with torch.device("meta"):
        return try_out(instantiate(tree))


@torch.no_grad()
def try_out(model: nn.Module) -> nn.Module:
    """Run two tokens through a model, on its device."""
    weight = model.embed.weight
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=weight.device)
    model(tokens, model.new_cache(1, 2, weight.dtype, weight.device))
    return model


def load_state(checkpoint: Path, needed: Iterable[str]) -> dict:
    """Read the entries `needed` of the training state.

    Raises IntegrityError if one is missing, and for content other than plain tensors, numbers and
    text, since it might run code.
    """
    file = checkpoint / "state.pt"
    with report_unreadable(file, (*UNREADABLE, AssertionError, AttributeError)):
        if not is_zipfile(file):
            raise ValueError("not a zip file")  # torch would read older formats too
        state = torch.load(file, map_location="cpu", weights_only=True)
        return {key: state[key] for key in needed}


def load_model(
    checkpoint: Path, device: Device, dtype: torch.dtype = torch.float32, context: int | None = None
) -> nn.Module:
    """Load the model of a checkpoint, a Transformer in evaluation mode.

    `context` replaces the model's, if given. `dtype` applies to parameters; buffers keep theirs.
    Raises IntegrityError if no model can be built from the config, or if the names or shapes of the
    stored weights differ from the model's; a weight whose size depends on the context is one case.
    """
    tree = load_config(checkpoint)["model"]
    if context is not None:
        tree["context"] = context
    # Compare names and shapes with a model on the meta device, before memory is allocated.
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
    """Raise IntegrityError if names or shapes of the stored weights differ from the model's."""
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
    """Load parameters and persistent buffers, which may be shards.

    Raises IntegrityError if names or shapes differ from the model's.
    """
    check_weights(model, checkpoint)
    file = checkpoint / "model.safetensors"
    for name, weight in model.state_dict().items():
        # Reopen the file for each tensor: this releases the pages read before, so that memory holds
        # little more than the model.
        with safe_open(file, "pt") as opened:
            weight.copy_(shard_like(opened.get_tensor(name), weight))
