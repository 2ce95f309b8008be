"""What the machine is and can do: device, precision, peak rate, memory."""

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

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
DEVICES = Path("/dev")
# The least driver for each major version of CUDA: NVIDIA's CUDA Toolkit Release Notes, table 2.
DRIVERS = {11: 450, 12: 525, 13: 580}

# Dense tensor-core peaks in bf16 (V100 and T4: fp16), FLOP/s, from NVIDIA's data sheets. The first that fits counts.
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
    """Raises ValueError for a device that is not there, or an NVIDIA GPU that torch cannot use."""
    if wanted == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings(record=True) as caught:  # torch's own words would precede our line
        warnings.simplefilter("always")
        has_cuda = torch.cuda.is_available()
    if not has_cuda and wanted in ("auto", "cuda"):
        check_unused_gpu()
        for warning in caught:  # of a driver that stands elsewhere, as under WSL
            print(f"warning: {str(warning.message).partition('. ')[0]}", file=sys.stderr)
    there = {"cuda": has_cuda, "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return torch.device(next(kind for kind in there if there[kind]))
    if not there[wanted]:
        raise ValueError(f"no such device here (device={wanted}). fix: device=auto or device=cpu")
    return torch.device(wanted)


def check_unused_gpu() -> None:
    """What to do about an NVIDIA GPU that torch does not see; nothing where there is none.

    Raises ValueError where torch has CUDA: the driver is too old, or broken. A build of torch
    without CUDA gets a note, once.
    """
    driver = nvidia_driver()
    if driver is None:
        return
    if torch.version.cuda is None:
        note_unused_gpu(driver)
        return
    needed = DRIVERS.get(int(torch.version.cuda.partition(".")[0]))
    major = int(driver.partition(".")[0])
    found = f"driver {driver}, CUDA {torch.version.cuda} of torch {torch.__version__}"
    if needed is None or major >= needed:
        fix = "what nvidia-smi says, or device=cpu"
        raise ValueError(f"torch cannot use the NVIDIA GPU here ({found}). fix: {fix}")
    fix = f"NVIDIA driver {needed} or newer"
    if major >= DRIVERS[12]:
        fix += f", a torch {torch.__version__.partition('+')[0]} build for CUDA 12.6"
    raise ValueError(f"the NVIDIA driver is too old for torch ({found}). fix: {fix}, or device=cpu")


def nvidia_driver() -> str | None:
    """Version of the NVIDIA driver, such as 535.161.08, where there is a GPU that nobody hid.

    A container that was given no GPU shows the driver of its host, but no device of it.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    if re.match(r"\d|GPU-|MIG-", visible) is None:  # "", -1 and NoDevFiles hide all
        return None
    if not NVIDIA_DRIVER.exists() or not list(DEVICES.glob("nvidia[0-9]*")):
        return None
    found = re.search(r"Module.*?\s(\d+\.[\d.]+)", NVIDIA_DRIVER.read_text())
    return found[1] if found else None


@cache
def note_unused_gpu(driver: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        about = f"driver {driver}, torch {torch.__version__}"
        print(f"note: an NVIDIA GPU is here, but this torch has no CUDA ({about})", file=sys.stderr)


def pick_precision(wanted: str, device: torch.device) -> torch.dtype:
    """What matrices are multiplied in; weights are fp32 in any case. Raises ValueError where the device has no bf16."""
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        best = torch.bfloat16 if has_bf16 else torch.float16
    else:
        has_bf16 = True  # emulated where there is none
        best = torch.bfloat16 if multiplies_bf16(device) else torch.float32
    if wanted == "bf16" and not has_bf16:
        raise ValueError(
            f"this GPU has no bf16 (precision=bf16, {torch.cuda.get_device_name()}). fix: precision=fp16"
        )
    if wanted == "fp16" and device.type == "cpu":
        raise ValueError("fp16 needs a GPU (precision=fp16, device=cpu). fix: precision=auto")
    return {"auto": best, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
        wanted
    ]


def multiplies_bf16(device: torch.device) -> bool:
    """Whether products in bf16 are fast here; elsewhere a CPU takes several times as long as for fp32."""
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == "cuda"


def keep_freed_memory(device: torch.device) -> None:
    """With glibc on a CPU, memory that is freed stays with the process: fresh pages would be zeroed at every step."""
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def processor_features() -> list[str]:
    """What decides which machine code runs here: the architecture and the flags of its processors."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = {line for line in lines if line.startswith(("flags", "Features"))}  # x86, Arm
    return [platform.machine(), *sorted(flags)]


def processor() -> str:
    """Its name, as far as it is known."""
    known = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", known.read_text()) if known.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """For sums that must not depend on their order: fp64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def peak_flops(device: torch.device) -> float | None:
    """None where the device is not in the table: an MFU would be a guess."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS.items() if re.search(rf"\b({known})\b", name)), None)


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


pass


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """The same, where they are computed with; pinned on the way to a GPU, so that nobody waits."""
    return [
        (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)
        for x in tensors
    ]
