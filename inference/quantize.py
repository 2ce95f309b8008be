"""Faster decoding: products with a few tokens, int8 weights, and the kernels in C++.

On a CPU, matvec.cpp multiplies weights by one token up to 4.75 times as fast as torch
(docs/dev/log.md). It also computes attention in a decode step (model/attention/kernels/decode.py).
"""

import hashlib
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import round_to_int8
from model.layers import FusedPart, Linear
from model.transformer import Transformer
from run import hardware
from run.checkpoint import sync
from run.progress import print0, warn_once

MAX_INT8_INPUTS = 2**16  # of a layer, so that sums of products of int8 numbers fit into int32
MAX_FEW_TOKENS = 16  # up to this number, reading the weights takes longer than multiplying
SOURCE = Path(__file__).with_name("matvec.cpp")
FLAGS = [
    "-O3",
    "-march=native",
    "-std=c++20",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-w",
    "-DAT_PARALLEL_OPENMP=1",
]


def load_matvec(folder: Path, compiler: str | None) -> bool:
    """Load the kernels, compiling them first if they are not in `folder`; return True on success.

    A library that the dynamic linker rejects, such as an empty file, is compiled again. A truncated
    library can crash the process instead.
    """
    if hasattr(torch.ops.attend, "matvec"):
        return True

    # Each combination of processor, torch version and source version has its own library.
    features = hardware.processor_features()
    identity = f"{torch.__version__} {features} {FLAGS}".encode() + SOURCE.read_bytes()
    digest = hashlib.sha256(identity).hexdigest()
    library = folder / f"matvec-{digest[:16]}.so"
    try:
        if library.exists():
            with suppress(OSError):
                torch.ops.load_library(library)
        if not hasattr(torch.ops.attend, "matvec"):
            if compiler is None:
                raise OSError("no C++ compiler; install g++ and set CXX=g++")
            print0(f"compiling {SOURCE.name} (only once)")
            compile_matvec(library, compiler)
            torch.ops.load_library(library)
    except OSError as error:
        warn_once(f"cannot use {SOURCE.name}, so decoding is slower ({error})")
        return False

    torch.library.register_fake("attend::matvec", matvec_result)
    torch.library.register_fake("attend::decode_attention", attention_result)
    if hasattr(torch.ops.attend, "matvec_int8"):
        torch.library.register_fake("attend::matvec_int8", matvec_result)
    return True


def matvec_result(x: Tensor, w: Tensor, w_scale: Tensor | None = None) -> Tensor:
    """x (..., N), w (M, N), w_scale (M,) -> an empty tensor (..., M), for torch.compile."""
    return x.new_empty(*x.shape[:-1], len(w))


def attention_result(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q (B, H, E), v (B, S, K, F) -> an empty tensor (B, H, F), for torch.compile."""
    return q.new_empty(*q.shape[:2], v.shape[-1])


def compile_matvec(library: Path, compiler: str) -> None:
    """Compile the kernels; the library appears only once complete. Raises OSError on failure.

    torch.utils.cpp_extension.load would need ninja, even to load a compiled library.
    """
    torch_folder = Path(torch.__file__).parent
    library.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may compile at the same time, each into its own folder.
    with TemporaryDirectory(prefix=".matvec-", dir=library.parent) as own:
        temporary = Path(own) / library.name
        command = [
            compiler,
            *FLAGS,
            f"-I{torch_folder}/include",
            f"-I{torch_folder}/include/torch/csrc/api/include",
            SOURCE,
            "-o",
            temporary,
            f"-L{torch_folder}/lib",
            "-lc10",
            "-ltorch_cpu",
        ]
        result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if result.returncode != 0:
            raise OSError(f"{compiler}: {' '.join(result.stderr.split())[:200]}")
        sync(temporary)
        temporary.replace(library)


def optimize_for_decoding(model: Transformer, int8: bool) -> None:
    """Replace, in place, a model's linear layers and head with faster layers for inference only.

    A module's `fused_projections` become one layer where possible. A tied model gets a separate
    head. On a CPU without the kernels, a model is left unchanged unless `int8` is true.
    """
    is_cpu = model.embed.weight.device.type == "cpu"
    if is_cpu and not int8 and not hasattr(torch.ops.attend, "matvec"):
        return
    decoding = Int8Linear if int8 else MatvecLinear
    model.head = decoding(model.unembedding.detach(), None)
    # The list holds no linear layer, so that each one is freed as soon as it is replaced.
    parents = [module for module in model.modules() if not isinstance(module, Linear)]
    for parent in parents:
        fuse_projections(parent, decoding)
        for name, child in parent.named_children():
            if isinstance(child, Linear):
                setattr(parent, name, decoding(child.weight.detach(), child.bias))


def fuse_projections(parent: nn.Module, decoding: Callable[..., nn.Module]) -> None:
    """Replace a module's `fused_projections` with parts of one layer.

    They stay separate if the module lacks one of them, if their numbers of inputs differ, or if
    only some of them have a bias.
    """
    names = getattr(parent, "fused_projections", ())
    linears = [getattr(parent, name, None) for name in names]
    if not linears or not all(isinstance(linear, Linear) for linear in linears):
        return
    if len({(linear.in_features, linear.bias is None) for linear in linears}) > 1:
        return
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.detach() for linear in linears])
    fused = decoding(weight, bias)
    start = 0
    for name, linear in zip(names, linears, strict=True):
        stop = start + linear.out_features
        setattr(parent, name, FusedPart(fused, start, stop))
        start = stop


class MatvecLinear(nn.Module):
    """x (..., N) -> (..., M), for inference only.

    For a few tokens on a CPU, it uses the kernel in matvec.cpp.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        check_shapes(weight, bias)
        super().__init__()
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)  # (M, N)
        self.register_buffer("bias", bias)
        is_bf16_on_cpu = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        self.is_emulated = is_bf16_on_cpu and not hardware.multiplies_bf16(weight.device)

    def forward(self, x: Tensor) -> Tensor:
        if is_few_on_cpu(x):
            y = torch.ops.attend.matvec(x.contiguous(), self.weight)
        elif self.is_emulated:  # a product in fp32 is several times as fast
            y = F.linear(x.float(), self.weight.float()).type_as(x)
        else:
            return F.linear(x, self.weight, self.bias)
        if self.bias is not None:
            y = y + self.bias
        return y


class Int8Linear(nn.Module):
    """x (..., N) -> (..., M), for inference only; int8 weights with a scale for each output.

    For a few tokens on a CPU with AVX2, the kernel in matvec.cpp also rounds each vector of x to
    int8, and the products are exact sums of integers.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        check_shapes(weight, bias)
        super().__init__()
        levels, scale = round_to_int8(weight, weight.dtype)
        self.register_buffer("scale", scale[:, 0])  # (M,)
        self.levels = nn.Parameter(levels, requires_grad=False)  # (M, N)
        self.register_buffer("bias", bias)

    @property
    def weight(self) -> Tensor:
        return self.levels.to(self.scale.dtype) * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        is_few = is_few_on_cpu(x)
        has_kernel = hasattr(torch.ops.attend, "matvec_int8")
        if is_few and has_kernel and x.shape[-1] <= MAX_INT8_INPUTS:
            y = torch.ops.attend.matvec_int8(x.contiguous(), self.levels, self.scale)
        # Torch's kernel gives wrong results if the number of inputs is not a multiple of 16.
        elif is_few and x.shape[-1] % 16 == 0:
            y = torch._weight_int8pack_mm(x.flatten(0, -2), self.levels, self.scale)
            y = y.view(*x.shape[:-1], -1)
        else:
            y = F.linear(x, self.levels.to(x.dtype)) * self.scale
        if self.bias is not None:
            y = y + self.bias
        return y


def check_shapes(weight: Tensor, bias: Tensor | None) -> None:
    """Check the shapes of weight and bias, because a bias of another shape would be broadcast."""
    assert weight.ndim == 2
    assert bias is None or bias.shape == weight.shape[:1]


def is_few_on_cpu(x: Tensor) -> bool:
    """Whether x (..., N) is on a CPU, not in fp64, and has at most MAX_FEW_TOKENS tokens."""
    is_few = x.numel() <= MAX_FEW_TOKENS * x.shape[-1]
    return is_few and x.device.type == "cpu" and x.dtype != torch.float64
