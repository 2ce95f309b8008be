"""Weights on disk: ours, those of `transformers`, and llama2.c's. Their names, layouts and files.

Nothing in a file is ever run: a pickle is refused.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.transformer import Transformer
from run.errors import IntegrityError
from tools.formats.architectures import ARCHITECTURES, Architecture
from tools.formats.llama2c import LazyTensor, Llama2c, open_llama2c

Weights = dict[str, Tensor]  # tensors by their names
LLAMA2C = "llama2.c"
FLOATS = ("F64", "F32", "F16", "BF16")
# Names of dtypes in the safetensors format.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
FETCH_AGAIN = "get all files of the model again"


class Own(Architecture):
    """Checkpoints of runs, where all parameters have our names."""

    names = {}


ADAPTERS = {None: Own(), LLAMA2C: Llama2c(), **ARCHITECTURES}


@dataclass
class StoredTensor:
    """How one tensor in a file stores one or more of our parameters.

    `shapes` maps the names of these parameters to their shapes. Their rows are concatenated, in
    this order, within each of `groups` equal parts. For example, Qwen3.5 has a group for each head,
    with the rows of its query and then those of its gate.
    """

    shapes: dict[str, torch.Size]
    groups: int = 1
    # In heads of this size, rows that RoPE rotates together are adjacent in the file; in our
    # parameters they are half a head apart.
    interleaved_head_dim: int | None = None
    # The file stores our values minus this: 1 for the norms of Qwen3.5.
    offset: float = 0.0

    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        first, *others = self.shapes.values()
        if not first:
            return ()  # a buffer of one number
        return first[0] + sum(shape[0] for shape in others), *first[1:]

    def to_file(self, weights: Weights) -> Tensor:
        """All our parameters -> the tensor of the file."""
        # (rows, ...) -> (groups, rows / groups, ...)
        groups = [weights[name].unflatten(0, (self.groups, -1)) for name in self.shapes]
        tensor = torch.cat(groups, dim=1).flatten(0, 1)
        if self.interleaved_head_dim is not None:
            tensor = interleave_rope(tensor, self.interleaved_head_dim)
        if self.offset != 0:
            tensor = tensor - self.offset
        return tensor

    def from_file(self, tensor: Tensor) -> Weights:
        """The tensor of the file -> our parameters."""
        if tensor.ndim == 0:
            return dict.fromkeys(self.shapes, tensor)
        if self.offset != 0:
            tensor = tensor + self.offset
        if self.interleaved_head_dim is not None:
            tensor = deinterleave_rope(tensor, self.interleaved_head_dim)
        rows = [shape[0] // self.groups for shape in self.shapes.values()]
        parts = tensor.unflatten(0, (self.groups, -1)).split(rows, dim=1)
        return {name: part.flatten(0, 1) for name, part in zip(self.shapes, parts, strict=True)}


def interleave_rope(weight: Tensor, head_dim: int) -> Tensor:
    """weight (H D, ...) -> the same shape.

    RoPE rotates row d of a head with row d + D/2 before, and row 2 d with row 2 d + 1 after.
    """
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


def deinterleave_rope(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of `interleave_rope`."""
    pairs = weight.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def weight_map(model: Transformer, kind: str | None) -> dict[str, StoredTensor]:
    """Map the names of the tensors in a model's files to how these store our parameters.

    `kind` is an architecture of `transformers` or LLAMA2C, or None for checkpoints of runs.
    """
    architecture = ADAPTERS[kind]
    stored = {}
    attention = None
    for name, parameter in model.state_dict().items():
        if name.startswith("blocks."):
            attention = model.blocks[int(name.split(".")[1])].attention
        names = architecture.names
        if ".attention." in name:
            names = names | architecture.attention_names(attention)
        file_name = ".".join(names.get(part, part) for part in name.split("."))
        # Several of our parameters may be stored in one tensor.
        if file_name not in stored:
            layout = architecture.layout(file_name, attention)
            stored[file_name] = StoredTensor({}, **layout)
        stored[file_name].shapes[name] = parameter.shape
    return stored


def dtype_name(name: str, tensor: Tensor) -> str:
    """What safetensors calls the dtype of a tensor. Raises ValueError for one that it lacks."""
    if tensor.dtype not in DTYPE_NAMES:
        known = ", ".join(map(str, DTYPE_NAMES))
        raise ValueError(
            f"a checkpoint cannot hold this dtype ({name}: {tensor.dtype}). "
            f"fix: one of {known}, or persistent=False"
        )
    return DTYPE_NAMES[tensor.dtype]


def is_own_checkpoint(path: Path) -> bool:
    """Whether this is a checkpoint of a run, and not a model from elsewhere."""
    return (path / "manifest.json").exists()


def open_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a folder's safetensors files, or of a file of llama2.c, by name.

    Raises IntegrityError where they cannot be read, for a pickle, for quantized weights, and for a
    tensor that two files hold.
    """
    if not path.is_dir():
        return open_llama2c(path)[1]
    # Our own buffers may be of any dtype; elsewhere, integers are quantized weights.
    allowed = DTYPE_NAMES.values() if is_own_checkpoint(path) else FLOATS
    tensors = {}
    for file in weight_files(path):
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if name in tensors:
                        raise IntegrityError(
                            f"two files hold one tensor ({name}, again in {file}). "
                            "fix: the files of one model alone"
                        )
                    description = opened.get_slice(name)
                    dtype = description.get_dtype()
                    if dtype not in allowed:
                        raise IntegrityError(
                            f"quantized weights ({file}: {name} is {dtype}). "
                            f"fix: {', '.join(FLOATS)}"
                        )
                    shape = tuple(description.get_shape())
                    tensors[name] = LazyTensor(shape, partial(read_tensor, file, name))
        except SafetensorError as error:
            raise IntegrityError(f"not weights ({file}: {error}). fix: {FETCH_AGAIN}") from None
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the files that it was split into. Raises IntegrityError for none."""
    whole = folder / "model.safetensors"
    if whole.exists():
        return [whole]
    # The index of a model in several files is not read: a missing file is a missing tensor.
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    if not files:
        raise IntegrityError(
            f"weights are missing ({folder} has no model.safetensors). "
            "fix: fetch them (a .bin is a pickle, which could run code)"
        )
    return files


def read_tensor(file: Path, name: str) -> Tensor:
    # Open the file again for each tensor, so that the pages read before are released.
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)


def read_config(path: Path) -> dict:
    """config.json of a folder, or what the header of llama2.c says in its terms.

    Raises IntegrityError for another file.
    """
    if not path.is_dir():
        return open_llama2c(path)[0]
    file = path / "config.json"
    try:
        config = json.loads(file.read_text())
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"not the config of a model ({file}: {error}). fix: {FETCH_AGAIN}"
        ) from None
    return config
