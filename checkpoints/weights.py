"""Weights as files hold them: our own, those of `transformers`, and llama2.c's.

Nothing in them is ever run: a pickle is refused.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from checkpoints.llama2c import TensorReaders, open_llama2c
from common.errors import IntegrityError
from model.attention.gated_delta import GatedDelta
from model.attention.mla import LatentAttention
from model.transformer import Transformer

LLAMA2C, FLOATS = "llama2.c", ("F64", "F32", "F16", "BF16")
DTYPE_NAMES = {  # of the safetensors format
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
WHOLE = "all files of the model, as they were made"
NAMES = {
    "embed": "model.embed_tokens", "blocks": "model.layers", "norm": "model.norm", "head": "lm_head", "ffn": "mlp",
    "attention_norm": "input_layernorm", "attention": "self_attn", "ffn_norm": "post_attention_layernorm",
    "sink": "sinks", "q1": "lambda_q1", "k1": "lambda_k1", "q2": "lambda_q2", "k2": "lambda_k2",
}  # fmt: skip
LATENT_NAMES = {
    "q_down_proj": "q_a_proj", "q_down_norm": "q_a_layernorm", "latent_proj": "kv_a_proj_with_mqa",
    "rope_proj": "kv_a_proj_with_mqa", "latent_norm": "kv_a_layernorm", "kv_proj": "kv_b_proj",
}  # fmt: skip
DELTA_NAMES = {
    "attention": "linear_attn", "taps": "conv1d.weight", "decay_rate": "A_log", "decay_bias": "dt_bias",
    "q_proj": "in_proj_qkv", "k_proj": "in_proj_qkv", "v_proj": "in_proj_qkv", "gate_proj": "in_proj_z",
    "decay_proj": "in_proj_a", "write_proj": "in_proj_b", "out_norm": "norm", "o_proj": "out_proj",
}  # fmt: skip


@dataclass
class StoredTensor:
    """How a tensor of a file holds our parameters `names`, of `rows` each: one after the other in each of `groups`.

    `turned`: rows that RoPE turns are side by side, and not `turned` / 2 apart. `less`: what is taken from each number.
    """

    names: list[str]
    rows: list[int]
    groups: int = 1
    turned: int = 0
    less: float = 0.0

    def shape(self, state: dict[str, Tensor]) -> tuple[int, ...]:
        """Of the stored tensor; `state` has ours, by name."""
        if len(self.names) == 1:
            return tuple(state[self.names[0]].shape)
        return sum(self.rows), *state[self.names[0]].shape[1:]

    def join(self, ours: list[Tensor]) -> Tensor:
        theirs = torch.cat([x.unflatten(0, (self.groups, -1)) for x in ours], dim=1).flatten(0, 1)
        if self.turned:
            theirs = theirs.unflatten(0, (-1, 2, self.turned // 2)).transpose(1, 2).flatten(0, 2)
        return theirs - self.less if self.less else theirs

    def split(self, theirs: Tensor) -> list[Tensor]:
        if theirs.ndim == 0:  # a buffer of one number
            return [theirs]
        theirs = theirs + self.less if self.less else theirs
        if self.turned:
            theirs = theirs.unflatten(0, (-1, self.turned // 2, 2)).transpose(1, 2).flatten(0, 2)
        parts = theirs.unflatten(0, (self.groups, -1)).split(
            [rows // self.groups for rows in self.rows], dim=1
        )
        return [part.flatten(0, 1) for part in parts]


def weight_map(model: Transformer, kind: str | None) -> dict[str, StoredTensor]:
    """By their names, how a class of `transformers` or llama2.c holds our parameters; None: each as it is."""
    stored, attention = {}, None
    for ours, tensor in model.state_dict().items():
        if ours.startswith("blocks."):
            attention = model.blocks[int(ours.split(".")[1])].attention
        theirs = ours if kind is None else hf_name(ours, attention)
        if theirs not in stored:
            stored[theirs] = StoredTensor([], [])
        stored[theirs].names.append(ours)
        stored[theirs].rows.append(len(tensor) if tensor.ndim > 0 else 1)
        if kind == "Qwen3_5" and "self_attn.q_proj" in theirs:
            stored[theirs].groups = attention.heads
        if kind == "Qwen3_5" and "norm" in theirs and "linear_attn" not in theirs:
            stored[theirs].less = 1.0
        if kind in ("Llama4", LLAMA2C) and ("q_proj" in theirs or "k_proj" in theirs):
            stored[theirs].turned = attention.head_dim
        if kind == "Llama4":
            stored[theirs.replace(".mlp.", ".feed_forward.")] = stored.pop(theirs)
    return stored


def hf_name(ours: str, attention: nn.Module) -> str:
    """`attention` is that of the parameter's layer."""
    inside = NAMES if ".attention." not in ours else NAMES | {"gate_proj": "q_proj"}
    if isinstance(attention, LatentAttention) and inside is not NAMES:
        inside = (
            NAMES | LATENT_NAMES | ({} if attention.q_down_proj is None else {"q_proj": "q_b_proj"})
        )
    if isinstance(attention, GatedDelta) and inside is not NAMES:
        inside = NAMES | DELTA_NAMES
    return ".".join(inside.get(part, part) for part in ours.split("."))


def dtype_name(name: str, tensor: Tensor) -> str:
    """What safetensors calls its dtype. Raises ValueError, with `name`, for one that it lacks."""
    if tensor.dtype not in DTYPE_NAMES:
        fix = f"one of {', '.join(str(dtype) for dtype in DTYPE_NAMES)}, or persistent=False"
        raise ValueError(
            f"a checkpoint cannot hold this dtype ({name}: {tensor.dtype}). fix: {fix}"
        )
    return DTYPE_NAMES[tensor.dtype]


def open_tensors(place: Path) -> TensorReaders:
    """The tensors of a folder's safetensors files, or of llama2.c's .bin; from elsewhere, floats only.

    Raises IntegrityError where they cannot be read, and for a pickle.
    """
    if not place.is_dir():
        return open_llama2c(place)[1]
    index, files = place / "model.safetensors.index.json", [place / "model.safetensors"]
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if any(Path(name).name != name for name in names):
                raise ValueError("it leads elsewhere")
            files = [place / name for name in names]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise IntegrityError(
                f"not an index of weights ({index}: {error!r}). fix: fetch it again"
            ) from None
    allowed = DTYPE_NAMES.values() if (place / "manifest.json").exists() else FLOATS
    found = {}
    for file in files:
        if not file.exists():
            pickles = [path.name for path in place.glob("*.bin")]
            why = (
                f"has {pickles[0]}, a pickle, which could run code"
                if pickles
                else f"has no {file.name}"
            )
            raise IntegrityError(
                f"weights are missing ({place} {why}). fix: all of its .safetensors files"
            )
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if (kind := opened.get_slice(name).get_dtype()) not in allowed:
                        raise IntegrityError(
                            f"quantized weights ({file}: {name} is {kind}). fix: {', '.join(FLOATS)}"
                        )
                    found[name] = (
                        tuple(opened.get_slice(name).get_shape()),
                        partial(read_tensor, file, name),
                    )
        except SafetensorError as error:
            raise IntegrityError(f"not weights ({file}: {error}). fix: {WHOLE}") from None
    return found


def read_tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:  # anew for each, so that what was read is let go
        return opened.get_tensor(name)


def read_config(place: Path) -> dict:
    """config.json of a folder, or what llama2.c's header says in its terms. Raises IntegrityError for another file."""
    if not place.is_dir():
        return open_llama2c(place)[0]
    try:
        found = json.loads((place / "config.json").read_text())
        if not isinstance(found, dict):
            raise ValueError("not an object")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"not a model's settings ({place / 'config.json'}: {error}). fix: {WHOLE}"
        ) from None
