"""Describe this machine, and report anything that slows down training:

    python -m tools.doctor

It takes no arguments. Each finding is one line with a fix.
"""

import torch
from torch.utils import collect_env

from run import compilation, errors, hardware, threads
from run.cli import Parser


def main() -> None:
    device = hardware.pick_device("auto")
    describe_machine(device)
    findings = slow(device)
    for finding in findings:
        print(f"slow: {finding}")
    if not findings:
        print("found nothing that slows down training")
    print("next: python train.py")


def nvidia_driver() -> str | None:
    """Return the NVIDIA driver version that nvidia-smi reports, such as 535.161.08."""
    return collect_env.get_nvidia_driver_version(collect_env.run)


def describe_machine(device: torch.device) -> None:
    """Print this machine's hardware and software, and the choices that train.py makes on it."""
    print("processor:", hardware.processor(), f"{torch.get_num_threads()} threads")
    print("torch:", torch.__version__, "NVIDIA driver:", nvidia_driver())
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        print(f"GPU: {torch.cuda.get_device_name()}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free")
    is_compiled = compilation.pick_compile("auto", device, is_long=True)
    precision = hardware.pick_precision("auto", device)
    print(
        f"training: {device}, {precision} products, compile={is_compiled} (compile=auto: in runs "
        f"of at least {compilation.LONG_STEPS} steps and {compilation.LONG_MINUTES:g} minutes, "
        "such as the default run)"
    )


def slow(device: torch.device) -> list[str]:
    """Return the problems that slow down training on a device, each with a fix."""
    findings = []
    missing = compilation.missing_for_compilation(device)
    if missing is not None and device.type != "mps":
        findings.append(f"steps cannot be compiled without {missing}. fix: install it")
    num_cores = len(threads.cores())
    quota = threads.cpu_quota()
    if quota is not None and quota < num_cores:
        findings.append(
            f"a quota allows {quota:.1f} of {num_cores} cores. fix: raise the quota (docker run "
            "--cpus=N, resources.limits.cpu)"
        )
    driver = nvidia_driver()
    if driver is not None and torch.version.cuda is None:
        findings.append(
            f"this build of torch does not support NVIDIA GPUs (driver {driver}, torch "
            f"{torch.__version__}). fix: install a build of torch for CUDA"
        )
    elif driver is not None and device.type != "cuda":
        findings.append(
            f"torch cannot use the NVIDIA GPU here (driver {driver}, torch for CUDA "
            f"{torch.version.cuda}). fix: install a newer driver or a torch build for an older "
            "CUDA, or set CUDA_VISIBLE_DEVICES=0"
        )
    return findings


if __name__ == "__main__":
    with errors.report_errors():
        Parser("python -m tools.doctor", __doc__).parse_args()
        main()
