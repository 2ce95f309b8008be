"""A path to a model, its tokenizer and its name."""

import argparse
from pathlib import Path

from data.tokenizer import Tokenizer

CACHE = Path(__file__).parent / ".cache"


def load(given: argparse.Namespace, device):
    """The model of a run's newest checkpoint in the precision asked for, its tokenizer and its name."""
    import torch

    from checkpoints import checkpoint
    from common import compilation
    from inference import quantize

    found = checkpoint.find_model(given.run)
    if given.dtype == "int8" and device.type == "mps":
        raise ValueError(
            "no products with int8 weights here (--dtype int8, mps). fix: --dtype bf16"
        )
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    bf16 = given.dtype in ("bf16", "int8") or (given.dtype == "auto" and fast)
    model = checkpoint.load_model(found, device, torch.bfloat16 if bf16 else torch.float32)
    if device.type == "cpu":
        quantize.load_matvec(CACHE, compilation.cpp_compiler())
    quantize.optimize_for_decoding(model, given.dtype == "int8")
    name = (
        f"{found.parents[1].name} {found.name}"
        if (found / "manifest.json").exists()
        else found.name
    )
    return model, Tokenizer.load(checkpoint.tokenizer_path(found)), name
