"""Reports of tools.doctor for simulated machines."""

import math
import os
from pathlib import Path

import pytest
import torch

from run import compilation, hardware, threads
from tests.conftest import settings_of
from tools import doctor

GB = 10**9
NOTHING = "found nothing that slows down training"


@pytest.fixture
def machine(monkeypatch):
    """A function that simulates an NVIDIA driver with a GPU that torch does not detect."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")

    def make(driver: str, cuda: str | None = "13.0") -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        said = f"| NVIDIA-SMI {driver}    Driver Version: {driver}    CUDA Version: 12.2 |"
        monkeypatch.setattr(doctor.collect_env, "run", lambda command: (0, said, ""))

    return make


@pytest.fixture
def diagnose(command, monkeypatch):
    """Run the command on a simulated idle machine with a compiler, which tests may modify."""
    monkeypatch.setattr(hardware, "multiplies_bf16", lambda device: True)
    monkeypatch.setattr(compilation, "missing_for_compilation", lambda device: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)
    return lambda: command("tools/doctor.py")


@pytest.fixture
def gpu(monkeypatch):
    """Simulate a GPU that torch can use."""
    for key, value in {
        "is_available": True,
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "is_bf16_supported": True,
        "mem_get_info": (79 * GB, 80 * GB),
    }.items():
        monkeypatch.setattr(torch.cuda, key, lambda *_, value=value, **__: value)
    monkeypatch.setattr(hardware, "has_kernels", lambda: True)


def test_a_machine_without_problems_has_no_findings(diagnose):
    result = diagnose()
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[-2:] == [NOTHING, "next: python train.py"]
    assert "training: cpu" in result.out
    # compile=auto compiles the default run.
    settings = settings_of()
    assert settings.compile == "auto" and "compile=True (compile=auto: in runs of at" in result.out
    assert compilation.is_long_run(math.inf, settings.max_minutes)
    assert not Path("runs").exists() and not Path(".cache").exists()


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_a_gpu_that_torch_does_not_detect_is_reported(machine, capsys, cuda):
    machine("535.161.08", cuda=cuda)
    doctor.main()
    told = capsys.readouterr().out
    if cuda is None:
        assert "does not support NVIDIA GPUs (driver 535.161.08, torch " in told
        assert "fix: install a build of torch for CUDA" in told
    else:
        assert f"(driver 535.161.08, torch for CUDA {cuda}). fix: " in told


def test_a_missing_compiler_is_reported(diagnose, monkeypatch):
    monkeypatch.setattr(compilation, "missing_for_compilation", lambda _: "a C++ compiler")
    result = diagnose()
    (line,) = [line for line in result.out.splitlines() if line.startswith("slow: ")]
    assert result.code == 0 and "without a C++ compiler" in line and "fix: " in line
    # Nothing can be installed that would compile for an Apple GPU.
    assert not [line for line in doctor.slow(torch.device("mps")) if "compiled" in line]


def test_a_cpu_quota_is_reported(diagnose, monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: [0, 1])
    monkeypatch.setattr(threads, "cpu_quota", lambda: 1.5)
    (quota,) = [line for line in diagnose().out.splitlines() if line.startswith("slow: ")]
    assert "quota allows 1.5 of 2 cores" in quota


def test_a_gpu_and_its_training_settings_are_reported(diagnose, gpu):
    result = diagnose()
    assert "GPU: NVIDIA H100 80GB HBM3, 79 of 80 GB free" in result.out
    assert "training: cuda, torch.bfloat16 products" in result.out
    assert NOTHING in result.out


def test_a_gpu_without_kernels_is_reported(machine, gpu, monkeypatch, capsys):
    machine("580.95.05")
    monkeypatch.setattr(hardware, "has_kernels", lambda: False)
    doctor.main()
    out = capsys.readouterr().out
    assert "training: cpu" in out and "slow: torch cannot use the NVIDIA GPU" in out
