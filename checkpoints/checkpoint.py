"""A checkpoint is a sealed folder.

step-00000500/  model.safetensors  state.pt  config.json  tokenizer.model  manifest.json
"""

import errno
import json
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
from torch import Tensor

from checkpoints.huggingface.mapping import from_hf_config
from checkpoints.weights import (
    LLAMA2C,
    WHOLE,
    StoredTensor,
    dtype_name,
    open_tensors,
    read_config,
    weight_map,
)
from common import atomic_dir, errors
from common.errors import IntegrityError
from common.sharding import shard_like
from data.tokenizer import Tokenizer
from model.materialize import build_model, materialize
from model.transformer import Transformer

NUM_KEPT = 2
STEPS = "step-" + 8 * "[0-9]"
FILES = ("model.safetensors", "state.pt", "config.json", "tokenizer.model")
FIX = "use an older checkpoint, or train anew in another folder"


def prepare_run(run: Path, model: Transformer, resume: bool) -> Path | None:
    """Removes what a crash left -> what to go on from. Raises OSError where two checkpoints would not fit."""
    atomic_dir.remove_leftovers(run / "checkpoints")
    # an optimizer has up to two numbers a weight
    needed = 3 * sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    needed *= NUM_KEPT + 1
    free = shutil.disk_usage(run).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{NUM_KEPT + 1} checkpoints need {needed / 1e6:.1f} MB, free are {free / 1e6:.1f}",
            str(run),
        )
    found = newest_checkpoint(run) if resume else None
    if found is not None:
        prune(found)
    return found


def save(
    run: Path, step: int, weights: dict[str, Tensor], trees: dict, tokenizer: bytes, state: dict
) -> Path:
    """Survives a crash at any instant: what is named step-* is complete. Removes all but the newest KEPT."""
    folder = run / "checkpoints"
    done = folder / f"step-{step:08d}"
    with atomic_dir.atomic_directory(done) as unsealed:
        write_weights(unsealed.create("model.safetensors"), weights)
        torch.serialization.set_crc32_options(False)  # the manifest has a better sum
        try:
            torch.save(state, unsealed.create("state.pt"))
        except RuntimeError as error:  # torch's own, about what a full disk did to it
            raise error.__context__ or error from None
        unsealed.create("config.json").write(json.dumps(trees, indent=1).encode())
        unsealed.create("tokenizer.model").write(tokenizer)
        unsealed.metadata = {"step": step}
    for path in (run, run.parent):  # the names of the folders themselves
        atomic_dir.fsync_directory(path)
    prune(done)
    return done


def prune(good: Path) -> None:
    """Keeps KEPT, the last of which is good: those after it are damaged, and set aside for their owner."""
    for path in good.parent.glob(STEPS):
        if path > good:
            path.rename(path.with_name(f"damaged-{time.time_ns()}-{path.name}"))
    for old in sorted(good.parent.glob(STEPS))[:-NUM_KEPT]:
        atomic_dir.remove(old)


def write_weights(file: atomic_dir.HashedFile, weights: dict[str, Tensor]) -> None:
    """The format of huggingface.co/docs/safetensors, written as a stream: its library would copy all weights first."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    weights = {name: tensor.contiguous().cpu() for name, tensor in weights.items()}
    for name, tensor in weights.items():
        start, end = end, end + tensor.nbytes
        dtype = dtype_name(name, tensor)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    file.write(struct.pack("<Q", len(head)) + head)
    for tensor in weights.values():
        # as bytes: numpy knows no bf16
        file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))


def verify(checkpoint: Path) -> None:
    """Raises IntegrityError where a file is missing, or not what was written."""
    missing = set(FILES) - atomic_dir.verify(checkpoint, FIX)["files"].keys()
    if missing:
        raise IntegrityError(
            f"incomplete checkpoint ({checkpoint} has no {', '.join(sorted(missing))}). fix: {FIX}"
        )


def newest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run that verifies; None where there is none. A model from elsewhere is its own newest.

    Raises IntegrityError where all are damaged.
    """
    if run.is_file() or (run / "config.json").exists():  # a model from elsewhere, or one checkpoint
        if (run / "manifest.json").exists():
            verify(run)
        return run
    found = sorted((run / "checkpoints").glob(STEPS), reverse=True)
    for checkpoint in found:
        try:
            verify(checkpoint)
            return checkpoint
        except IntegrityError as error:
            print(f"warning: skipped: {str(error).partition('. fix: ')[0]}", file=sys.stderr)
    if found:
        raise IntegrityError(
            f"no checkpoint is whole ({len(found)} in {run}). fix: train anew in another folder"
        )
    return None


def load_state(checkpoint: Path, needed: set[str]) -> dict:
    """Raises IntegrityError for what is not plain tensors, numbers and text: nothing in it is ever run."""
    try:
        if not is_zipfile(checkpoint / "state.pt"):  # torch would read older formats too
            raise ValueError("not a zip file")
        state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
        if missing := needed - state.keys():
            raise LookupError(f"no {', '.join(sorted(missing))}")
        return state
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
            f"unsafe or unreadable content ({checkpoint / 'state.pt'}: {reason}). fix: {FIX}"
        ) from None


def load_weights(model: Transformer, place: Path) -> None:
    """Parameters and persistent buffers. Raises IntegrityError where names or shapes are not the model's."""
    copy_weights(model, check_weights(model, place))


@torch.no_grad()
def copy_weights(
    model: Transformer, files: list[tuple[StoredTensor, Callable[[], Tensor]]]
) -> None:
    """From where `check_weights` found them, one at a time: memory holds little more than the model."""
    weights = model.state_dict()
    for stored, read in files:
        for name, tensor in zip(stored.names, stored.split(read()), strict=True):
            weights[name].copy_(shard_like(tensor, weights[name]))
        del tensor  # before the next is read


def check_weights(
    model: Transformer, place: Path
) -> list[tuple[StoredTensor, Callable[[], Tensor]]]:
    """How its files hold the model's parameters, and what reads each."""
    kind, found = architecture_of(place), open_tensors(place)
    needed, fix = weight_map(model, kind), FIX if kind is None else WHOLE
    state = model.state_dict()
    shapes = {name: each.shape(state) for name, each in needed.items()}
    spare = {name for name in found if kind is not None and name.endswith("rotary_emb.inv_freq")}
    names = {**shapes, **dict.fromkeys(found.keys() - spare)}
    other = [
        name
        for name in names
        if name not in found or name not in shapes or found[name][0] != shapes[name]
    ]
    if other:
        raise IntegrityError(
            f"not the model's weights ({place}: {', '.join(other[:3])}). fix: {fix}"
        )
    return [(stored, found[name][1]) for name, stored in needed.items()]


def architecture_of(place: Path) -> str | None:
    """Of a model that was not trained here."""
    if (place / "manifest.json").exists():
        return None
    return (
        read_config(place)["architectures"][0].removesuffix("ForCausalLM")
        if place.is_dir()
        else LLAMA2C
    )


def load_config(place: Path) -> dict:
    """The settings of the run that wrote it, as plain data; of a model from elsewhere, `model` alone.

    Raises IntegrityError for our own that are damaged, ValueError for a model that is not of our layers.
    """
    found = read_config(place)
    if (place / "manifest.json").exists():
        if not isinstance(found.get("model"), dict):
            raise IntegrityError(
                f"not a run's settings ({place / 'config.json'}: no model in it). fix: {FIX}"
            )
        return found
    if not tokenizer_path(place).exists():
        raise ValueError(
            f"no tokenizer.model ({place}). fix: a model with one of SentencePiece, no others are read"
        )
    tree, tokenizer = from_hf_config(found), Tokenizer.load(tokenizer_path(place))
    if tokenizer.vocab_size != tree["vocab_size"]:
        given = (
            f"{tokenizer_path(place)} has {tokenizer.vocab_size}, the model {tree['vocab_size']}"
        )
        raise ValueError(
            f"a tokenizer of another vocabulary ({given}). fix: the tokenizer that it was trained with"
        )
    return {"model": tree}


def tokenizer_path(place: Path) -> Path:
    return (place if place.is_dir() else place.parent) / "tokenizer.model"


def load_model(
    place: Path, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Transformer:
    """The model of a checkpoint or from elsewhere, built from the config in it. Ends with exit code 4 for NaN.

    `dtype` is that of its parameters. A buffer keeps its own, and may be infinite: it may be a mask.
    """
    tree = load_config(place)["model"]
    try:
        model = build_model(tree)
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise IntegrityError(f"not a model's config ({place}: {error}). fix: {FIX}") from None
    files = check_weights(model, place)  # before it has memory
    copy_weights(materialize(model, device, dtype), files)
    if not all(p.isfinite().all() for p in model.parameters()):
        errors.exit_with(
            errors.DIVERGED, f"weights contain NaN or infinity ({place}). fix: an older checkpoint"
        )
    return model.eval()


def find_model(place: Path | None) -> Path:
    """The newest checkpoint of a run, by default of the one in runs/ that saved last; or a model from elsewhere.

    Raises ValueError where there is none.
    """
    saved = sorted(
        Path("runs").glob("*/checkpoints/step-*"), key=lambda path: path.stat().st_mtime_ns
    )
    if place is None and not saved:
        raise ValueError("no trained model (in runs/). fix: python train.py, or --run FOLDER")
    found = newest_checkpoint(place or saved[-1].parents[1])
    if found is None:
        raise ValueError(
            f"no model ({place}). fix: a folder on this disk with checkpoints/step-* or config.json"
        )
    return found
