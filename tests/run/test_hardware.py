"""The selection of the device, and the precision of fp32 products."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from run import hardware
from tests.conftest import TINY


@pytest.mark.parametrize(
    ("wanted", "usable", "picked"),
    [
        ("auto", (), "cpu"),
        ("auto", ("mps",), "mps"),
        ("auto", ("cuda", "mps"), "cuda"),
        ("cpu", ("cuda", "mps"), "cpu"),
        ("cuda", ("mps",), None),
    ],
)
def test_auto_selects_the_best_device_that_torch_can_use(monkeypatch, wanted, usable, picked):
    for kind, backend in (("cuda", torch.cuda), ("mps", torch.backends.mps)):
        monkeypatch.setattr(backend, "is_available", lambda kind=kind: kind in usable)
    monkeypatch.setattr(hardware, "has_kernels", lambda: True)
    if picked is None:
        with pytest.raises(ValueError, match="fix: device=auto"):
            hardware.pick_device(wanted)
    else:
        assert hardware.pick_device(wanted) == torch.device(picked)


def test_a_gpu_without_kernels_is_skipped_and_refused_if_requested(monkeypatch, capsys):
    def no_kernel(*_, **__):
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(hardware, "has_kernels", cache(hardware.has_kernels.__wrapped__))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch, "zeros", no_kernel)
    for _ in range(2):
        assert hardware.pick_device("auto") == torch.device("cpu")
    assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(ValueError, match="device=cuda"):
        hardware.pick_device("cuda")


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA A100 80GB PCIe", 1.94e12),  # not the bandwidth of other A100
        ("NVIDIA H200 NVL", 4.8e12),
        ("NVIDIA H800 PCIe", 2e12),
        ("NVIDIA L4", 0.3e12),  # not that of an L40S
        ("NVIDIA GeForce RTX 4090", 1.01e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks_come_from_the_data_sheet_of_the_gpu(monkeypatch, name, bandwidth):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert hardware.peak_bandwidth(torch.device("cuda")) == bandwidth


@pytest.mark.parametrize(("kind", "precision"), [("cpu", "highest"), ("cuda", "high")])
def test_only_training_on_a_gpu_uses_tf32(kind, precision):
    try:
        hardware.prepare_for_training(torch.device(kind))
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


def test_training_configures_the_selected_device(command, monkeypatch):
    prepared = []
    monkeypatch.setattr(hardware, "prepare_for_training", prepared.append)
    words = (*TINY, "data=recall", "data.pairs=[2]", "context=16", "batch_tokens=64", "steps=1")
    command("train.py", *words).succeeded()
    assert prepared == [torch.device("cpu")]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_memory_excludes_the_parent_process(monkeypatch):
    """On Linux, getrusage also counts the parent process."""
    parent = SimpleNamespace(ru_maxrss=2**40)
    monkeypatch.setattr(hardware.resource, "getrusage", lambda _: parent)
    assert 2**26 < hardware.peak_memory(torch.device("cpu")) < 2**40
