"""A checkpoint is a folder that is whole or not there: written aside, sealed by a manifest, renamed.

step-00000500/  model.safetensors  state.pt  config.json  tokenizer.model  manifest.json
"""

import io
import json
import os
import shutil
import sys
from collections.abc import Iterator
from hashlib import file_digest, sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialise

from data import IntegrityError
from data.tokenizer import Tokenizer
from model.build import build
from model.transformer import Transformer

KEPT = 2
FILES = ("model.safetensors", "state.pt", "config.json", "tokenizer.model")


def save(run: Path, step: int, model: Transformer, trees: dict, tokenizer: bytes, state: dict) -> Path:
    """Survives a crash at any instant: what is named step-* is complete. Removes all but the newest KEPT."""
    folder = run / "checkpoints"
    unfinished, done = folder / f".tmp-{step:08d}", folder / f"step-{step:08d}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        (unfinished / "model.safetensors").write_bytes(serialise(weights, {"format": "pt"}))
        buffer = io.BytesIO()  # so that a full disk is an OSError
        torch.save(state, buffer)
        (unfinished / "state.pt").write_bytes(buffer.getbuffer())
        (unfinished / "config.json").write_text(json.dumps(trees, indent=1))
        (unfinished / "tokenizer.model").write_bytes(tokenizer)
        for name in FILES:
            sync(unfinished / name)
        files = {
            name: {"size": (unfinished / name).stat().st_size, "sha256": digest(unfinished / name)} for name in FILES
        }
        body = json.dumps({"format": 1, "step": step, "files": files}, indent=1)
        (unfinished / "manifest.json").write_text(f"{body}\n{sha256(body.encode()).hexdigest()}\n")
        sync(unfinished / "manifest.json")
        sync(unfinished)
        shutil.rmtree(done, ignore_errors=True)
        unfinished.rename(done)
        sync(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for old in sorted(folder.glob("step-*"))[:-KEPT]:
        trash = old.with_name(f".trash-{old.name}")
        old.rename(trash)
        shutil.rmtree(trash)
    return done


def sync(path: Path) -> None:
    """Onto the disk itself, not just into the system's memory."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def verify(checkpoint: Path) -> dict:
    """The manifest. Raises IntegrityError where it, or a file that it names, is not what was written."""
    try:
        body, _, rest = (checkpoint / "manifest.json").read_text().rpartition("\n}\n")
        if sha256(f"{body}\n}}".encode()).hexdigest() != rest.strip():
            raise IntegrityError(f"damaged manifest ({checkpoint}). fix: use an older checkpoint")
        manifest = json.loads(f"{body}\n}}")
        for name in FILES:
            said = manifest["files"][name]
            if (checkpoint / name).stat().st_size != said["size"] or digest(checkpoint / name) != said["sha256"]:
                raise IntegrityError(f"damaged file ({checkpoint / name}). fix: use an older checkpoint")
    except (OSError, UnicodeDecodeError) as error:
        raise IntegrityError(f"incomplete checkpoint ({checkpoint}: {error}). fix: use an older checkpoint") from None
    return manifest


def newest(run: Path) -> Path | None:
    """The newest checkpoint that verifies; None where there is none. Raises IntegrityError where all are damaged."""
    found = sorted((run / "checkpoints").glob("step-*"), reverse=True)
    for checkpoint in found:
        try:
            verify(checkpoint)
            return checkpoint
        except IntegrityError as error:
            print(f"warning: skipped: {error}", file=sys.stderr)
    if found:
        raise IntegrityError(f"no checkpoint is whole ({len(found)} in {run}). fix: train anew in another folder")
    return None


def load_state(checkpoint: Path) -> dict:
    return torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)


def load_weights(model: Transformer, checkpoint: Path, device: torch.device | str, assign: bool = False) -> None:
    """Raises IntegrityError where names or shapes are not the model's."""
    try:
        model.load_state_dict(load_file(checkpoint / "model.safetensors", device=str(device)), assign=assign)
    except (SafetensorError, RuntimeError) as error:
        raise IntegrityError(
            f"weights do not fit the model ({checkpoint}: {error}). fix: the config that they were trained with"
        ) from None


def check_same(checkpoint: Path, trees: dict, tokenizer: Tokenizer) -> None:
    """Raises ValueError where one of `trees` is another in the checkpoint, IntegrityError where its tokenizer is."""
    saved = json.loads((checkpoint / "config.json").read_text())
    then, now = dict(flat({name: saved[name] for name in trees})), dict(flat(trees))
    keys = [key for key in now if then.get(key) != now[key]]
    changed = [f"{key} (checkpoint {then.get(key)}, now {now[key]})" for key in keys]
    if changed:
        raise ValueError(f"{checkpoint} has another {', '.join(changed)}. fix: the old values, or another run_dir")
    theirs, ours = Tokenizer.load(checkpoint / "tokenizer.model").sha256[:12], tokenizer.sha256[:12]
    if theirs != ours:
        raise IntegrityError(
            f"another tokenizer ({checkpoint} {theirs}, now {ours}). fix: the data and init_from it had"
        )


def flat(tree: dict, path: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        yield from flat(value, f"{path}{key}.") if isinstance(value, dict) else [(f"{path}{key}", value)]


def load_model(checkpoint: Path, device: torch.device | str) -> Transformer:
    """The model of a checkpoint, in fp32, built from the config in it."""
    tree = json.loads((checkpoint / "config.json").read_text())["model"]
    with torch.device("meta"):
        model = build(tree)
    load_weights(model, checkpoint, device, assign=True)
    return model.eval()


def newest_run(root: Path) -> Path:
    """The run that saved last. Raises ValueError where there is none."""
    saved = sorted(root.glob("*/checkpoints/step-*"), key=lambda path: path.stat().st_mtime_ns)
    if not saved:
        raise ValueError(f"no trained model (in {root}/). fix: python train.py, or --run FOLDER")
    return saved[-1].parents[1]
