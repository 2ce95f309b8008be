"""What tools.doctor says of machines that are not there."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from run import compilation, hardware
from tests.run.test_hardware import machine  # noqa: F401

GB = 10**9


@pytest.fixture
def diagnose(command, monkeypatch):
    """Runs the command; this machine has room, a compiler and AVX-512 unless a test says else."""
    monkeypatch.setattr(hardware, "processor_features", lambda: ["x86_64", "flags: avx2 avx512f"])
    monkeypatch.setattr(hardware, "multiplies_bf16", lambda device: True)
    monkeypatch.setattr(compilation, "missing_for_compilation", lambda device: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * GB))
    return lambda: command("tools/doctor.py")


@pytest.fixture
def gpu(monkeypatch):
    """Makes this machine one with a GPU that torch can use."""

    def make(name="NVIDIA H100 80GB HBM3", capability=(9, 0), free=79):
        for key, value in {
            "is_available": True,
            "get_device_name": name,
            "get_device_capability": capability,
            "mem_get_info": (free * GB, 80 * GB),
            "is_bf16_supported": capability >= (8, 0),
        }.items():
            monkeypatch.setattr(torch.cuda, key, lambda *_, value=value, **__: value)

    return make


def test_a_machine_without_findings(diagnose):
    result = diagnose()
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[-1] == "nothing found that stops or slows training"
    assert "training: cpu" in result.out


def test_a_driver_that_is_too_old_stops_training(diagnose, machine):  # noqa: F811
    machine("535.161.08")
    result = diagnose()
    assert result.code == 2
    assert "stops: the NVIDIA driver is too old for torch (driver 535.161.08" in result.out


def test_a_torch_without_cuda_leaves_the_gpu_idle(diagnose, machine):  # noqa: F811
    machine("580.65.06", cuda=None)
    result = diagnose()
    assert (result.code, result.err) == (0, "")
    assert "slow: note: an NVIDIA GPU is here, but this torch has no CUDA" in result.out


def test_a_folder_that_cannot_be_written_stops_training(diagnose, monkeypatch):
    Path("runs").mkdir()
    monkeypatch.setattr(compilation, "is_writable", lambda folder: folder.name != "runs")
    result = diagnose()
    assert result.code == 2 and result.out.count("stops: ") == 1 and "runs" in result.out


def test_nothing_is_left_behind(diagnose):
    diagnose()
    assert not Path("runs").exists() and not Path(".cache").exists()


CPU_CASES = {
    "no AVX-512": (hardware, "processor_features", ["x86_64", "flags: avx2"]),
    "less than 5 GB": (shutil, "disk_usage", SimpleNamespace(free=GB)),
    "bf16 would be emulated": (hardware, "multiplies_bf16", False),
    "processors idle": (torch, "get_num_threads", 0),
    "without a C++ compiler": (compilation, "missing_for_compilation", "a C++ compiler"),
}


@pytest.mark.parametrize("finding", CPU_CASES)
def test_what_slows_a_cpu(diagnose, monkeypatch, finding):
    owner, name, value = CPU_CASES[finding]
    monkeypatch.setattr(owner, name, lambda *_: value)
    result = diagnose()
    (line,) = [line for line in result.out.splitlines() if line.startswith(("slow: ", "risk: "))]
    assert result.code == 0 and finding in line and "fix: " in line


GPU_CASES = {
    "others use this GPU's memory": {"free": 40},
    "MIG": {"name": "NVIDIA A100-SXM4-40GB MIG 3g.20gb"},
    "no bf16 and TF32": {"capability": (7, 5)},
}


@pytest.mark.parametrize("finding", GPU_CASES)
def test_what_slows_a_gpu(diagnose, gpu, finding):
    gpu(**GPU_CASES[finding])
    result = diagnose()
    (line,) = [line for line in result.out.splitlines() if line.startswith("slow: ")]
    assert result.code == 0 and finding in line and "fix: " in line


def test_tf32_that_the_environment_switches_off(diagnose, gpu, monkeypatch):
    gpu()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert "slow: TF32 is off" in diagnose().out


def test_a_gpu_and_what_it_would_train_with(diagnose, gpu):
    gpu()
    result = diagnose()
    assert "GPU: NVIDIA H100 80GB HBM3, 79 of 80 GB free" in result.out
    assert "training: cuda, torch.bfloat16 products" in result.out
    assert result.out.splitlines()[-1] == "nothing found that stops or slows training"
