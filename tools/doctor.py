"""What this machine is, and what stops, slows or endangers training on it: python -m tools.doctor

Each finding is a line with a fix. The exit code is 2 if one of them stops train.py, else 0.
"""

import os
import shutil
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch

from run import compilation, errors, hardware

MIN_DISK_BYTES = 5e9  # a checkpoint of model=350m
MIN_FREE_SHARE = 0.8  # of a GPU's memory


def main() -> None:
    describe_machine()

    # What train.py itself says about the device.
    findings = []
    notes = StringIO()
    try:
        with redirect_stderr(notes):
            device = hardware.pick_device("auto")
        describe_choices(device)
        findings += [f"slow: {line}" for line in notes.getvalue().splitlines() + slow(device)]
    except ValueError as error:
        findings.append(f"stops: {error}")
    # Errors and notes of train.py name this tool.
    findings = [finding.removesuffix(f" {hardware.DOCTOR}") for finding in findings]

    # Folders that are not there yet will be made in this one.
    for name in (".cache", "runs"):
        folder = Path(name) if Path(name).exists() else Path.cwd()
        if not compilation.is_writable(folder):
            findings.append(f"stops: {folder} cannot be written to. fix: run in another folder")
    if shutil.disk_usage(".").free < MIN_DISK_BYTES:
        findings.append("risk: less than 5 GB are free for checkpoints. fix: delete old runs")

    print(*findings or ["nothing found that stops or slows training"], sep="\n")
    if any(finding.startswith("stops") for finding in findings):
        raise SystemExit(errors.INPUT)


def describe_machine() -> None:
    """Print the processor, torch and the driver, whether or not train.py can start."""
    flags = processor_flags().intersection(("avx2", "avx512f", "avx512_bf16", "amx_bf16"))
    print("processor:", hardware.processor(), f"{os.cpu_count()} threads", *sorted(flags))
    print("torch:", torch.__version__, "NVIDIA driver:", hardware.nvidia_driver())


def describe_choices(device: torch.device) -> None:
    """Print the GPU, and what train.py chooses on this machine."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        print(f"GPU: {torch.cuda.get_device_name()}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free")
    _, reason = compilation.pick_compile("auto", device, is_long=True)
    precision = hardware.pick_precision("auto", device)
    print(f"training: {device}, {precision} products, compile=auto: {reason}")


def slow(device: torch.device) -> list[str]:
    """What makes training slow on a device."""
    findings = []
    missing = compilation.missing_for_compilation(device)
    if missing is not None:
        findings.append(f"steps are not compiled without {missing}. fix: install it")
    if device.type == "cpu":
        flags = processor_flags()
        if not hardware.multiplies_bf16(device):
            findings.append("bf16 would be emulated, so auto takes fp32. fix: no precision=bf16")
        if "avx2" in flags and "avx512f" not in flags:
            findings.append("no AVX-512: half the speed. fix: a processor that has it")
        # Half of the processors may be threads of the others.
        if torch.get_num_threads() < os.cpu_count() // 2:
            findings.append("torch leaves processors idle. fix: a larger OMP_NUM_THREADS, or none")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        if free < MIN_FREE_SHARE * total:
            findings.append("others use this GPU's memory. fix: nvidia-smi lists them")
        if "MIG" in torch.cuda.get_device_name():
            findings.append("a part of a GPU (MIG). fix: CUDA_VISIBLE_DEVICES with a whole one")
        if torch.cuda.get_device_capability() < (8, 0):
            findings.append(
                "no bf16 and TF32 on this GPU. fix: one of compute capability 8.0 or more"
            )
        if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
            findings.append("TF32 is off: slow fp32. fix: unset NVIDIA_TF32_OVERRIDE")
    return findings


def processor_flags() -> set[str]:
    return set(" ".join(hardware.processor_features()).split())


if __name__ == "__main__":
    main()
