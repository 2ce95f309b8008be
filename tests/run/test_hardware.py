"""Which device is picked, and what is said of a GPU that torch cannot use."""

import os
import warnings

import pytest
import torch

from run import hardware
from tests.conftest import SHORT, TINY

PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Feb 17 22:55:48 UTC 2024\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)\n"
GCC = "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
NODES = ("nvidia0", "nvidiactl")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes this machine one with an NVIDIA driver that torch sees no GPU of."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hardware.note_unused_gpu.cache_clear()

    def make(driver: str, cuda: str | None = "13.0", line: str = PROPRIETARY, nodes=NODES) -> None:
        (tmp_path / "version").write_text(line.format(driver) + GCC)
        (tmp_path / "dev").mkdir()
        for node in nodes:
            (tmp_path / "dev" / node).touch()
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path / "version")
        monkeypatch.setattr(hardware, "DEVICES", tmp_path / "dev")

    return make


@pytest.mark.parametrize("line", [PROPRIETARY, OPEN])
@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_driver_too_old_for_torch_is_refused(machine, wanted, line):
    machine("535.161.08", line=line)
    with pytest.raises(ValueError) as refused:
        hardware.pick_device(wanted)
    assert str(refused.value) == (
        "the NVIDIA driver is too old for torch (driver 535.161.08, CUDA 13.0 of torch "
        "2.13.0+cu130). fix: NVIDIA driver 580 or newer, a torch 2.13.0 build for CUDA 12.6, "
        "or device=cpu. More: python -m tools.doctor"
    )
    assert hardware.pick_device("cpu") == torch.device("cpu")


def test_a_driver_too_old_for_any_torch_needs_a_newer_one(machine):
    machine("470.82")
    with pytest.raises(ValueError, match="fix: NVIDIA driver 580 or newer, or device=cpu"):
        hardware.pick_device("auto")


def test_a_driver_that_is_new_enough_and_does_not_work_is_refused(machine):
    machine("580.65.06")
    with pytest.raises(ValueError, match=r"driver 580.65.06, .*fix: what nvidia-smi says"):
        hardware.pick_device("auto")


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_mean_the_cpu(machine, monkeypatch, capsys, visible):
    machine("535.161.08")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.pick_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert hardware.pick_device("auto") == torch.device("cpu")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("visible", ["0", "1,0", "GPU-8932f937", "MIG-4a1b"])
def test_chosen_gpus_are_still_missed(machine, monkeypatch, visible):
    machine("535.161.08")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match="too old"):
        hardware.pick_device("auto")


def test_a_container_without_a_gpu_means_the_cpu(machine):
    machine("535.161.08", nodes=())
    assert hardware.pick_device("auto") == torch.device("cpu")


def test_a_torch_without_cuda_is_noted_once(machine, capsys):
    machine("535.161.08", cuda=None)
    for _ in range(2):
        assert hardware.pick_device("auto") == torch.device("cpu")
    note = "note: an NVIDIA GPU is here, but this torch has no CUDA (driver 535.161.08, torch "
    assert capsys.readouterr().err == note + (
        "2.13.0+cu130). fix: a torch build for CUDA. More: python -m tools.doctor\n"
    )
    assert hardware.pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="no such device"):
        hardware.pick_device("cuda")


def test_words_of_torch_itself_do_not_come_before_the_line(machine, monkeypatch):
    machine("535.161.08")

    def asked() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver is too old", stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    with pytest.raises(ValueError, match="too old for torch"):
        hardware.pick_device("auto")


def test_commands_end_in_one_line(machine, command, trained):
    machine("535.161.08")
    story = ("data=text", "data.path=story.txt", "data.vocab_size=400")
    words = [word for word in (*TINY, *SHORT, *story) if word != "device=cpu"]
    calls = {
        "train.py": words,
        "generate.py": ["Ann", "--run", str(trained)],
        "tools/evaluate.py": ["--run", str(trained), "--text", "story.txt"],
        "tools/bench.py": ["train", *words],
        "tools/compare/__main__.py": [*words, "seed=0,1"],
    }
    before = sorted(os.listdir("runs"))
    for file, arguments in calls.items():
        result = command(file, *arguments)
        (line,) = result.err.splitlines()
        assert (result.code, result.out) == (2, ""), file
        assert line.startswith("error: the NVIDIA driver is too old") and "device=cpu" in line
    assert sorted(os.listdir("runs")) == before


@pytest.mark.parametrize(("kind", "precision"), [("cpu", "highest"), ("cuda", "high")])
def test_only_training_on_a_gpu_multiplies_fp32_in_tf32(kind, precision):
    assert torch.get_float32_matmul_precision() == "highest"
    try:
        hardware.prepare_for_training(torch.device(kind))
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


def test_hints_of_inductor_about_precision_are_no_error(monkeypatch):
    from torch._inductor import compile_fx

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    compile_fx._warn_tf32_disabled.__wrapped__()


def test_training_prepares_the_device_that_it_has_picked(command, monkeypatch):
    prepared = []
    monkeypatch.setattr(hardware, "prepare_for_training", prepared.append)
    words = (*TINY, "data=recall", "data.pairs=[2]", "context=16", "batch_tokens=64", "steps=1")
    assert command("train.py", *words).code == 0
    assert prepared == [torch.device("cpu")]
