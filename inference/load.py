"""Load from a path what generation needs: the model, its tokenizer and its name."""

from pathlib import Path

import torch

from data.tokenizer import Tokenizer
from inference import quantize
from model.build import build_model
from model.transformer import Transformer
from run import checkpoint, compilation, hardware
from run.instantiate import ROOT
from tools.formats.weights import is_own_checkpoint


def load(
    path: Path | str | None = None,
    device: torch.device | str = "auto",
    dtype: str = "auto",
    context: int | None = None,
) -> tuple[Transformer, Tokenizer, str]:
    """Load a run's newest checkpoint, or a model from elsewhere, optimized for decoding.

    Without a path, the run that saved last is loaded. `dtype` is auto, fp32, bf16 or int8, and
    `context` that of training or another one. Returns the model, its tokenizer and its name.
    Raises ValueError where there is no model, for int8 on a device that cannot multiply it, and for
    a context that the model cannot have.
    """
    if isinstance(device, str):
        device = hardware.pick_device(device)
    source = checkpoint.find_model(None if path is None else Path(path).expanduser())
    if dtype == "int8" and device.type == "mps":
        raise ValueError(
            "no products with int8 weights here (--dtype int8, mps). fix: --dtype bf16"
        )
    if context is not None:
        check_context(checkpoint.load_config(source)["model"], context)
    model = checkpoint.load_model(source, device, weight_dtype(dtype, device), context)
    if device.type == "cpu":
        quantize.load_matvec(ROOT / ".cache", compilation.cpp_compiler())
    if device.type == "cuda":
        # On H100 and newer, torch prefers cuDNN's attention (check_prefer_cudnn_attention in
        # aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), which builds a plan for each new
        # shape, so for each new length of a prompt, in tens of ms. The flash kernel needs none.
        torch.backends.cuda.enable_cudnn_sdp(False)
    quantize.optimize_for_decoding(model, dtype == "int8")

    # A checkpoint of ours is named after its run and its step.
    name = source.name
    if is_own_checkpoint(source):
        name = f"{source.parents[1].name} {name}"
    return model, Tokenizer.load(checkpoint.tokenizer_path(source)), name


def check_context(tree: dict, context: int) -> None:
    """Raise ValueError if a weight of the model has the size of the context it was trained with.

    Positions that are computed, as RoPE's are, go on after it.
    """
    trained = build_model(tree).state_dict()
    for name, tensor in build_model(tree | {"context": context}).state_dict().items():
        if tensor.shape != trained[name].shape:
            raise ValueError(
                f"{name} was trained for {tree['context']} tokens (--context {context}). "
                f"fix: --context {tree['context']}"
            )


def weight_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Choose the dtype to load weights in; int8 is quantized from bf16."""
    is_bf16 = dtype in ("bf16", "int8")
    if dtype == "auto" and device.type == "cuda":
        is_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_bf16 else torch.float32
