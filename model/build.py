"""Build the model of a config on the device where it will live."""

import torch
from torch.types import Device

from model.init import initialize
from model.transformer import Transformer
from run.instantiate import instantiate_model


def build_model(
    tree: dict, device: Device = "cpu", *, dtype: torch.dtype = torch.float32, seed: int | None = 0
) -> Transformer:
    """Build a model on `device`, with initial values that depend on the seed.

    `dtype` is for parameters; buffers have their own, as under autocast. Without a seed, parameters
    have no values yet: the caller loads or draws them. A model on the meta device has only shapes.
    Raises ValueError for a bad config.
    """
    device = torch.device(device)
    model = instantiate_model(tree, device, dtype)
    if seed is not None and device.type != "meta":
        initialize(model, seed)
    return model
