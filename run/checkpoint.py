"""Checkpoints of a run, and loading of models: our own, and those from elsewhere.

A checkpoint is a folder that is complete or not there (run/sealed.py):
step-00000500/  model.safetensors  state.pt  config.json  tokenizer.model  manifest.json
(or tokenizer.json and the configs that belong to it)
"""

import errno
import json
import shutil
import struct
import sys
import time
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch

from data.tokenizer import JsonTokenizer, Tokenizer, tokenizer_file
from model.build import build_model, materialize
from model.transformer import Transformer
from run import errors, sealed
from run.errors import IntegrityError
from run.sharding import shard_like
from tools.formats.architectures import PARTS
from tools.formats.hf_config import from_hf_config
from tools.formats.llama2c import LazyTensor
from tools.formats.weights import (
    FETCH_AGAIN,
    LLAMA2C,
    StoredTensor,
    Weights,
    dtype_name,
    is_own_checkpoint,
    open_tensors,
    read_config,
    weight_map,
)

NUM_KEPT = 2
STEPS = "step-" + 8 * "[0-9]"
FIX = "use an older checkpoint, or train anew in another folder"
# Attention modules that have moved since some runs were saved: old path -> current path.
RENAMED_TARGETS = {
    "model.attention.latent.": "model.attention.mla.",
    "model.attention.delta.": "model.attention.gated_delta.",
    "model.attention.across.": "model.attention.cross_layer.",
    "model.attention.interleave.interleave": "model.attention.hybrid.hybrid",
}
# The feed-forward and the norm of runs saved before these were options.
DEFAULT_FFN = {"_target_": PARTS["swiglu"], "_partial_": True, "activation": "silu"}
DEFAULT_NORM = {"_target_": PARTS["rmsnorm"], "_partial_": True}


def prepare_run(run: Path, model: Transformer, resume: bool) -> Path | None:
    """Remove what a crash left behind, and return the checkpoint to resume, if there is one.

    Raises OSError where the disk has no room for the checkpoints of the run.
    """
    sealed.remove_leftovers(run / "checkpoints")
    # A checkpoint has each weight and up to two optimizer values for it. A new checkpoint is
    # written before the oldest is removed.
    weight_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    needed = (NUM_KEPT + 1) * 3 * weight_bytes
    free = shutil.disk_usage(run).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{NUM_KEPT + 1} checkpoints need {needed / 1e6:.1f} MB, free are {free / 1e6:.1f}",
            str(run),
        )
    if not resume:
        return None
    newest = newest_checkpoint(run)
    if newest is not None:
        prune(newest)
    return newest


def save(
    run: Path, step: int, weights: Weights, config: dict, tokenizer: dict[str, bytes], state: dict
) -> Path:
    """Write a checkpoint with the files of a tokenizer, and remove all but the newest NUM_KEPT.

    A crash at any instant leaves the older ones: what is named step-* is complete.
    """
    path = run / "checkpoints" / f"step-{step:08d}"
    with sealed.atomic_directory(path) as staging:
        write_weights(staging.create("model.safetensors"), weights)
        torch.serialization.set_crc32_options(False)  # the manifest has a better checksum
        try:
            torch.save(state, staging.create("state.pt"))
        except RuntimeError as error:
            # torch reports a full disk as an error of its own; the cause is its context.
            raise error.__context__ or error from None
        staging.create("config.json").write(json.dumps(config, indent=1).encode())
        for name, content in tokenizer.items():
            staging.create(name).write(content)
        staging.metadata = {"step": step}
    # The entries of the parent folders must reach the disk too.
    for folder in (run, run.parent):
        sealed.fsync_directory(folder)
    prune(path)
    return path


def prune(newest: Path) -> None:
    """Keep the last NUM_KEPT checkpoints up to `newest`; rename later ones, which are damaged."""
    for path in newest.parent.glob(STEPS):
        if path > newest:
            path.rename(path.with_name(f"damaged-{time.time_ns()}-{path.name}"))
    for path in sorted(newest.parent.glob(STEPS))[:-NUM_KEPT]:
        sealed.remove(path)


def write_weights(file: sealed.HashedFile, weights: Weights) -> None:
    """Write the format of huggingface.co/docs/safetensors, as a stream."""
    # Not by safetensors.torch.save_file: it is as fast and makes no copy either (500 MB in 0.5 s),
    # but a full disk is no OSError there, and its file would have to be read again for its hash.
    # The header has the dtype and shape of each tensor, and where its bytes are behind the header.
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in weights.items():
        header[name] = {
            "dtype": dtype_name(name, tensor),
            "shape": tensor.shape,
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    # The header is padded, so that tensors are aligned to 8 bytes.
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(struct.pack("<Q", len(encoded)) + encoded)
    for tensor in weights.values():
        # As bytes, because numpy has no bfloat16.
        file.write(memoryview(tensor.cpu().reshape(-1).view(torch.uint8).numpy()))


def verify(checkpoint: Path) -> None:
    """Raises IntegrityError where a file is missing, or is not what was written."""
    sealed.verify(checkpoint, FIX)


def newest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run that verifies, or None where there is none.

    `run` may also be a checkpoint, or a model from elsewhere: it is returned.
    Raises IntegrityError where all are damaged.
    """
    # What has weights of its own is no run with checkpoints.
    if run.is_file() or (run / "config.json").exists():
        if is_own_checkpoint(run):
            verify(run)
        return run
    # Skip damaged checkpoints, from the newest on.
    checkpoints = sorted((run / "checkpoints").glob(STEPS), reverse=True)
    for checkpoint in checkpoints:
        try:
            verify(checkpoint)
            return checkpoint
        except IntegrityError as error:
            print(f"warning: skipped: {str(error).partition('. fix: ')[0]}", file=sys.stderr)
    if checkpoints:
        raise IntegrityError(
            f"no checkpoint is whole ({len(checkpoints)} in {run}). "
            "fix: train anew in another folder"
        )
    return None


def load_state(checkpoint: Path, needed: set[str]) -> dict:
    """The training state, which has the keys `needed`.

    Raises IntegrityError for what is not plain tensors, numbers and text, since it might run code.
    """
    file = checkpoint / "state.pt"
    try:
        if not is_zipfile(file):
            raise ValueError("not a zip file")  # torch would read older formats too
        state = torch.load(file, map_location="cpu", weights_only=True)
        missing = sorted(needed - state.keys())
    except (
        UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        LookupError,
        AttributeError,
    ) as error:
        reason = str(error).partition("\n")[0]
        raise IntegrityError(
            f"unsafe or unreadable content ({file}: {reason}). fix: {FIX}"
        ) from None
    if missing:
        raise IntegrityError(f"a key is missing ({file} has no {', '.join(missing)}). fix: {FIX}")
    return state


@torch.no_grad()
def load_weights(model: Transformer, path: Path) -> None:
    """Load parameters and persistent buffers.

    They are read one at a time, so that memory holds little more than the model.
    Raises IntegrityError where names or shapes are not the model's.
    """
    weights = model.state_dict()
    for stored, lazy in check_weights(model, path):
        parameters = stored.from_file(lazy.read())
        for name, parameter in parameters.items():
            weights[name].copy_(shard_like(parameter, weights[name]))
        del parameters, parameter  # before the next is read


def check_weights(model: Transformer, path: Path) -> list[tuple[StoredTensor, LazyTensor]]:
    """The tensors of a model's files, and how they hold our parameters.

    Raises IntegrityError where names or shapes are not the model's.
    """
    # Compare what the model expects with what the files have: names and shapes.
    kind = architecture_of(path)
    stored = weight_map(model, kind)
    tensors = open_tensors(path)
    expected = {name: tensor.shape() for name, tensor in stored.items()}
    actual = {name: tensor.shape for name, tensor in tensors.items()}
    different = [name for name in expected | actual if expected.get(name) != actual.get(name)]
    if kind is not None:
        # Old files of `transformers` hold the frequencies of RoPE, which are computed anew.
        different = [name for name in different if not name.endswith("rotary_emb.inv_freq")]
    if different:
        fix = FIX if kind is None else FETCH_AGAIN
        raise IntegrityError(
            f"not the model's weights ({path}: {', '.join(different[:3])}). fix: {fix}"
        )
    return [(stored[name], tensors[name]) for name in stored]


def architecture_of(path: Path) -> str | None:
    """The architecture whose names and layouts the weights have; None for a checkpoint of a run."""
    if is_own_checkpoint(path):
        return None
    if not path.is_dir():
        return LLAMA2C
    return read_config(path)["architectures"][0]


def load_config(path: Path) -> dict:
    """The config of the run that wrote a checkpoint; of a model from elsewhere, `model` alone.

    Raises IntegrityError for a damaged one of ours, and ValueError for a model from elsewhere that
    our layers cannot express, or whose tokenizer does not fit.
    """
    config = read_config(path)
    if is_own_checkpoint(path):
        if not isinstance(config.get("model"), dict):
            raise IntegrityError(
                f"not the config of a run ({path / 'config.json'} has no `model`). fix: {FIX}"
            )
        return update_config(config)
    # A model from elsewhere: its config.json is that of `transformers`.
    file = tokenizer_path(path)
    if not file.exists():
        raise ValueError(
            f"no tokenizer.model and no tokenizer.json ({path}). fix: fetch what the model was "
            "trained with"
        )
    tree = from_hf_config(config)
    tokenizer = Tokenizer.load(file)
    # An embedding may be padded beyond the vocabulary, for speed.
    is_padded = isinstance(tokenizer, JsonTokenizer) and tokenizer.vocab_size < tree["vocab_size"]
    if tokenizer.vocab_size != tree["vocab_size"] and not is_padded:
        raise ValueError(
            f"a tokenizer of another vocabulary ({file} has {tokenizer.vocab_size}, "
            f"the model {tree['vocab_size']}). fix: the tokenizer that it was trained with; where "
            "that is tokenizer.json, remove tokenizer.model"
        )
    return {"model": tree}


def update_config(config: dict) -> dict:
    """Convert the config of an older run: current paths in `_target_`, and no missing parts."""
    text = json.dumps(config)
    for old, new in RENAMED_TARGETS.items():
        text = text.replace(f'"_target_": "{old}', f'"_target_": "{new}')
    config = json.loads(text)
    config["model"].setdefault("ffn", DEFAULT_FFN)
    config["model"].setdefault("norm", DEFAULT_NORM)
    return config


def tokenizer_path(path: Path) -> Path:
    return tokenizer_file(path if path.is_dir() else path.parent)


def load_model(
    path: Path,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    context: int | None = None,
) -> Transformer:
    """The model of a checkpoint, or from elsewhere, in evaluation mode.

    `context` replaces that of the model, if given. `dtype` is for parameters; buffers keep theirs.
    Exits with code 4 if a parameter is not finite; a buffer need not be, since it may be a mask.
    """
    tree = load_config(path)["model"]
    if context is not None:
        tree["context"] = context
    try:
        model = build_model(tree)
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise IntegrityError(f"not a model's config ({path}: {error}). fix: {FIX}") from None
    # Names and shapes are checked before the model has memory, too.
    check_weights(model, path)
    load_weights(materialize(model, device, dtype), path)
    check_finite(model, path)
    return model.eval()


def check_finite(model: Transformer, path: Path) -> None:
    """Exit with code 4 if a parameter is not finite."""
    if not all(p.isfinite().all() for p in model.parameters()):
        errors.exit_with(
            errors.DIVERGED, f"weights contain NaN or infinity ({path}). fix: an older checkpoint"
        )


def find_model(path: Path | None) -> Path:
    """The newest checkpoint of the run at `path`, or `path` itself if it is a model from elsewhere.

    Without a path: the newest checkpoint of the run in runs/ that saved last. Raises ValueError if
    there is none.
    """
    # Without a path, find the run that saved last.
    run = path
    if run is None:
        saved = Path("runs").glob("*/checkpoints/step-*")
        newest = max(saved, key=lambda folder: folder.stat().st_mtime_ns, default=None)
        if newest is None:
            raise ValueError("no trained model (in runs/). fix: python train.py, or --run FOLDER")
        run = newest.parents[1]
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        raise ValueError(
            f"no model ({path}). fix: a folder on this disk with checkpoints/step-* or config.json"
        )
    return checkpoint
