"""A checkpoint is a folder that is whole or not there: written aside, sealed by a manifest, renamed.

step-00000500/  model.safetensors  state.pt  config.json  tokenizer.model  manifest.json
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from hashlib import file_digest, sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from data import IntegrityError
from data.tokenizer import Tokenizer
from model.build import build
from model.transformer import Transformer

KEPT = 2
FILES = ("model.safetensors", "state.pt", "config.json", "tokenizer.model")


def save(run: Path, step: int, model: Transformer, tree: dict, tokenizer: bytes, state: dict) -> Path:
    """Survives a crash at any instant: what is named step-* is complete. Removes all but the newest KEPT."""
    folder = run / "checkpoints"
    unfinished, done = folder / f".tmp-{step:08d}", folder / f"step-{step:08d}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
            unfinished / "model.safetensors",
            {"format": "pt"},
        )
        torch.save(state, unfinished / "state.pt")
        (unfinished / "config.json").write_text(json.dumps({"model": tree}, indent=1))
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


def check_same(checkpoint: Path, tree: dict, tokenizer: Tokenizer) -> None:
    """Raises ValueError where the checkpoint's model is another, IntegrityError where its tokenizer is."""
    trees = json.loads((checkpoint / "config.json").read_text())["model"], tree
    then, now = (dict(flat(tree, "model")) for tree in trees)
    changed = [
        f"{key} (checkpoint {then.get(key)}, now {now.get(key)})" for key in then | now if then.get(key) != now.get(key)
    ]
    if changed:
        raise ValueError(f"the checkpoint has another {', '.join(changed)}. fix: the old values, or another run_dir")
    theirs, ours = Tokenizer.load(checkpoint / "tokenizer.model").sha256, tokenizer.sha256
    if theirs != ours:
        raise IntegrityError(
            f"the checkpoint has another tokenizer ({theirs[:12]}, now {ours[:12]}). fix: its own text"
        )


def flat(tree: dict, path: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        yield from flat(value, f"{path}.{key}") if isinstance(value, dict) else [(f"{path}.{key}", value)]


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
