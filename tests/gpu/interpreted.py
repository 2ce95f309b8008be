"""Run generated code on the CPU, its kernels in Triton's interpreter, and compare with definitions.

The code is what Inductor writes for a GPU; only the device of its tensors is changed. Needs a CUDA
build of torch, with its Triton: docs/gpu.md. Prints the largest error of the output and of each
gradient, in units of its largest value.

    TRITON_INTERPRET=1 python -m tests.gpu.interpreted attention --case sink --context 100
    TRITON_INTERPRET=1 python -m tests.gpu.interpreted training attention=mla
"""

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import monotonic
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from model.attention.kernels import AttentionKernel, eager_attention
from model.build import build_model, materialize
from model.context import ForwardContext
from tests.conftest import redraw, settings_of, shrink
from tests.gpu.lowering import (
    GPUS,
    Lowering,
    gpu_present,
    lower_training,
    lowering_for,
    whole_pattern,
)
from training.loss import LanguageModelLoss

# Functions of CUDA's mathematical library, which the interpreter does not have.
LIBDEVICE = {
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
}
# Few multiprocessors: with more, the kernel for short queries divides the keys among more blocks.
GPU = replace(GPUS["sm_90"], multiprocessors=8)
B = 2
VOCAB_SIZE = 100


@dataclass(frozen=True)
class Case:
    """Options of softmax attention."""

    window: int | None = None
    softcap: float | None = None
    has_sink: bool = False
    has_documents: bool = False


CASES = {
    "mask": Case(window=40),
    "softcap": Case(softcap=2.0),
    "sink": Case(has_sink=True),
    "documents": Case(has_documents=True),
    "all": Case(window=40, softcap=2.0, has_sink=True, has_documents=True),
}


class CaseAttention(nn.Module):
    """Self-attention with the options of a case, by the kernel that a compiled model takes."""

    def __init__(self, case: Case):
        super().__init__()
        self.case = case
        self.kernel = AttentionKernel(softcap=case.softcap)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, documents: Tensor
    ) -> Tensor:
        """q (B, T, H, D), k and v (B, T, K, D), sink (H,), documents (B, T) -> (B, T, H, D)."""
        packed = documents if self.case.has_documents else None
        visible = ForwardContext(documents, None, None, packed).visible(self.case.window, None)
        return self.kernel(q, k, v, visible, sink=sink)


def plain_attention(
    case: Case, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, documents: Tensor
) -> Tensor:
    """The same by the definition."""
    i = torch.arange(q.shape[1])[:, None]
    j = torch.arange(q.shape[1])
    mask = (j <= i)[None, None].expand(len(q), 1, -1, -1)
    if case.window is not None:
        mask = mask & (i - j < case.window)
    if case.has_documents:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return eager_attention(q, k, v, mask, softcap=case.softcap, sink=sink).transpose(1, 2)


def compare_attention(case: Case, context: int) -> dict[str, float]:
    """Compare output and gradients of compiled attention with those of the definition."""
    # Grouped queries, in heads of 16.
    torch.manual_seed(0)
    tensors = {"q": torch.randn(B, context, 4, 16)}
    tensors["k"] = torch.randn(B, context, 2, 16)
    tensors["v"] = torch.randn(B, context, 2, 16)
    tensors["sink"] = torch.randn(4) if case.has_sink else None
    tensors["documents"] = (torch.rand(B, context) < 0.05).cumsum(dim=1)
    grad = torch.randn(B, context, 4, 16)

    def require_gradients(values: dict[str, Tensor | None]) -> None:
        for x in values.values():
            if x is not None and x.is_floating_point():
                x.requires_grad_()

    with lowering_for(GPU) as lowering:
        fakes = {name: x if x is None else x.to("cuda") for name, x in tensors.items()}
        require_gradients(fakes)
        module = CaseAttention(case)
        module.compile(dynamic=False, fullgraph=True)
        with _disable_current_modes():
            y = module(*fakes.values())
            y.backward(torch.empty_like(y))
    assert lowering.launches()["template"] == 2  # forward and backward
    output, gradients = interpret(lowering, fakes, tensors, grad)

    exact = {}
    for name, x in tensors.items():
        exact[name] = x.double() if x is not None and x.is_floating_point() else x
    require_gradients(exact)
    expected = plain_attention(case, *exact.values())
    expected.backward(grad.double())
    errors = {"output": relative_error(output, expected.detach())}
    for name, x in exact.items():
        if x is not None and x.requires_grad:
            errors[name] = relative_error(gradients[name], x.grad)
    return errors


def compare_training(context: int, overrides: list[str]) -> dict[str, float]:
    """Compare a micro-batch of a tiny model with the same without compilation."""
    sizes = ("model=tiny", "model.dim=32", "model.hidden=48", "model.heads=2")
    data = (f"context={context}", f"micro_batch={B}", f"data.vocab_size={VOCAB_SIZE}")
    settings = settings_of("device=cpu", "model.depth=2", *sizes, *data, *overrides)
    settings["model"] = shrink(settings["model"])
    settings["model"]["depth"] = whole_pattern(settings)
    bos = 1 if settings["document_mask"] else None

    # The values that the model is computed with, and their names.
    model = redraw(materialize(build_model(settings["model"]), "cpu"))
    loss_module = LanguageModelLoss(model, z_loss=settings["z_loss"], bos=bos)
    values = dict(loss_module.named_parameters()) | dict(loss_module.named_buffers())
    values["inputs"] = torch.randint(0, VOCAB_SIZE, (B, context))
    values["targets"] = torch.randint(0, VOCAB_SIZE, (B, context))
    with sdpa_kernel(SDPBackend.MATH):  # the CPU has no other that GPUs have
        lowering = lower_training(settings, GPU, torch.float32)
    output, gradients = interpret(lowering, lowering.tensors, values, torch.ones(()))

    expected, _ = loss_module(values["inputs"], values["targets"])
    expected.backward()
    errors = {"loss": relative_error(output, expected.detach())}
    for name, parameter in loss_module.named_parameters():
        errors[name] = relative_error(gradients[name], parameter.grad)
    return errors


def relative_error(x: Tensor, expected: Tensor) -> float:
    """The largest difference, over the largest value."""
    return ((x - expected).abs().max() / expected.abs().max()).item()


def interpret(
    lowering: Lowering, fakes: dict[str, Tensor], values: dict[str, Tensor], grad: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run forward and backward with `values` for `fakes` -> output, gradients by their names.

    `grad` is the gradient of the output.
    """
    forward, backward = lowering.graphs
    names = {id(x): name for name, x in fakes.items()}
    input_names = [names[id(x)] for x in forward.inputs]

    # Forward and backward name the tensors that they share alike.
    arguments = [values[name].detach().clone() for name in input_names]
    outputs = call_generated(forward.code, arguments)
    tensors = dict(zip(forward.output_names, outputs, strict=True))
    tensors |= dict(zip(forward.input_names, arguments, strict=True))
    like = backward.inputs[-1]
    tensors["tangents_1"] = torch.empty_strided(like.shape, like.stride()).copy_(grad)
    results = call_generated(backward.code, [tensors[name] for name in backward.input_names])
    return outputs[0], dict(zip(input_names, results, strict=True))


def call_generated(code: str, arguments: list[Tensor]) -> list[Tensor]:
    """Call generated code for a GPU with tensors on the CPU."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers
    from triton.runtime.interpreter import InterpreterBuilder

    code = code.replace("empty_strided_cuda", "empty_strided_cpu")
    code = code.replace("device(type='cuda', index=0)", "device(type='cpu')")
    functions = {name: elementwise(function) for name, function in LIBDEVICE.items()}
    libdevice = SimpleNamespace(**functions)
    atomics = whole_operands(InterpreterBuilder.create_atomic_rmw)
    with ExitStack() as stack:
        stack.enter_context(gpu_present(GPU))
        stack.enter_context(patch.object(triton_helpers, "libdevice", libdevice))
        stack.enter_context(patch.object(InterpreterBuilder, "create_atomic_rmw", atomics))
        return PyCodeCache.load(code).call(list(arguments))


def whole_operands(create: Callable) -> Callable:
    """The interpreter's atomic operation, which is wrong for operands that are broadcast views."""
    from triton.runtime.interpreter import TensorHandle

    def call(builder: object, operation: object, *operands: object) -> TensorHandle:
        *handles, order, scope = operands  # addresses, values, mask
        whole = [TensorHandle(np.ascontiguousarray(x.data), x.dtype) for x in handles]
        return create(builder, operation, *whole, order, scope)

    return call


def elementwise(function: Callable) -> Callable:
    """A function of NumPy's arrays as one of the interpreter's tensors."""
    from triton.language.core import tensor
    from triton.runtime.interpreter import TensorHandle

    def call(x: tensor, *others: tensor, **_) -> tensor:
        result = function(x.handle.data, *(other.handle.data for other in others))
        return tensor(TensorHandle(result.astype(x.handle.data.dtype), x.handle.dtype), x.type)

    return call


def main() -> None:
    """Print the errors as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["attention", "training"])
    parser.add_argument("overrides", nargs="*", help="of the config that is trained with")
    parser.add_argument("--case", choices=CASES, default="all")
    parser.add_argument("--context", type=int, default=64)
    args = parser.parse_args()
    start = monotonic()
    if args.what == "attention":
        errors = compare_attention(CASES[args.case], args.context)
        report = {"case": args.case}
    else:
        errors = compare_training(args.context, args.overrides)
        report = {"overrides": args.overrides}
    report |= {"context": args.context, "errors": errors, "seconds": round(monotonic() - start)}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
