"""What this machine is and can do: device, precision, peak FLOP/s, memory."""

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

# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4

# Where Linux shows the NVIDIA driver and its GPUs.
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
DEVICES = Path("/dev")
# The least driver for each major version of CUDA: NVIDIA's CUDA Toolkit Release Notes, table 2.
DRIVERS = {12: 525, 13: 580}
DOCTOR = "More: python -m tools.doctor"

# Dense tensor-core peaks in bf16 (V100 and T4: fp16), FLOP/s, from NVIDIA's data sheets.
# Keys are patterns of device names, of which the first that matches counts.
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
    "V100": 125e12,
    "T4": 65e12,
}


def pick_device(wanted: str) -> torch.device:
    """The device for `device=wanted`: auto takes a GPU if there is one.

    Raises ValueError for a device that is not there, or an NVIDIA GPU that torch cannot use.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    # torch's own warning would precede our line.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_cuda = torch.cuda.is_available()
    if not has_cuda and wanted in ("auto", "cuda"):
        check_unused_gpu()
        # No driver was found, but it may be in another place, as under WSL.
        for warning in caught:
            print(f"warning: {str(warning.message).partition('. ')[0]}", file=sys.stderr)

    # In order of preference.
    is_available = {"cuda": has_cuda, "mps": torch.backends.mps.is_available(), "cpu": True}
    for kind, is_here in is_available.items():
        if is_here and wanted in (kind, "auto"):
            return torch.device(kind)
    raise ValueError(f"no such device here (device={wanted}). fix: device=auto or device=cpu")


def check_unused_gpu() -> None:
    """Refuse to go on without an NVIDIA GPU that is here but that torch does not see.

    Raises ValueError if torch has CUDA: the driver is too old, or broken. For a build of torch
    without CUDA, prints a note once.
    """
    driver = nvidia_driver()
    if driver is None:
        return
    if torch.version.cuda is None:
        note_unused_gpu(driver)
        return
    # A driver that is new enough is broken; another one can be updated, or torch replaced.
    needed = DRIVERS.get(int(torch.version.cuda.partition(".")[0]), 0)
    major = int(driver.partition(".")[0])
    versions = f"driver {driver}, CUDA {torch.version.cuda} of torch {torch.__version__}"
    if major >= needed:
        raise ValueError(
            f"torch cannot use the NVIDIA GPU here ({versions}). "
            f"fix: what nvidia-smi says, or device=cpu. {DOCTOR}"
        )
    fix = f"NVIDIA driver {needed} or newer"
    if major >= DRIVERS[12]:
        fix += f", a torch {torch.__version__.partition('+')[0]} build for CUDA 12.6"
    raise ValueError(
        f"the NVIDIA driver is too old for torch ({versions}). fix: {fix}, or device=cpu. {DOCTOR}"
    )


def nvidia_driver() -> str | None:
    """The version of the NVIDIA driver, such as 535.161.08; None without a GPU, or if it is hidden.

    A container without GPUs shows the driver of its host, but none of its devices.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    if re.match(r"\d|GPU-|MIG-", visible) is None:  # "", -1 and NoDevFiles hide all
        return None
    if not NVIDIA_DRIVER.exists() or not list(DEVICES.glob("nvidia[0-9]*")):
        return None
    match = re.search(r"Module.*?\s(\d+\.[\d.]+)", NVIDIA_DRIVER.read_text())
    return match[1] if match else None


@cache
def note_unused_gpu(driver: str) -> None:
    """Print, once a process, that torch cannot use the GPU."""
    if os.environ.get("RANK", "0") == "0":
        print(
            "note: an NVIDIA GPU is here, but this torch has no CUDA "
            f"(driver {driver}, torch {torch.__version__}). "
            f"fix: a torch build for CUDA. {DOCTOR}",
            file=sys.stderr,
        )


def pick_precision(wanted: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products for `precision=wanted`; weights are in fp32 in any case.

    Raises ValueError for one that the device does not have.
    """
    if wanted == "fp32":
        return torch.float32
    if wanted == "fp16":
        if device.type == "cpu":
            raise ValueError("fp16 needs a GPU (precision=fp16, device=cpu). fix: precision=auto")
        return torch.float16

    # bf16 is emulated on CPUs that do not have it, which auto avoids.
    if device.type != "cuda":
        if wanted == "bf16" or multiplies_bf16(device):
            return torch.bfloat16
        return torch.float32
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    if wanted == "bf16":
        name = torch.cuda.get_device_name()
        raise ValueError(f"this GPU has no bf16 (precision=bf16, {name}). fix: precision=fp16")
    return torch.float16


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the device has bf16 products; a CPU without is several times slower than in fp32."""
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == "cuda"


def prepare_for_training(device: torch.device) -> None:
    """Let fp32 products run in TF32 on a GPU, and keep freed memory on a CPU.

    Both hold for the whole process. Commands that do not call this multiply in full fp32.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    keep_freed_memory(device)


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU with glibc, let the process keep freed memory.

    Otherwise every step would get fresh pages, which the system fills with zeros.
    """
    # Do not map large blocks one by one, and do not give back the end of the heap.
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """A context in which matrices are multiplied in `dtype`."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def processor_features() -> list[str]:
    """The architecture and the flags of the processors, which determine the machine code."""
    lines = cpuinfo().splitlines()
    flags = {line for line in lines if line.startswith(("flags", "Features"))}  # x86, Arm
    return [platform.machine(), *sorted(flags)]


def processor() -> str:
    """The name of the processor, or else of its architecture."""
    match = re.search(r"model name\s*: (.*)", cpuinfo())
    return match[1] if match else platform.processor() or platform.machine()


@cache
def cpuinfo() -> str:
    """What Linux says about the processors; empty on other systems."""
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums whose order must not matter: fp64, or fp32 on MPS, which has no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s; None for a device that is not in the table: an MFU would be a guess."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for pattern, peak in PEAKS.items():
        if re.search(rf"\b({pattern})\b", name):
            return peak
    return None


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: allocated by torch on a GPU, else resident in memory (this process)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copy tensors to a device; from pinned memory and without blocking on CUDA."""
    if device.type == "cuda":
        tensors = [x.pin_memory() for x in tensors]
    return [x.to(device, non_blocking=True) for x in tensors]
