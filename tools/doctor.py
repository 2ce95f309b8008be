"""What this machine is, and what stops or slows training on it:  python -m tools.doctor

Each finding is a line with a fix. The exit code is 2 if one of them stops train.py, else 0.
"""

import os
import shutil
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch

from common import compilation, errors, hardware

MIN_DISK_BYTES = 5e9  # a checkpoint of model=350m
MIN_FREE_SHARE = 0.8  # of a GPU's memory


def main() -> None:
    # What train.py itself says about the device.
    stops = []
    said = StringIO()
    try:
        with redirect_stderr(said):
            device = hardware.pick_device("auto")
        slows = said.getvalue().splitlines() + slow(device)
        describe(device)
    except ValueError as error:
        slows = []
        stops.append(str(error))

    # Folders that are not there yet will be made in this one.
    for name in (".cache", "runs"):
        folder = Path(name) if Path(name).exists() else Path.cwd()
        if not compilation.is_writable(folder):
            stops.append(f"nothing can be written ({folder.absolute()}). fix: another folder")
    if shutil.disk_usage(".").free < MIN_DISK_BYTES:
        slows.append("the disk has no room for checkpoints (5 GB). fix: delete old runs")

    for line in stops:
        print("stops:", line)
    for line in slows:
        print("slow:", line)
    print(f"{len(stops)} findings stop training here, {len(slows)} slow it")
    if stops:
        raise SystemExit(errors.INPUT)


def describe(device: torch.device) -> None:
    """Print what the machine is, and what train.py chooses on it."""
    flags = processor_flags()
    features = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()}"
    print("processor:", hardware.processor(), threads, *features)
    print("torch:", torch.__version__, "driver:", hardware.nvidia_driver())
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            print(f"GPU {index}: {name}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free")
    _, reason = compilation.pick_compile("auto", device, is_long=True)
    precision = hardware.pick_precision("auto", device)
    print(f"training: {device}, {precision} products, compile=auto: {reason}")


def slow(device: torch.device) -> list[str]:
    """What makes training slow on a device."""
    missing = compilation.missing_for_compilation(device)
    checks = {f"steps are not compiled without {missing}. fix: install it": missing is not None}
    if device.type == "cpu":
        flags = processor_flags()
        # Half of the processors may be threads of the others.
        idles = torch.get_num_threads() < os.cpu_count() // 2
        checks |= {
            "no AVX-512: half the speed. fix: a GPU": "avx512f" not in flags and "avx2" in flags,
            "bf16 would be emulated, so auto takes fp32. fix: no precision=bf16": (
                not hardware.multiplies_bf16(device)
            ),
            "torch leaves processors idle. fix: a larger OMP_NUM_THREADS, or none": idles,
        }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        is_old = torch.cuda.get_device_capability(device) < (8, 0)
        checks |= {
            "others use this GPU's memory. fix: nvidia-smi lists them": (
                free < MIN_FREE_SHARE * total
            ),
            "a part of a GPU (MIG). fix: CUDA_VISIBLE_DEVICES with a whole one": (
                "MIG" in torch.cuda.get_device_name(device)
            ),
            "no bf16 and TF32 on this GPU. fix: one of compute capability 8.0 or more": is_old,
            "TF32 is off: slow fp32. fix: unset NVIDIA_TF32_OVERRIDE": (
                os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
            ),
            "one of several GPUs is used. fix: torchrun --nproc_per_node=gpu train.py": (
                torch.cuda.device_count() > 1
            ),
        }
    return [finding for finding, is_here in checks.items() if is_here]


def processor_flags() -> list[str]:
    return " ".join(hardware.processor_features()).split()


if __name__ == "__main__":
    main()
