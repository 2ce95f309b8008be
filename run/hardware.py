"""The device of this machine, with its precision, peak FLOP/s and memory, and the processor."""

import ctypes
import os
import platform
import re
import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from run.progress import print0

# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4

# Peak FLOP/s of dense bf16 tensor-core products (T4: fp16) and peak memory bandwidth in bytes/s,
# from NVIDIA's data sheets. Keys are patterns of device names; the first one that matches is used.
PEAKS = {
    "D|Laptop|MIG|Ti": (None, None),  # variants with other peaks, and parts of a GPU
    "GB200": (2500e12, 8e12),
    "B200": (2250e12, 8e12),
    "(H100|H800) PCIe": (756e12, 2e12),
    "H100 NVL": (835e12, 3.9e12),
    "H200 NVL": (835e12, 4.8e12),
    "H200": (989e12, 4.8e12),
    "GH200": (989e12, 4e12),
    "H100|H800": (989e12, 3.35e12),
    "H20": (148e12, 4e12),
    "(A100|A800) 80GB PCIe": (312e12, 1.94e12),
    "(A100|A800).*80GB": (312e12, 2.04e12),
    "(A100|A800).*40GB": (312e12, 1.56e12),
    "A10G": (70e12, 0.6e12),
    "A40": (150e12, 0.7e12),
    "A6000": (155e12, 0.77e12),
    "RTX 6000 Ada": (364e12, 0.96e12),
    "L40S": (362e12, 0.86e12),
    "L40": (181e12, 0.86e12),
    "L4": (121e12, 0.3e12),
    "RTX 5090": (209e12, 1.79e12),
    "RTX 4090": (165e12, 1.01e12),
    "RTX 3090": (71e12, 0.94e12),
    "T4": (65e12, 0.32e12),
}


def pick_device(wanted: str) -> torch.device:
    """Return the device for `device=wanted`; auto picks a GPU if torch can use one.

    Raises ValueError for a device that torch cannot use.
    """
    # In order of preference.
    for kind in ("cuda", "mps", "cpu"):
        if wanted in (kind, "auto") and is_available(kind):
            return torch.device(kind)
    raise ValueError(
        f"torch cannot use this device (device={wanted}; python -m torch.utils.collect_env prints "
        "the versions of torch, CUDA and the driver). fix: device=auto (--device auto)"
    )


def is_available(kind: str) -> bool:
    """Whether torch can use a kind of device: cuda, mps or cpu."""
    if kind == "cuda":
        return torch.cuda.is_available() and has_kernels()
    if kind == "mps":
        return torch.backends.mps.is_available()
    return True


@cache
def has_kernels() -> bool:
    """Whether a kernel of torch runs on the GPU; if not, print a line, once.

    torch also finds GPUs that are too old or too new for its kernels.
    """
    try:
        torch.zeros(1, device="cuda")
        return True
    except RuntimeError as error:
        name = torch.cuda.get_device_name()
        print0(f"warning: torch cannot use {name} ({str(error).splitlines()[0]})")
        return False


def pick_precision(wanted: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products for `precision=wanted`; weights stay in fp32.

    auto picks a dtype that the device multiplies without emulation. Raises ValueError for fp16 on a
    CPU.
    """
    if wanted == "fp16" and device.type == "cpu":
        raise ValueError("fp16 needs a GPU (precision=fp16, device=cpu). fix: precision=auto")
    if wanted != "auto":
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]
    return fastest_dtype(device)


def fastest_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of the fastest matrix products: bf16, fp16 (GPUs before Ampere) or fp32."""
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

    On an NVIDIA GPU from Ampere on, fp32 matrix products run in TF32. On a CPU with glibc, the
    allocator keeps freed memory instead of returning it to the system. Commands that do not call
    this multiply fp32 matrices in full fp32.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    keep_freed_memory(device)


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

    Decoding reads the weights for each token. With pages of 4 KiB, the default on most systems,
    translating their addresses takes up to half of the time
    (docs.kernel.org/admin-guide/mm/transhuge.html). Training does not benefit.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Return a context in which matrices are multiplied in `dtype`."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def processor_features() -> str:
    """Return the processor's architecture, its flags, and the instruction set that torch uses."""
    flags = cpuinfo("flags|Features")  # x86, Arm
    return f"{platform.machine()} {flags} {torch.backends.cpu.get_cpu_capability()}"


def processor() -> str:
    """Return the name of the processor, or of its architecture if the name is unknown."""
    return cpuinfo("model name") or platform.machine()


@cache
def cpuinfo(field: str) -> str:
    """Return the `field` (a pattern) of the first processor in /proc/cpuinfo; empty if missing."""
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
    """Return the device's peak FLOP/s in dense bf16; None if PEAKS lacks the device."""
    return find_peaks(device)[0]


def peak_bandwidth(device: torch.device) -> float | None:
    """Return the device's peak memory bandwidth in bytes/s; None if PEAKS lacks the device."""
    return find_peaks(device)[1]


def find_peaks(device: torch.device) -> tuple[float, float] | tuple[None, None]:
    """Return the first entry of PEAKS that matches the GPU's name, or (None, None)."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for pattern, peaks in PEAKS.items():
            if re.search(rf"\b({pattern})\b", name):
                return peaks
    return (None, None)


def peak_memory(device: torch.device) -> int:
    """Return this process's peak memory in bytes: allocated by torch on CUDA, else resident."""
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
