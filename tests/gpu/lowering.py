"""Lower the training and decode steps for a GPU on a machine without one, and build their kernels.

Tensors are fake, so neither GPU memory nor a driver is needed. Inductor generates the same code as
on a machine with the GPU, and Triton and ptxas compile the kernels; no kernel is launched.
Requires a CUDA build of torch with its Triton; see docs/dev/gpu.md.

    python -m tests.gpu.lowering training attention=gqa model=124m model.depth=2 context=1024
"""

import argparse
import copy
import json
import math
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from inference.engine import Engine
from inference.quantize import optimize_for_decoding
from inference.sampling import sample
from model.build import build_model
from run import hardware
from run.settings import Settings
from tests.conftest import settings_of
from tests.gpu.fake_cuda import fake_cuda
from training.loss import LanguageModelLoss
from training.parallel import checkpoint_activations, configure_compiler


@dataclass(frozen=True)
class GPU:
    """The limits of a GPU, from the technical specifications in the CUDA C++ Programming Guide."""

    name: str
    capability: int  # 90 is sm_90
    multiprocessors: int
    threads: int  # per multiprocessor
    shared_memory: int  # bytes per block

    @property
    def properties(self) -> SimpleNamespace:
        """The return value of torch.cuda.get_device_properties."""
        return SimpleNamespace(
            name=self.name,
            major=self.capability // 10,
            minor=self.capability % 10,
            total_memory=80 * 2**30,
            multi_processor_count=self.multiprocessors,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=self.threads,
            max_threads_per_block=1024,
            warp_size=32,
            shared_memory_per_block=48 * 1024,
            shared_memory_per_block_optin=self.shared_memory,
            shared_memory_per_multiprocessor=self.shared_memory + 1024,
            L2_cache_size=50 * 2**20,
            is_integrated=0,
            gcnArchName="",
        )


H100 = GPU("NVIDIA H100 80GB HBM3", 90, 132, 2048, 227 * 1024)
GPUS = {
    "sm_75": GPU("Tesla T4", 75, 40, 1024, 64 * 1024),
    "sm_80": GPU("NVIDIA A100-SXM4-80GB", 80, 108, 2048, 163 * 1024),
    "sm_86": GPU("NVIDIA GeForce RTX 3090", 86, 82, 1536, 99 * 1024),
    "sm_89": GPU("NVIDIA GeForce RTX 4090", 89, 128, 1536, 99 * 1024),
    "sm_90": H100,
    "sm_100": GPU("NVIDIA B200", 100, 148, 2048, 227 * 1024),
    "sm_120": GPU("NVIDIA GeForce RTX 5090", 120, 170, 1536, 99 * 1024),
}
PRECISIONS = {
    "auto": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


FLASH_ATTENTION = r"ops\.aten\._scaled_dot_product_flash_attention\w*\.default\("
# Kernel launches in generated code: Triton, library and torch kernels.
TRITON_LAUNCH = r"\w+\.run\("
LIBRARY_CALL = r"extern_kernels\."
LAUNCH = re.compile(rf"{TRITON_LAUNCH}|{LIBRARY_CALL}|torch\.ops\.aten\.")

# The shape and the dtype of a buffer that generated code allocates.
ALLOCATION = re.compile(r"empty_strided_cuda\(\(([\d, ]*)\), \([\d, ]*\), torch\.(\w+)\)")

TRIGONOMETRIC = re.compile(r"\b(cos|sin)\(")


@dataclass
class Graph:
    """A graph that Inductor has lowered."""

    code: str
    compiled: object  # torch._inductor.output_code.CompiledFxGraph
    static_inputs: set[int]  # inputs with fixed addresses
    input_names: list[str]
    output_names: list[str | None]  # None for outputs that are not tensors
    inputs: list = field(default_factory=list)  # of the last call

    def reasons_against_capture(self) -> list[str]:
        """The reasons why the graph cannot be a single CUDA graph; empty if it can."""
        reasons = list(self.compiled.cudagraph_info.cudagraph_fail_reasons)
        moving = set(self.compiled.mutated_input_idxs) - self.static_inputs
        if moving:
            reasons.append(f"mutated inputs that are not static: {sorted(moving)}")
        # Captured code is placed in separate functions.
        num_partitions = len(re.findall(r"def partition_\d+\(", self.code))
        rest = self.code.partition("\n    def call(")[2]
        if num_partitions != 1 or LAUNCH.search(rest):
            reasons.append(f"{num_partitions} partitions, or launches outside of them")
        return reasons


@dataclass
class Lowering:
    """The graphs of a step and its Triton kernels."""

    graphs: list[Graph] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)  # source -> name
    tensors: dict[str, Tensor] = field(default_factory=dict)  # the inputs of the step

    def count_atomic_flex_attention(self) -> int:
        """The number of FlexAttention kernels that use atomic additions."""
        count = 0
        for source, name in self.kernels.items():
            if "flex_attention" in name and "atomic_add" in source:
                count += 1
        return count

    def count_trigonometric(self) -> int:
        """The number of kernels that compute a cosine or a sine."""
        return sum(bool(TRIGONOMETRIC.search(source)) for source in self.kernels)

    def count(self, call: str) -> int:
        """The number of matches of a call pattern in the generated code."""
        return sum(len(re.findall(call, graph.code)) for graph in self.graphs)

    def allocated_bytes(self) -> int:
        """The size of all buffers that the generated code allocates, outputs included."""
        total = 0
        for graph in self.graphs:
            for shape, dtype in ALLOCATION.findall(graph.code):
                sizes = [int(size) for size in shape.split(",") if size.strip()]
                total += math.prod(sizes) * getattr(torch, dtype).itemsize
        return total


@contextmanager
def lowering_for(gpu: GPU) -> Iterator[Lowering]:
    """Make torch.compile lower for `gpu`, with fake tensors on cuda."""
    from torch._inductor import compile_fx as inductor
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering

    lowering = Lowering()

    def keep_kernel(self, kernel_name: str, source_code: str, device_str: str = "cuda") -> None:
        lowering.kernels[source_code] = kernel_name

    def lower(module: torch.fx.GraphModule, inputs: list, **options) -> Callable:
        traced = copy.deepcopy(module)  # lowering modifies the original
        codes = []
        with patch.object(GraphLowering, "save_output_code", staticmethod(codes.append)):
            compiled = inductor.compile_fx_inner(module, inputs, **options)
        graph = Graph(
            code=codes[-1],
            compiled=compiled,
            static_inputs=set(options.get("static_input_idxs") or ()),
            input_names=[node.name for node in traced.graph.find_nodes(op="placeholder")],
            output_names=[node and node.name for node in traced.graph.output_node().args[0]],
        )
        lowering.graphs.append(graph)

        def run(inputs: list) -> object:
            graph.inputs = list(inputs)
            inputs.clear()
            with torch.no_grad(), detect_fake_mode(graph.inputs):
                return torch.fx.Interpreter(traced).run(*graph.inputs)

        run._boxed_call = True
        return run

    torch._dynamo.reset()
    with ExitStack() as stack:
        # The math kernel of attention must use the same dtypes as on a real GPU.
        reduces_in_half = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
        stack.enter_context(fake_cuda())
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(reduces_in_half)
        stack.enter_context(gpu_present(gpu))
        compile_fx = partial(inductor.compile_fx, inner_compile=lower)
        stack.enter_context(patch.object(inductor, "compile_fx", compile_fx))
        stack.enter_context(patch.object(AsyncCompile, "triton", keep_kernel))
        # Folding constants and timing padded products would run kernels.
        settings = {
            "fx_graph_cache": False,
            "compile_threads": 1,
            "joint_graph_constant_folding": False,
            "shape_padding": False,
            # Kernels that differ only in their names are built once, thanks to Triton's disk cache.
            "triton.unique_kernel_names": False,
        }
        stack.enter_context(torch._inductor.config.patch(settings))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        yield lowering


@contextmanager
def gpu_present(gpu: GPU) -> Iterator[None]:
    """Make torch and Triton detect this GPU and a driver; only one kind of GPU per process."""
    from torch._dynamo.device_interface import CudaInterface
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.driver import driver

    class Driver(CudaDriver):
        def __init__(self):
            limits = {"max_shared_mem": gpu.shared_memory}
            self.utils = SimpleNamespace(get_device_properties=constant(limits))
            self.get_current_device = constant(0)
            self.get_current_stream = constant(0)
            self.get_device_capability = constant(divmod(gpu.capability, 10))

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", gpu.capability, 32)

    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": gpu.properties,
        "get_device_capability": divmod(gpu.capability, 10),
        "get_device_name": gpu.name,
        "mem_get_info": (79 * 2**30, 80 * 2**30),
        "memory_allocated": 0,
        "synchronize": None,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "is_current_stream_capturing": False,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
    }
    # Inductor's device interface holds its own references to these functions.
    interface = (
        "device_count",
        "current_device",
        "get_device_properties",
        "memory_allocated",
        "synchronize",
        "set_device",
    )
    with ExitStack() as stack:
        for name, value in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, constant(value)))
        for name in interface:
            answer = staticmethod(constant(answers[name]))
            stack.enter_context(patch.object(CudaInterface, name, answer))
        stack.enter_context(patch.object(torch.cuda, "default_generators", (GeneratorOfGPU(),)))
        stack.enter_context(patch.object(CudaInterface, "get_raw_stream", constant(0)))
        stack.enter_context(patch.object(torch._C, "_cuda_getCurrentRawStream", constant(0)))
        stack.enter_context(patch.object(driver, "_active", Driver()))

        # torch would query the GPU to select a kernel for scaled_dot_product_attention.
        attention = torch.ops.aten.scaled_dot_product_attention.default
        kernels = {torch._C.DispatchKey.CompositeImplicitAutograd: fused_attention}
        stack.enter_context(patch.dict(attention.py_kernels, kernels))
        attention._dispatch_cache.clear()
        stack.callback(attention._dispatch_cache.clear)
        yield


class GeneratorOfGPU(torch.Generator):
    """Replaces the GPU's generator; a recomputed forward shares its state with the first one."""

    device = torch.device("cuda", 0)

    def clone_state(self) -> "GeneratorOfGPU":
        return self


def constant(value: object) -> Callable:
    """A function that returns `value` for any arguments."""
    return lambda *args, **kwargs: value


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention with the kernel that torch selects for the arguments.

    FlashAttention requires Ampere, and supports neither masks, nor fp32, nor heads above 256. The
    memory-efficient kernel does not support grouped queries. All other cases use matrix products
    and a softmax. The rules are from aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, except
    for cuDNN, which torch may prefer for a major capability of 9 or 10. That file's rule for wide
    heads on GPUs with little shared memory is left out, because no case has heads above 192.
    """
    aten = torch.ops.aten
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    is_ampere = torch.cuda.get_device_capability()[0] >= 8
    can_flash = is_ampere and is_half and attn_mask is None and q.shape[-1] % 8 == 0
    can_flash = can_flash and q.shape[-1] <= 256
    if can_flash and torch.backends.cuda.flash_sdp_enabled():
        return aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, False, scale=scale
        )[0]
    if enable_gqa or not torch.backends.cuda.mem_efficient_sdp_enabled():
        return aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    bias = None
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
        bias = bias.expand(*q.shape[:-1], k.shape[-2])
    needs_gradient = any(x.requires_grad for x in (q, k, v))
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]


def lower_training(settings: Settings, gpu: GPU, precision: torch.dtype) -> Lowering:
    """Lower the forward and backward of a micro-batch, compiled as in `compile_model`.

    The last graph is the forward of an evaluation without gradients.

    Raises Dynamo's error at a graph break.
    """
    bos = 1 if settings.document_mask else None
    hardware.prepare_for_training(torch.device("cuda"))  # fp32 matrix products in TF32
    with lowering_for(gpu) as lowering:
        model = build_model(settings.model, "cuda", seed=None)
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        loss_module = LanguageModelLoss(model, z_loss=settings.z_loss, bos=bos)
        configure_compiler()
        loss_module.compile(dynamic=False, fullgraph=True)
        shape = (settings.micro_batch, settings.context)
        inputs = torch.zeros(shape, dtype=torch.int64, device="cuda")
        targets = torch.zeros_like(inputs)
        with _disable_current_modes():
            # A graph with gradients is used for both training and evaluation.
            for is_training in (False, True):
                loss_module.train(is_training)
                with hardware.autocast(inputs.device, precision):
                    objective, _ = loss_module(inputs, targets)
            objective.backward()
            loss_module.eval()
            with hardware.autocast(inputs.device, precision), torch.no_grad():
                loss_module(inputs, targets)
        lowering.tensors = dict(loss_module.named_parameters()) | dict(loss_module.named_buffers())
        lowering.tensors |= {"inputs": inputs, "targets": targets}
    return lowering


def lower_decoding(settings: Settings, gpu: GPU) -> Lowering:
    """Lower a decode step for one row, including sampling, compiled as in generate.py."""
    sampler = partial(sample, temperature=0.8, top_k=50, top_p=0.95)
    with lowering_for(gpu) as lowering:
        model = build_model(settings.model, "cuda", dtype=torch.bfloat16, seed=None)
        model.requires_grad_(False).eval()
        optimize_for_decoding(model, int8=False)
        cache = model.new_cache(1, settings.context, torch.bfloat16, "cuda")
        engine = Engine(model, sampler, cache)
        with _disable_current_modes():
            engine.compile()
    return lowering


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, in one of the configurations that Inductor can choose."""

    name: str
    registers: int  # per thread
    stack: int  # bytes per thread in local memory, for spilled registers
    shared_memory: int  # bytes of a block


def build_kernels(sources: dict[str, str], gpu: GPU) -> list[list[Kernel]]:
    """Compile each kernel to machine code, in all its configurations. Raises Triton's errors."""
    from torch._inductor.codecache import PyCodeCache

    kernels = []
    # Inductor's static launcher would store a pointer instead of the machine code.
    with gpu_present(gpu), torch._inductor.config.patch(use_static_cuda_launcher=False):
        for source, name in sources.items():
            tuner = vars(PyCodeCache.load(source))[name]
            configurations = []
            for config in tuner.configs:
                built = tuner._precompile_config(config).kernel
                configurations.append(inspect(tuner.inductor_meta["kernel_name"], built))
            kernels.append(configurations)
    return kernels


def inspect(name: str, built: object) -> Kernel:
    """Read the resources of a compiled kernel from its machine code."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return Kernel(name, int(registers), int(stack), built.metadata.shared)


def whole_pattern(settings: Settings) -> int:
    """The smallest number of layers with one of each kind, at least two."""
    return max(2, len(settings.model["attention"].get("pattern", [])))


def main() -> None:
    """Lower a step, build its kernels and print a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=["training", "decoding"])
    parser.add_argument("--gpu", choices=GPUS, default="sm_90")
    parser.add_argument(
        "overrides", nargs="*", help="of the config, as for train.py; micro_batch defaults to 8"
    )
    args = parser.parse_args()
    settings = settings_of("device=cpu", "micro_batch=8", *args.overrides)
    gpu = GPUS[args.gpu]
    if args.step == "training":
        lowering = lower_training(settings, gpu, PRECISIONS[settings.precision])
        reasons = []
    else:
        lowering = lower_decoding(settings, gpu)
        reasons = lowering.graphs[0].reasons_against_capture()
    kernels = build_kernels(lowering.kernels, gpu)
    report = {
        "overrides": args.overrides,
        "graphs": len(lowering.graphs),
        "kernels": len(lowering.kernels),
        "triton_launches": lowering.count(TRITON_LAUNCH),
        "library_calls": lowering.count(LIBRARY_CALL),
        "allocated_bytes": lowering.allocated_bytes(),
        "flash_attention": lowering.count(FLASH_ATTENTION),
        "atomic_flex_attention": lowering.count_atomic_flex_attention(),
        "trigonometric": lowering.count_trigonometric(),
        "reasons_against_capture": reasons,
    }
    # Autotuning skips configurations that spill registers to the stack, unless all of them do
    # (CachingAutotuner.bench in torch/_inductor/runtime/triton_heuristics.py).
    chosen = [min(each, key=lambda kernel: kernel.stack) for each in kernels]
    every = [kernel for each in kernels for kernel in each]
    for limit, candidates in (("registers", every), ("stack", chosen), ("shared_memory", every)):
        largest = max(candidates, key=lambda kernel: vars(kernel)[limit])
        report[limit] = vars(largest)[limit]
        report[f"{limit}_of"] = largest.name
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
