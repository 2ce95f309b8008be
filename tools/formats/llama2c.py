"""Models of github.com/karpathy/llama2.c, in the format that its export.py calls version 0.

The file is a header of seven int32, then all tensors in fp32, each for all layers before the next.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from run.errors import IntegrityError
from tools.formats.architectures import MOST_LAYERS, Llama

HEADER = struct.Struct("<7i")


@dataclass
class LazyTensor:
    """A tensor in a file; `read()` loads it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class Llama2c(Llama):
    """Llama's names, but rows that RoPE rotates together are adjacent."""

    has_interleaved_rope = True


def open_llama2c(file: Path) -> tuple[dict, dict[str, LazyTensor]]:
    """A file -> the entries of a Llama's config.json, and the tensors by Llama's names.

    Raises IntegrityError where header and length of the file do not fit.
    """
    with file.open("rb") as opened:
        header = opened.read(HEADER.size)
    # A file that is shorter has zeros for sizes, and is refused below.
    sizes = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
    dim, hidden, depth, heads, kv_heads, signed_vocab_size, context = sizes
    vocab_size = abs(signed_vocab_size)
    tied = signed_vocab_size > 0

    # The shapes of all tensors, in the order of the file.
    head_dim = dim // max(heads, 1)
    layer_shapes = {
        "input_layernorm": (dim,),
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv_heads * head_dim, dim),
        "self_attn.v_proj": (kv_heads * head_dim, dim),
        "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
        "mlp.up_proj": (hidden, dim),
    }
    shapes = {"model.embed_tokens": (vocab_size, dim)}
    for name, shape in layer_shapes.items():
        for layer in range(min(depth, MOST_LAYERS)):
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm"] = (dim,)
    shapes["rope"] = (2, context, head_dim // 2)
    if not tied:
        shapes["lm_head"] = (vocab_size, dim)

    # Where each tensor begins.
    tensors = {}
    offset = HEADER.size
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = LazyTensor(shape, partial(read_tensor, file, offset, shape))
        offset += 4 * math.prod(shape)
    smallest = min(dim, hidden, depth, heads, kv_heads, vocab_size, context)
    if smallest < 1 or file.stat().st_size != offset:
        raise IntegrityError(
            f"not weights of llama2.c ({file}: {header[:4]!r}...). "
            "fix: its version 0, or safetensors"
        )
    # The cosines and sines of RoPE are computed anew.
    del tensors["rope.weight"]

    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    }
    return config, tensors


def read_tensor(file: Path, offset: int, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.memmap(file, "<f4", "c", offset, shape))
