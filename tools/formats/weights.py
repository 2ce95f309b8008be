"""The names and layouts of a model's weights in a class of `transformers`."""

from collections import defaultdict

import torch
from torch import Tensor

from model.transformer import Transformer
from tools.formats.architectures import ARCHITECTURES


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


def our_weights(
    theirs: dict[str, Tensor], model: Transformer, architecture: str
) -> dict[str, Tensor]:
    """Return the weights of a class that stores tensors as we do, under our names."""
    weights = {}
    for name, file_name in file_names(model, architecture).items():
        if name.endswith(ARCHITECTURES[architecture].zeros):
            weights[name] = torch.zeros(model.get_parameter(name).shape)
        else:
            weights[name] = theirs[file_name]
    return weights
