"""A checkpoint is a sealed folder.

step-00000500/  model.safetensors  state.pt  config.json  tokenizer.model  manifest.json
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
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data import IntegrityError, sealed
from model.build import build
from model.transformer import Transformer
from training.distributed import distribute

KEPT = 2
STEPS = "step-" + 8 * "[0-9]"
FILES = ("model.safetensors", "state.pt", "config.json", "tokenizer.model")
FIX = "use an older checkpoint, or train anew in another folder"


def ready(run: Path, model: Transformer, resume: bool) -> Path | None:
    """Removes what a crash left -> what to go on from. Raises OSError where two checkpoints would not fit."""
    sealed.tidy(run / "checkpoints")
    needed = (KEPT + 1) * 3 * sum(p.nbytes for p in model.parameters())  # an optimizer has up to two numbers a weight
    free = shutil.disk_usage(run).free
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"{KEPT + 1} checkpoints need {needed / 1e6:.1f} MB, free are {free / 1e6:.1f}", str(run)
        )
    found = newest(run) if resume else None
    if found is not None:
        prune(found)
    return found


def save(run: Path, step: int, weights: dict[str, Tensor], trees: dict, tokenizer: bytes, state: dict) -> Path:
    """Survives a crash at any instant: what is named step-* is complete. Removes all but the newest KEPT."""
    folder = run / "checkpoints"
    done = folder / f"step-{step:08d}"
    with sealed.written(done) as unsealed:
        write_weights(unsealed.create("model.safetensors"), weights)
        torch.serialization.set_crc32_options(False)  # the manifest has a better sum
        try:
            torch.save(state, unsealed.create("state.pt"))
        except RuntimeError as error:  # torch's own, about what a full disk did to it
            raise error.__context__ or error from None
        unsealed.create("config.json").write(json.dumps(trees, indent=1).encode())
        unsealed.create("tokenizer.model").write(tokenizer)
        unsealed.about = {"step": step}
    for path in (run, run.parent):  # the names of the folders themselves
        sealed.sync(path)
    prune(done)
    return done


def prune(good: Path) -> None:
    """Keeps KEPT, the last of which is good: those after it are damaged, and set aside for their owner."""
    for path in good.parent.glob(STEPS):
        if path > good:
            path.rename(path.with_name(f"damaged-{time.time_ns()}-{path.name}"))
    for old in sorted(good.parent.glob(STEPS))[:-KEPT]:
        sealed.remove(old)


def write_weights(file: sealed.HashedFile, weights: dict[str, Tensor]) -> None:
    """The format of huggingface.co/docs/safetensors, written as a stream: its library would copy all weights first."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    weights = {name: tensor.contiguous().cpu() for name, tensor in weights.items()}
    for name, tensor in weights.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    file.write(struct.pack("<Q", len(head)) + head)
    for tensor in weights.values():
        assert tensor.dtype == torch.float32
        file.write(memoryview(tensor.numpy()))


def verify(checkpoint: Path) -> None:
    """Raises IntegrityError where a file is missing, or not what was written."""
    missing = set(FILES) - sealed.verified(checkpoint, FIX)["files"].keys()
    if missing:
        raise IntegrityError(f"incomplete checkpoint ({checkpoint} has no {', '.join(sorted(missing))}). fix: {FIX}")


def newest(run: Path) -> Path | None:
    """The newest checkpoint that verifies; None where there is none. Raises IntegrityError where all are damaged."""
    found = sorted((run / "checkpoints").glob(STEPS), reverse=True)
    for checkpoint in found:
        try:
            verify(checkpoint)
            return checkpoint
        except IntegrityError as error:
            print(f"warning: skipped: {str(error).partition('. fix: ')[0]}", file=sys.stderr)
    if found:
        raise IntegrityError(f"no checkpoint is whole ({len(found)} in {run}). fix: train anew in another folder")
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
    except (UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise IntegrityError(
            f"unsafe or unreadable content ({checkpoint / 'state.pt'}: {reason}). fix: {FIX}"
        ) from None


@torch.no_grad()
def load_weights(model: Transformer, checkpoint: Path, device: torch.device | str | None = None) -> None:
    """One tensor at a time, so that memory holds little more than the model; `device`: where a meta model gets its own.

    Raises IntegrityError where names or shapes are not the model's.
    """
    check_weights(model, checkpoint)
    if device is not None:
        model.to_empty(device=device)
    for name, tensor in model.state_dict().items():
        with safe_open(checkpoint / "model.safetensors", "pt") as file:  # opened anew, so that what was read is let go
            tensor.copy_(distribute(file.get_tensor(name), tensor))


def check_weights(model: Transformer, checkpoint: Path) -> None:
    path, weights = checkpoint / "model.safetensors", model.state_dict()
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise IntegrityError(f"not weights ({path}: {error}). fix: {FIX}") from None
    other = [name for name in {**weights, **shapes} if name not in weights or shapes.get(name) != weights[name].shape]
    if other:
        raise IntegrityError(f"not the model's weights ({path}: {', '.join(other[:3])}). fix: {FIX}")


def config_of(checkpoint: Path) -> dict:
    """The settings of the run that wrote it, as plain data."""
    try:
        settings = json.loads((checkpoint / "config.json").read_text())
        if not isinstance(settings, dict) or not isinstance(settings.get("model"), dict):
            raise ValueError("no model in it")
        return settings
    except ValueError as error:
        raise IntegrityError(f"not a run's settings ({checkpoint / 'config.json'}: {error}). fix: {FIX}") from None


def load_model(checkpoint: Path, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model of a checkpoint, built from the config in it."""
    try:
        with torch.device("meta"):
            model = build(config_of(checkpoint)["model"]).to(dtype)
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise IntegrityError(f"not a model's config ({checkpoint / 'config.json'}: {error}). fix: {FIX}") from None
    load_weights(model, checkpoint, device)
    return model.eval()
