"""Linear maps of a few tokens, as fast as their weights are read from memory.

On a CPU torch's products reach a quarter of its bandwidth; matvec.cpp, compiled once where a compiler is, most of it.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.hardware import processor_features
from model.layers import Linear
from model.transformer import Transformer

MAX_FEW_TOKENS = 16  # tokens up to which reading the weights takes longer than multiplying
SOURCE = Path(__file__).with_name("matvec.cpp")
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-w",
    "-DAT_PARALLEL_OPENMP=1",
)


def load_matvec(folder: Path, compiler: str | None) -> bool:
    """Whether matvec.cpp is at hand: from `folder`, or compiled to there where there is a compiler."""
    if hasattr(torch.ops.attend, "matvec"):
        return True
    same = f"{torch.__version__} {processor_features()} {FLAGS}".encode() + SOURCE.read_bytes()
    library = folder / f"matvec-{hashlib.sha256(same).hexdigest()[:16]}.so"
    try:
        if not library.exists():
            if compiler is None:
                return False
            compile_matvec(library, compiler)
        torch.ops.load_library(library)
    except OSError as error:
        print(f"note: matvec.cpp is not at hand ({error}), torch multiplies", file=sys.stderr)
        return False
    torch.library.register_fake("attend::matvec")(lambda x, w: x.new_empty(*x.shape[:-1], len(w)))
    return True


def compile_matvec(library: Path, compiler: str) -> None:
    """Raises OSError where that fails."""
    print(f"compiling {SOURCE.name}, about 8 s, once", file=sys.stderr)
    began, torch_folder = perf_counter(), Path(torch.__file__).parent
    include = [
        f"-I{torch_folder / 'include'}",
        f"-I{torch_folder / 'include/torch/csrc/api/include'}",
    ]
    link = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    library.parent.mkdir(parents=True, exist_ok=True)
    aside = library.with_suffix(f".{os.getpid()}")
    done = subprocess.run(
        [compiler, *FLAGS, *include, SOURCE, "-o", aside, *link], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise OSError(f"{compiler}: {' '.join(done.stderr.split())[:200]}")
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    aside.replace(library)
    print(f"compiled {SOURCE.name} in {perf_counter() - began:.1f} s, once", file=sys.stderr)


class DecodingLinear(nn.Module):
    """(..., N) to (..., M), as the Linear that it is made of; in `int8`, with a scale for each output."""

    def __init__(self, weight: Tensor, bias: Tensor | None, int8: bool):
        super().__init__()
        self.bias, self.by_matvec, scale = bias, hasattr(torch.ops.attend, "matvec"), None
        if int8:
            scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-7)
            weight = (
                (weight.float() / scale[:, None].float()).round().clamp(-127, 127).to(torch.int8)
            )
        self.register_buffer("scale", scale)
        self.kept = nn.Parameter(weight.contiguous(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        return (
            self.kept
            if self.scale is None
            else self.kept.to(self.scale.dtype) * self.scale[:, None]
        )

    def forward(self, x: Tensor) -> Tensor:
        few = (
            x.device.type == "cpu"
            and x.numel() <= MAX_FEW_TOKENS * x.shape[-1]
            and x.dtype != torch.float64
        )
        if (
            self.scale is not None and few and x.shape[-1] % 16 == 0
        ):  # torch's kernel is wrong for other sizes
            y = torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), self.kept, self.scale).view(
                *x.shape[:-1], -1
            )
        elif self.scale is not None:
            y = F.linear(x, self.kept.to(x.dtype)) * self.scale
        elif few and self.by_matvec:
            y = torch.ops.attend.matvec(x.contiguous(), self.kept)
        else:
            return F.linear(x, self.kept, self.bias)
        return y if self.bias is None else y + self.bias


def optimize_for_decoding(model: Transformer, int8: bool) -> None:
    """Changes the linear maps of a model in place, the head included: from now on it decodes, and learns no more."""
    model.head = DecodingLinear(model.unembedding.detach(), None, int8)
    for parent in [*model.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, Linear):
                setattr(parent, name, DecodingLinear(child.weight.detach(), child.bias, int8))
