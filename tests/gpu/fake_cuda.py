"""A fake CUDA device for machines without a GPU: it computes shapes and dtypes, but no values.

Tensors on "cuda" are FakeTensors, and tensors on the CPU are real. A dispatch mode counts
synchronizations with the host and fp32 products. RuntimeError is raised by operations that mix
devices or whose result shape depends on values, such as nonzero().
"""

import hashlib
import importlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from run.compilation import cpp_compiler
from tests.conftest import ROOT

SOURCE = Path(__file__).with_name("noop_cuda_guard.cpp")
FLAGS = ("-O0", "-std=c++20", "-shared", "-fPIC", "-w")

READS = ("aten::_local_scalar_dense", "aten::equal")  # .item(), bool(), int(), equal()
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
PRODUCTS = (
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::baddbmm",
    "aten::convolution",
    "aten::linalg_solve_triangular",
    "aten::_scaled_dot_product",
)


class FakeGPU(TorchDispatchMode):
    """Observes operations on the device and computes operations on the CPU.

    `waits` counts operations that synchronize with the host, and `fp32_products` counts matrix
    products in fp32, both by the calling function of this repository. The products that autograd
    derives are not counted, because they have the dtypes of the forward.

    The host reads every boolean on the device as True, every float as 1 and every integer as 0.
    """

    supports_higher_order_operators = True  # such as FlexAttention, which is passed through

    def __init__(self):
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.fp32_products: Counter[str] = Counter()
        self.pinned: dict[int, Tensor] = {}  # by memory address

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch.compile would skip code inside this mode

    def reset(self) -> None:
        """Reset the counters."""
        self.waits.clear()
        self.fp32_products.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_higher_order = isinstance(func, HigherOrderOperator)
        if is_higher_order or func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        tensors = tensors_in([*args, *kwargs.values()])
        is_on_cuda = any(isinstance(x, FakeTensor) for x in tensors)
        device = torch.device(kwargs.get("device") or "cpu")
        if not is_on_cuda and device.type != "cuda":
            return self.compute_on_cpu(func, args, kwargs)

        # In inference mode, composite operations arrive undecomposed.
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)

        # Handle copies between devices. A copy to the host needs its result immediately.
        name = func.name().partition(".")[0]
        if name == "aten::_to_copy" and is_on_cuda and "device" in kwargs and device.type == "cpu":
            return self.read(args[0], kwargs)
        if name == "aten::copy_" and len(args) > 2:
            kwargs = kwargs | {"non_blocking": args[2]}
            args = args[:2]
        if name == "aten::copy_" and not isinstance(args[0], FakeTensor):
            # A non-blocking copy requires pinned memory.
            kwargs = kwargs | {
                "non_blocking": kwargs.get("non_blocking") and self.is_pinned(args[0])
            }
            return args[0].copy_(self.read(args[1], kwargs))
        if name in READS:
            self.wait()
            return self.host_value(args[0].dtype)
        if name in ("aten::_to_copy", "aten::copy_") and not isinstance(tensors[-1], FakeTensor):
            self.upload(tensors[-1], kwargs)
        if name in INDEXING:
            for index in tensors_in(args[1]):
                if not isinstance(index, FakeTensor):
                    self.upload(index, {})

        if name.startswith(PRODUCTS) and any(x.dtype == torch.float32 for x in tensors):
            function = calling_function()
            if function is not None:
                self.fp32_products[function] += 1
        return func(*args, **kwargs)

    def compute_on_cpu(self, func, args, kwargs):
        """Compute an operation on CPU tensors, where pinned memory is only recorded as pinned."""
        with unset_fake_temporarily():
            if func.name() in ("aten::pin_memory", "aten::_pin_memory"):
                x = args[0].clone()
                self.pinned[x.untyped_storage().data_ptr()] = x
                return x
            if func is torch.ops.aten.is_pinned.default:
                return self.is_pinned(args[0])
            return func(*args, **kwargs)

    def is_pinned(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self.pinned

    def upload(self, x: Tensor, kwargs: dict) -> None:
        """Record a copy of x to the device, which blocks the host unless the memory is pinned."""
        if not (self.is_pinned(x) and kwargs.get("non_blocking")):
            self.wait()

    def read(self, x: Tensor, kwargs: dict) -> Tensor:
        """Return a CPU tensor that stands in for the values of x."""
        if not kwargs.get("non_blocking"):
            self.wait()
        dtype = kwargs.get("dtype") or x.dtype
        with unset_fake_temporarily():
            return torch.full(x.shape, self.host_value(x.dtype), dtype=dtype)

    def host_value(self, dtype: torch.dtype) -> float:
        return float(dtype == torch.bool or dtype.is_floating_point)

    def wait(self) -> None:
        """Count a synchronization with the host."""
        self.waits[calling_function()] += 1


def tensors_in(values: Iterable) -> list[Tensor]:
    """All tensors in `values` and in nested lists."""
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value)
    return tensors


def calling_function() -> str | None:
    """The innermost function on the stack that belongs to this repository, such as "Trainer.save".

    Returns None in the backward, which runs in a different thread, unless it recomputes a function.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        path = code.co_filename.removeprefix(f"{ROOT}/")
        if path != code.co_filename and not path.startswith((".", "tests/")):
            return code.co_qualname.partition(".<locals>")[0]
        frame = frame.f_back
    return None


@contextmanager
def fake_cuda(major: int = 9) -> Iterator[FakeGPU]:
    """Simulate one GPU: an H100, or a GPU with a different major compute capability."""
    # Dynamo stores functions of torch.cuda at import, so import it before patching them.
    importlib.import_module("torch._dynamo.variables.torch")
    load_guard()
    gpu = FakeGPU()
    matmul_precision = torch.get_float32_matmul_precision()
    cudnn_sdp = torch.backends.cuda.cudnn_sdp_enabled()
    reduces_in_half = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    with ExitStack() as stack:
        for name, value in cuda_answers(gpu, major).items():
            stack.enter_context(patch(f"torch.{name}", always(value)))
        # FakeTensorMode must not initialize the simulated device.
        patched = patch.object(FakeTensorMode, "avoid_device_init", True)
        stack.enter_context(patched)
        # FakeTensor.tolist reads numbers one by one; a real tensor is copied in one operation.
        stack.enter_context(patch.object(FakeTensor, "tolist", lambda x: x.cpu().tolist()))
        # Inside a FakeTensorMode, torch.load would load to the meta device.
        stack.enter_context(patch("torch.load", unset_fake_temporarily()(torch.load)))
        # The fused SDPA kernels require a CUDA build. Their replacement must also multiply in
        # the dtype of its inputs.
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(gpu)
        try:
            yield gpu
        finally:
            torch.set_float32_matmul_precision(matmul_precision)
            torch.backends.cuda.enable_cudnn_sdp(cudnn_sdp)
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(reduces_in_half)


def cuda_answers(gpu: FakeGPU, major: int) -> dict[str, object]:
    """Replacements for functions of torch.cuda. Synchronizing an event is counted as a wait."""
    names = {7: "Tesla T4", 8: "NVIDIA GeForce RTX 4090", 9: "NVIDIA H100 80GB HBM3"}
    minor = {7: 5, 8: 9, 9: 0}[major]
    shared_memory = {7: 64, 8: 99, 9: 227}[major] * 1024  # bytes per block

    class Event:
        def synchronize(self) -> None:
            gpu.wait()

    class Stream:
        def record_event(self) -> Event:
            return Event()

        def wait_stream(self, other: "Stream") -> None:
            pass

    class Graph:
        """A CUDA graph and its recording context, in which nothing may synchronize."""

        def __enter__(self) -> None:
            self.num_waits = gpu.waits.total()

        def __exit__(self, kind, error, traceback) -> None:
            if gpu.waits.total() > self.num_waits:
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

        def replay(self) -> None:
            pass

    graph = Graph()
    return {
        "cuda.is_available": True,
        "cuda.is_bf16_supported": major >= 8,
        "cuda.get_device_properties": SimpleNamespace(
            major=major, minor=minor, shared_memory_per_block_optin=shared_memory
        ),
        "cuda.device_count": 1,
        "cuda.current_device": 0,
        "cuda.get_device_name": names[major],
        "cuda.mem_get_info": (79 * 2**30, 80 * 2**30),  # free and total bytes
        "cuda.max_memory_allocated": 0,
        "cuda.current_stream": Stream(),
        "cuda.Stream": Stream(),
        "cuda.stream": nullcontext(),
        "cuda.CUDAGraph": graph,
        "cuda.graph": graph,
        "cuda.manual_seed_all": None,
        "cuda.get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "cuda.set_rng_state": None,
        "cuda.amp.common.amp_definitely_not_available": False,
        "accelerator.is_available": False,  # torch.compile would request a stream from it
    }


def always(value: object):
    """A function that returns `value`."""
    return lambda *args, **kwargs: value


@cache
def load_guard() -> None:
    """Load noop_cuda_guard.cpp, compiled once per version of torch.

    Raises RuntimeError without a C++ compiler, because skipped tests would go unnoticed.
    """
    compiler = cpp_compiler()
    if compiler is None:
        raise RuntimeError("a fake GPU needs a C++ compiler. fix: install g++, or set $CXX")
    identity = f"{torch.__version__} {FLAGS}".encode() + SOURCE.read_bytes()
    key = hashlib.sha256(identity).hexdigest()[:16]
    library = ROOT / ".cache" / f"noop-cuda-guard-{key}.so"
    library.parent.mkdir(exist_ok=True)
    if not library.exists():
        compile_guard(compiler, library)
    torch.ops.load_library(library)


def compile_guard(compiler: str, library: Path) -> None:
    folder = Path(torch.__file__).parent
    temporary = library.with_suffix(f".{os.getpid()}")  # several processes may compile
    command = [
        compiler,
        *FLAGS,
        f"-I{folder}/include",
        SOURCE,
        "-o",
        temporary,
        f"-L{folder}/lib",
        "-lc10",
        "-ltorch_cpu",
    ]
    subprocess.run(command, check=True)
    temporary.replace(library)
