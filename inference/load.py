"""Load a model for generation, with its tokenizer and its name."""

from pathlib import Path

import torch

from data.tokenizer import Tokenizer, tokenizer_file
from inference import quantize
from model.transformer import Transformer
from run import checkpoint, compilation, hardware, threads
from run.cli import DTYPES
from run.paths import cache_folder
from run.progress import print0


def load(
    path: Path | str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    context: int | None = None,
) -> tuple[Transformer, Tokenizer, str]:
    """Load a checkpoint, or the newest checkpoint of a run, optimized for decoding.

    Without a path, load the run in runs/ that saved most recently. `dtype` is auto, fp32, bf16 or
    int8; `context` overrides the training context. Returns the model, its tokenizer and its name.
    On a CUDA GPU, this disables cuDNN attention in the whole process, in favor of flash attention.
    Raises ValueError for an unknown dtype, for a device that torch cannot use, or if there is no
    model, and IntegrityError if the checkpoint is damaged or does not fit `context`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype ({dtype}). fix: choose one of {', '.join(DTYPES)}")
    hardware.use_huge_pages()
    device = hardware.pick_device(device)
    source = checkpoint.find_model(path)
    is_bf16 = dtype in ("bf16", "int8")  # int8 is quantized from bf16
    if dtype == "auto" and device.type == "cuda":
        is_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    weight_dtype = torch.bfloat16 if is_bf16 else torch.float32
    model = checkpoint.load_model(source, device, weight_dtype, context)
    if device.type == "cpu":
        if reason := threads.choose_threads():
            print0(reason)
        quantize.load_matvec(cache_folder(), compilation.cpp_compiler())
    if device.type == "cuda":
        # On Hopper and data-center Blackwell GPUs, torch prefers cuDNN's attention
        # (check_prefer_cudnn_attention in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp),
        # which spends tens of ms on planning each new shape, and therefore each new prompt length.
        # The flash kernel needs no plan.
        torch.backends.cuda.enable_cudnn_sdp(False)
    quantize.optimize_for_decoding(model, dtype == "int8")
    # A device that emulates bf16 computes everything but the int8 products faster in fp32.
    if dtype == "int8" and device.type != "mps" and not hardware.multiplies_bf16(device):
        model.float()
    return model, Tokenizer.load(tokenizer_file(source)), model_name(source)


def model_name(checkpoint: Path) -> str:
    """Return a checkpoint's name for messages, preceded by its run's name if it is in a run."""
    folder = checkpoint.resolve()
    if folder.parent.name == "checkpoints":
        return f"{folder.parents[1].name} {folder.name}"
    return folder.name
