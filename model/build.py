"""Build a model from its config, directly on its target device."""

import torch
from torch.types import Device

from model.init import initialize
from model.transformer import Transformer
from run.instantiate import instantiate_model


def build_model(
    tree: dict, device: Device = "cpu", *, dtype: torch.dtype = torch.float32, seed: int | None = 0
) -> Transformer:
    """Build a model on `device`, and initialize its parameters from the seed.

    `dtype` applies to matrices and to the biases of linear layers. Other vectors, such as the
    weights of norms, are in fp32 or wider, and buffers keep their own dtypes, as under autocast. If
    `seed` is None, parameters are left uninitialized, and the caller must load or sample them. On
    the meta device, a model has only shapes. Raises ValueError for an invalid config.
    """
    device = torch.device(device)
    model = instantiate_model(tree, device, dtype)
    if seed is not None and device.type != "meta":
        initialize(model, seed)
    return model
