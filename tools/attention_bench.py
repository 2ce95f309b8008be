"""Time the kernels that can compute the attention of a decode step on this machine's processor.

Each JSON line is one case: a layer of model=15m with 256 or 2,048 cache slots (`mha`, `gqa` or
`mla`) or a window of 128 (`mha`); one or eight rows; a cache in bf16, fp32 or int8; compiled or
not. It gives the median time of each kernel in microseconds, the chosen kernel, and the time of
this kernel divided by the shortest time. The last line gives the largest of these ratios.
"""

import json
from collections.abc import Callable
from itertools import product
from statistics import median
from time import perf_counter
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from inference import quantize
from model.attention.kernels.choose import KERNELS, choose
from model.attention.kernels.definition import HAS_AMX, Case, ScoreOptions
from model.cache import round_to_int8
from run import compilation, hardware
from run.paths import cache_folder
from run.progress import print0

NUM_TURNS = 15
MIN_SECONDS = 2e-3  # of a turn, in which short kernels are called several times


class Shape(NamedTuple):
    """A layer of model=15m, with six query heads."""

    key_heads: int
    width: int  # of keys and values
    slots: tuple[int, ...] = (256, 2048)


SHAPES = {
    "equal heads": Shape(6, 48),
    "grouped heads": Shape(2, 48),
    "mla": Shape(1, 120),
    "window": Shape(6, 48, slots=(128,)),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8}


class Cached(NamedTuple):
    """Keys or values (B, S, K, E) of a cache that has one more slot, which is unused."""

    levels: Tensor
    scale: Tensor | None  # (B, S, K, 1), of an int8 cache

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return keys or values (B, K, S, E)."""
        x = self.levels if self.scale is None else self.levels * self.scale
        return x.to(dtype).transpose(1, 2)


@torch.inference_mode()
def compare_kernels() -> None:
    """Print a line for each case; the kernels take turns."""
    device = torch.device("cpu")
    hardware.use_huge_pages()
    compilation.prepare_to_compile()
    quantize.load_matvec(cache_folder(), compilation.cpp_compiler())
    options = compilation.decode_options(device)
    capability = torch.backends.cpu.get_cpu_capability()
    print0(f"{capability}, {torch.get_num_threads()} threads, AMX: {HAS_AMX}")

    worst = 0.0
    cases = [(name, slots) for name, shape in SHAPES.items() for slots in shape.slots]
    for (name, slots), cache_dtype, rows in product(cases, DTYPES, (1, 8)):
        shape = SHAPES[name]
        dtype = DTYPES[cache_dtype]
        if cache_dtype == "int8":  # the dtype used with int8 weights (inference/load.py)
            dtype = torch.bfloat16 if hardware.multiplies_bf16(device) else torch.float32
        q = torch.randn(rows, 6, 1, shape.width).to(dtype)
        k, v = (cached(rows, slots, shape, DTYPES[cache_dtype]) for _ in range(2))
        mask = torch.ones(rows, 1, 1, slots, dtype=torch.bool)
        for is_compiled in (False, True):
            case = Case(
                q,
                k.read(dtype),
                v.read(dtype),
                mask,
                ScoreOptions(shape.width**-0.5),
                is_compiled=is_compiled,
            )
            functions = {}
            for kernel in KERNELS:
                if kernel.supports(case):
                    functions[short_name(kernel)] = attend_with(kernel, case, k, v)
            if is_compiled:
                torch._dynamo.reset()
                for kernel, function in functions.items():
                    functions[kernel] = torch.compile(function, fullgraph=True, options=options)
            times = time_in_turns(functions)
            chosen = short_name(choose(case))
            ratio = times[chosen] / min(times.values())
            worst = max(worst, ratio)
            line = {"layer": name, "cache": cache_dtype, "rows": rows, "slots": slots}
            line |= {"compiled": is_compiled, "microseconds": times}
            print(json.dumps(line | {"chosen": chosen, "ratio": round(ratio, 2)}), flush=True)
    print(json.dumps({"worst_ratio": round(worst, 2)}))


def cached(rows: int, slots: int, shape: Shape, dtype: torch.dtype) -> Cached:
    x = torch.randn(rows, slots + 1, shape.key_heads, shape.width)
    if dtype == torch.int8:
        levels, scale = round_to_int8(x)
        return Cached(levels[:, :slots], scale[:, :slots])
    return Cached(x.to(dtype)[:, :slots], None)


def attend_with(kernel: ModuleType, case: Case, k: Cached, v: Cached) -> Callable[[], Tensor]:
    """Return a function of no arguments that reads the cache and computes attention."""

    def attend() -> Tensor:
        dtype = case.q.dtype
        return kernel.run(case._replace(k=k.read(dtype), v=v.read(dtype)))

    return attend


def short_name(kernel: ModuleType) -> str:
    return kernel.__name__.rpartition(".")[2]


def time_in_turns(functions: dict) -> dict[str, int]:
    """Return the median time of each function in microseconds."""
    times = {name: [] for name in functions}
    calls = dict.fromkeys(functions, 1)
    for turn in range(NUM_TURNS + 1):
        for name, function in functions.items():
            function()
            start = perf_counter()
            for _ in range(calls[name]):
                function()
            seconds = (perf_counter() - start) / calls[name]
            if turn > 0:  # the first turn compiles
                times[name].append(seconds)
            calls[name] = max(1, round(MIN_SECONDS / seconds))
    return {name: round(1e6 * median(each)) for name, each in times.items()}
