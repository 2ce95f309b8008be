"""The format that export.py of github.com/karpathy/llama2.c calls version 0."""

import math
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.errors import IntegrityError

TensorReaders = dict[
    str, tuple[tuple[int, ...], Callable[[], Tensor]]
]  # by name: a shape, and what reads the tensor


def open_llama2c(file: Path) -> tuple[dict, TensorReaders]:
    """Settings and tensors of the format that export.py of github.com/karpathy/llama2.c calls version 0."""
    with file.open("rb") as opened:
        head = opened.read(28)
    numbers = struct.unpack("<7i", head) if len(head) == 28 else (0,) * 7
    dim, hidden, depth, heads, kv_heads, vocabulary, context = numbers
    tied, vocabulary = vocabulary > 0, abs(vocabulary)
    size = dim // max(heads, 1)
    each = {
        "input_layernorm": (dim,), "self_attn.q_proj": (dim, dim), "self_attn.k_proj": (kv_heads * size, dim),
        "self_attn.v_proj": (kv_heads * size, dim), "self_attn.o_proj": (dim, dim), "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (hidden, dim), "mlp.down_proj": (dim, hidden), "mlp.up_proj": (hidden, dim),
    }  # fmt: skip
    order = [("model.embed_tokens", (vocabulary, dim))]
    order += [
        (f"model.layers.{n}.{name}", shape)
        for name, shape in each.items()
        for n in range(min(depth, 2**12))
    ]
    order += [
        ("model.norm", (dim,)),
        ("cosines", (context, size // 2)),
        ("sines", (context, size // 2)),
    ]
    order += [] if tied else [("lm_head", (vocabulary, dim))]
    needed = 28 + 4 * sum(math.prod(shape) for _, shape in order)
    if min((*numbers[:5], vocabulary, context)) < 1 or file.stat().st_size != needed:
        raise IntegrityError(
            f"not weights of llama2.c ({file}: {head[:4]!r}...). fix: its version 0, or safetensors"
        )
    tensors, start = {}, 28
    for name, shape in order:
        tensors[f"{name}.weight"] = shape, partial(memmap_tensor, file, start, shape)
        start += 4 * math.prod(shape)
    del tensors["cosines.weight"], tensors["sines.weight"]
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": depth,
    }
    shape |= {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
    }
    shape |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": tied}
    return {"architectures": ["LlamaForCausalLM"], **shape}, tensors


def memmap_tensor(file: Path, start: int, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.memmap(file, "<f4", "c", start, shape))
