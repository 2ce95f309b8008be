"""The names of a model's weights in a class of `transformers`, and the files that store them."""

import json
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from model.transformer import Transformer
from run.errors import IntegrityError
from tools.formats.architectures import ARCHITECTURES

FETCH_AGAIN = "download the model again"
HEAD = "lm_head.weight"
WHOLE = "model.safetensors"  # the file name of a model in a single file


def file_names(model: Transformer, architecture: str) -> dict[str, str]:
    """Map our names for parameters and persistent buffers to the transformers class's names."""
    adapter = ARCHITECTURES[architecture]
    found = {}
    for name in model.state_dict():
        names = adapter.names
        parts = name.split(".")
        if "attention" in parts:
            layer = int(parts[1])  # of blocks.LAYER.attention.(...)
            names = names | adapter.attention_names(model.blocks[layer].attention)
        found[name] = ".".join(names.get(part, part) for part in parts)
    return found


def hf_weights(model: Transformer, architecture: str) -> dict[str, Tensor]:
    """Return a model's weights with the names and layouts of a class of `transformers`."""
    weights = model.state_dict()
    parts = defaultdict(list)  # one tensor may hold several of our parameters
    for name, file_name in file_names(model, architecture).items():
        parts[file_name].append(weights[name])
    packed = {}
    for name, tensors in parts.items():
        packed[name] = ARCHITECTURES[architecture].pack(name, tensors, model)
        assert packed[name].numel() == sum(tensor.numel() for tensor in tensors)
    return packed


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return a folder's tensors: from one file, from the files in an index, or from all files.

    transformers reads the same files. Raises IntegrityError if files cannot be read, or if the
    index names different tensors.
    """
    whole = folder / WHOLE
    index = folder / f"{WHOLE}.index.json"
    file_of = {}  # by tensor name
    if whole.exists():
        files = [whole]
    elif index.exists():
        file_of = read_index(index)
        files = sorted(set(file_of.values()))
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise IntegrityError(
            f"weights are missing ({folder} has no .safetensors). fix: download them (.bin files "
            "are pickles, which could run code)"
        )
    tensors = {}
    for file in files:
        try:
            read = load_file(file)
        except (OSError, SafetensorError) as error:
            raise IntegrityError(f"invalid weights ({file}: {error}). fix: {FETCH_AGAIN}") from None
        if tensors.keys() & read.keys():
            raise IntegrityError(
                f"two files have the same tensor ({file}). fix: keep the files of only one model"
            )
        named = {name for name, place in file_of.items() if place == file}
        if file_of and named != read.keys():
            different = ", ".join(sorted(named ^ read.keys())[:3])
            raise IntegrityError(
                f"the index and {file.name} list different tensors ({index}: {different}). "
                f"fix: {FETCH_AGAIN}"
            )
        tensors |= read
    return tensors


def read_index(index: Path) -> dict[str, Path]:
    """Return the file of each tensor of a model that is stored in several files.

    Raises IntegrityError for an index that is malformed, or names files that are missing or not in
    its folder.
    """
    try:
        file_of = {}
        for tensor, name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            file_of[tensor] = index.parent / name
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"invalid index ({index}: {error}). fix: {FETCH_AGAIN}") from None
    for file in sorted(set(file_of.values())):
        if file.parent != index.parent or not file.is_file():
            raise IntegrityError(f"weights are missing ({file}). fix: {FETCH_AGAIN}")
    return file_of


def read_weights(folder: Path, model: Transformer, architecture: str) -> dict[str, Tensor]:
    """Return the weights in a folder under our names, memory-mapped.

    Raises IntegrityError if they cannot be read, or do not match the model.
    """
    tensors = read_tensors(folder)

    # Old files of `transformers` contain RoPE's frequencies, which we recompute, and some tied
    # models store the head as a copy of the embedding (Qwen3-0.6B).
    for name in list(tensors):
        if name.endswith("rotary_emb.inv_freq"):
            del tensors[name]
    embedding = tensors.get("model.embed_tokens.weight")
    has_copy = model.head is None and embedding is not None and HEAD in tensors
    if has_copy and torch.equal(tensors[HEAD], embedding):
        del tensors[HEAD]
    weights = {}
    different = []
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, file_name in file_names(model, architecture).items():
        if name.endswith(ARCHITECTURES[architecture].zeros):
            # The class has no such tensor: if the files have one, it is left over and rejected.
            weights[name] = torch.zeros(shapes[name])
            continue
        weight = tensors.pop(file_name, None)
        if weight is None or weight.shape != shapes[name]:
            different.append(file_name)
        else:
            weights[name] = weight
    different += tensors  # tensors that the model lacks
    if different:
        raise IntegrityError(
            f"the weights do not match the config ({folder}: {', '.join(different[:3])}). "
            f"fix: {FETCH_AGAIN}"
        )
    return weights
