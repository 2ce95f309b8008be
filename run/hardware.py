"""The device of this machine, with its precision, peak FLOP/s and memory, and the processor."""

import ctypes
import os
import platform
import re
import resource
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from run.progress import warn_once

# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4

# Peak FLOP/s of dense bf16 tensor-core products (T4: fp16), from NVIDIA's data sheets.
# Keys are patterns of device names; the first one that matches is used.
PEAKS = {
    "B200|GB200": 2250e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100|H200|GH200": 989e12,
    "A100|A800": 312e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "T4": 65e12,
}

# Peak memory bandwidths, bytes/s, from NVIDIA's data sheets; keys as in PEAKS.
BANDWIDTHS = {
    "B200|GB200": 8e12,
    "H200": 4.8e12,
    "GH200": 4e12,
    "H100 PCIe": 2e12,
    "H100 NVL": 3.9e12,
    "H100": 3.35e12,
    "A100 80GB PCIe": 1.94e12,
    "(A100|A800).*80GB": 2.04e12,
    "(A100|A800).*40GB": 1.56e12,
    "A10G": 0.6e12,
    "L40S": 0.86e12,
    "L4": 0.3e12,
    "RTX 5090": 1.79e12,
    "RTX 4090": 1.01e12,
    "RTX 3090": 0.94e12,
    "T4": 0.32e12,
}


def pick_device(wanted: str) -> torch.device:
    """Return the device for `device=wanted`; auto picks a GPU if torch can use one.

    If auto skips a GPU because torch has no kernels for it, a warning names the GPU. Raises
    ValueError for a device that torch cannot use.
    """
    # In order of preference.
    for kind in ("cuda", "mps", "cpu"):
        if wanted not in (kind, "auto") or not is_available(kind):
            continue
        missing = missing_kernels() if kind == "cuda" else None
        if missing is None:
            return torch.device(kind)
        if wanted == kind:
            raise ValueError(missing)
        warn_once(missing)
    raise ValueError(
        f"torch cannot use this device (device={wanted}). fix: run python -m tools.doctor, or use "
        "device=auto (--device auto)"
    )


def is_available(kind: str) -> bool:
    """Whether torch can use a kind of device: cuda, mps or cpu."""
    if kind == "cuda":
        return torch.cuda.is_available()
    if kind == "mps":
        return torch.backends.mps.is_available()
    return True


def missing_kernels() -> str | None:
    """Describe a GPU that torch finds but has no kernels for, with a fix; None without such a GPU.

    torch.cuda.is_available() is true for such a GPU, and its first kernel would end the process.
    Under torchrun, all GPUs are checked, so that all ranks choose the same device.
    """
    architectures = torch.cuda.get_arch_list()
    if torch.version.cuda is None or not architectures:  # a build for ROCm, or without a list
        return None
    num_gpus = torch.cuda.device_count() if "LOCAL_RANK" in os.environ else 1
    for index in range(num_gpus):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch gives the same warning, but longer
            major, minor = torch.cuda.get_device_capability(index)
        if has_kernels((major, minor), architectures):
            continue
        oldest = min(int(name.partition("_")[2].rstrip("af")) for name in architectures)
        newer_or_older = "an older" if 10 * major + minor < oldest else "a newer"
        return (
            f"torch has no kernels for this GPU ({torch.cuda.get_device_name(index)}, "
            f"sm_{major}{minor}; torch {torch.__version__} has {' '.join(architectures)}). fix: "
            f"install a torch build for {newer_or_older} CUDA, or use device=cpu (--device cpu)"
        )
    return None


def has_kernels(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether code for these architectures, such as sm_86 and compute_90, runs on a GPU.

    Machine code (sm_XY) runs on GPUs with the same major capability and at least the same minor
    one; PTX (compute_XY), which the driver compiles, also runs on all later GPUs. With the suffix
    a, both run only on exactly this capability; with f, only on the same major capability.
    See the section on compute capabilities in NVIDIA's CUDA C++ Programming Guide.
    """
    for name in architectures:
        kind, major, minor, suffix = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name).groups()
        built_for = (int(major), int(minor))
        is_later = capability >= built_for
        if suffix == "a":
            is_compatible = capability == built_for
        elif kind == "sm" or suffix == "f":
            is_compatible = is_later and capability[0] == built_for[0]
        else:
            is_compatible = is_later
        if is_compatible:
            return True
    return False


def pick_precision(wanted: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products for `precision=wanted`; weights are always in fp32.

    auto picks a dtype that the device multiplies without emulation. Raises ValueError for fp16 on a
    CPU.
    """
    if wanted == "fp16" and device.type == "cpu":
        raise ValueError("fp16 needs a GPU (precision=fp16, device=cpu). fix: precision=auto")
    if wanted != "auto":
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]
    return fastest_dtype(device)


def fastest_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the fastest matrix products: bf16, fp16 on GPUs before Ampere, or fp32."""
    if multiplies_bf16(device):
        return torch.bfloat16
    if device.type == "cuda":
        return torch.float16
    return torch.float32


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 natively; emulation is several times slower."""
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return False


def prepare_for_training(device: torch.device) -> None:
    """Set how the whole process multiplies fp32 matrices and frees memory.

    On a GPU, fp32 matrix products run in TF32. On a CPU, the allocator keeps freed memory instead
    of returning it to the system. Commands that do not call this multiply in full fp32.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    keep_freed_memory(device)


def describe_products(device: torch.device, dtype: torch.dtype) -> str:
    """The dtype of matrix products in training, such as torch.bfloat16; on a GPU, fp32 is TF32."""
    is_tf32 = dtype == torch.float32 and device.type == "cuda" and multiplies_bf16(device)
    return f"{dtype} with products in TF32" if is_tf32 else str(dtype)


def sdpa_backend(device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that torch chooses to train plain causal attention with heads of width 64.

    It is one of the names in torch.nn.attention.SDPBackend, such as CUDNN_ATTENTION.
    """
    q = torch.zeros(1, 8, 1024, 64, device=device, dtype=dtype, requires_grad=True)
    return SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU with glibc, let the allocator keep freed memory.

    Otherwise, each step would get new pages, which the system fills with zeros.
    """
    # Do not map large blocks one by one, and do not return the end of the heap to the system.
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def use_huge_pages() -> None:
    """Let torch request huge pages for tensors of 2 MiB or more; call before the first tensor.

    Decoding reads all weights for each token. With pages of 4 KiB, which is the default on most
    systems, looking up the addresses takes up to half of the time
    (docs.kernel.org/admin-guide/mm/transhuge.html). Training does not benefit.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """A context in which matrices are multiplied in `dtype`."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def processor_features() -> str:
    """The processor's architecture, its flags, and the instruction set that torch uses."""
    flags = cpuinfo("flags|Features")  # x86, Arm
    return f"{platform.machine()} {flags} {torch.backends.cpu.get_cpu_capability()}"


def processor() -> str:
    """The name of the processor, or of its architecture if the name is unknown."""
    return cpuinfo("model name") or platform.machine()


@cache
def cpuinfo(field: str) -> str:
    """The `field` (a pattern) of the first processor in /proc/cpuinfo; empty if missing."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return ""
    match = re.search(
        rf"^({field})\s*: (?P<value>.*)", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    if match is None:
        return ""
    return match["value"]


def peak_flops(device: torch.device) -> float | None:
    """The device's peak FLOP/s in dense bf16; None if PEAKS lacks the device."""
    return find_peak(device, PEAKS)


def peak_bandwidth(device: torch.device) -> float | None:
    """The device's peak memory bandwidth in bytes/s; None if BANDWIDTHS lacks the device."""
    return find_peak(device, BANDWIDTHS)


def find_peak(device: torch.device, peaks: dict[str, float]) -> float | None:
    """The value of the first pattern in `peaks` that matches the GPU's name."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for pattern, peak in peaks.items():
        if re.search(rf"\b({pattern})\b", name):
            return peak
    return None


def peak_memory(device: torch.device) -> int:
    """This process's peak memory in bytes: allocated by torch on a GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # On Linux, ru_maxrss includes the memory of the process that started this one, so read the
    # peak of this process alone.
    status = Path("/proc/self/status")
    if status.exists():
        peak = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text("utf-8"), re.MULTILINE)
        if peak:
            return 1024 * int(peak[1])
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":  # macOS counts in bytes, Linux in KiB
        return size
    return 1024 * size


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copy tensors to a device; to CUDA from pinned memory and without blocking."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        tensors = [x.pin_memory() for x in tensors]
    return [x.to(device, non_blocking=is_cuda) for x in tensors]
