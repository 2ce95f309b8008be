"""The selection of the device, and the precision of fp32 products."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from run import compilation, distributed, hardware, progress
from tests.conftest import ROOT, TINY


@pytest.mark.parametrize(
    ("wanted", "usable", "picked"),
    [
        ("auto", (), "cpu"),
        ("auto", ("mps",), "mps"),
        ("auto", ("cuda", "mps"), "cuda"),
        ("cpu", ("cuda", "mps"), "cpu"),
        ("cuda", ("mps",), None),
        ("mps", (), None),
    ],
)
def test_auto_selects_the_best_device_that_torch_can_use(monkeypatch, wanted, usable, picked):
    for kind, backend in (("cuda", torch.cuda), ("mps", torch.backends.mps)):
        monkeypatch.setattr(backend, "is_available", lambda kind=kind: kind in usable)
    if picked is None:
        with pytest.raises(ValueError, match="fix: run python -m"):
            hardware.pick_device(wanted)
    else:
        assert hardware.pick_device(wanted) == torch.device(picked)


# Results of torch.cuda.get_arch_list() in the wheels for CUDA 13 and CUDA 12.6.
CUDA_13 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
CUDA_12 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((6, 0), CUDA_13, False),  # P100
        ((7, 0), CUDA_13, False),  # V100
        ((7, 0), CUDA_12, True),
        ((7, 5), CUDA_13, True),  # T4
        ((8, 9), CUDA_13, True),  # L4 runs the code for sm_86
        ((8, 6), "sm_89", False),  # a lower minor capability
        ((10, 0), "sm_90", False),
        ((12, 1), CUDA_13, True),
        ((10, 0), "sm_80 compute_90", True),  # PTX, compiled by the driver
        ((8, 0), "sm_75 compute_90", False),
        ((9, 0), "sm_90a", True),
        ((10, 3), "sm_100a compute_90a", False),
        ((10, 3), "sm_100f", True),
        ((11, 0), "compute_100f", False),
    ],
)
def test_gpu_compatibility_follows_the_nvidia_documentation(capability, architectures, runs):
    assert hardware.has_kernels(capability, architectures.split()) is runs


@pytest.fixture
def v100(monkeypatch):
    """A GPU that torch detects but has no kernels for."""
    progress.warn_once.cache_clear()
    answers = {
        "is_available": True,
        "device_count": 1,
        "get_arch_list": CUDA_13.split(),
        "get_device_capability": (7, 0),
        "get_device_name": "Tesla V100-SXM2-16GB",
    }
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def test_a_gpu_without_kernels_is_skipped_with_a_warning_and_refused_if_requested(v100, capsys):
    for _ in range(2):
        assert hardware.pick_device("auto") == torch.device("cpu")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "warning: torch has no kernels for this GPU (Tesla V100-SXM2-16GB, sm_70"
    )
    assert "fix: install a torch build for an older CUDA, or use device=cpu" in line
    with pytest.raises(ValueError, match=r"no kernels .*sm_70"):
        hardware.pick_device("cuda")
    assert hardware.pick_device("cpu") == torch.device("cpu")


def test_each_rank_checks_all_gpus_of_its_machine(v100, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    capabilities = [(9, 0), (7, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert hardware.pick_device("auto") == torch.device("cuda")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert hardware.pick_device("auto") == torch.device("cpu")


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"2 processes.*1 GPU.*fix: torchrun --nproc_per_node=1"):
        distributed.init_distributed(torch.device("cuda"))


def test_ranks_on_mps_are_refused(monkeypatch):
    assert distributed.init_distributed(torch.device("mps")).world_size == 1
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"MPS.*fix: run train.py without torchrun"):
        distributed.init_distributed(torch.device("mps"))


def test_rocm_architectures_are_not_compared(v100, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx90a", "gfx942"])
    assert hardware.pick_device("auto") == torch.device("cuda")


def test_compilation_for_a_gpu_requires_a_c_compiler(monkeypatch):
    """Triton searches for $CC, gcc or clang (triton/runtime/build.py)."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr("shutil.which", lambda name: None if name == "absent" else name)
    monkeypatch.delenv("CC", raising=False)
    assert compilation.missing_for_compilation(torch.device("cuda")) is None
    monkeypatch.setenv("CC", "absent")
    assert compilation.missing_for_compilation(torch.device("cuda")) == "a C compiler"
    assert compilation.missing_for_compilation(torch.device("cpu")) is None
    with pytest.raises(ValueError, match="fix: set compile=false"):
        compilation.pick_compile(True, torch.device("mps"), is_long=True)


@pytest.mark.parametrize(("kind", "precision"), [("cpu", "highest"), ("cuda", "high")])
def test_only_training_on_a_gpu_uses_tf32(kind, precision):
    assert torch.get_float32_matmul_precision() == "highest"
    try:
        hardware.prepare_for_training(torch.device(kind))
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("kind", "dtype", "has_tf32", "described"),
    [
        ("cuda", torch.float32, True, "torch.float32 with products in TF32"),
        ("cuda", torch.float32, False, "torch.float32"),  # before Ampere
        ("cuda", torch.bfloat16, True, "torch.bfloat16"),
        ("cpu", torch.float32, True, "torch.float32"),
    ],
)
def test_fp32_on_a_gpu_is_described_as_tf32(monkeypatch, kind, dtype, has_tf32, described):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_tf32)
    assert hardware.describe_products(torch.device(kind), dtype) == described


def test_inductor_precision_hints_raise_no_error(monkeypatch):
    from torch._inductor import compile_fx

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    compile_fx._warn_tf32_disabled.__wrapped__()


def test_training_configures_the_selected_device(command, monkeypatch):
    prepared = []
    monkeypatch.setattr(hardware, "prepare_for_training", prepared.append)
    words = (*TINY, "data=recall", "data.pairs=[2]", "context=16", "batch_tokens=64", "steps=1")
    command("train.py", *words).succeeded()
    assert prepared == [torch.device("cpu")]


# /sys/kernel/mm/transparent_hugepage/enabled: the selected value is in brackets.
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ALLOCATE = """
import torch
from run import hardware

hardware.use_huge_pages()
weights = torch.ones(2**24)  # 64 MiB
with open("/proc/self/smaps_rollup") as summary:
    print([line.split()[1] for line in summary if line.startswith("AnonHugePages")][0])
"""


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text("utf-8"), reason="needs huge pages"
)
def test_large_tensors_are_in_huge_pages():
    command = [sys.executable, "-c", ALLOCATE]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert int(result.stdout) >= 60 * 1024  # kB


PRINT_PEAK = """
import torch
from run import hardware

print(hardware.peak_memory(torch.device("cpu")))
"""
START_FROM_A_LARGE_PROCESS = """
import subprocess
import sys

memory = b"x" * 2**31
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""


def test_peak_memory_excludes_the_parent_process():
    command = [sys.executable, "-c", START_FROM_A_LARGE_PROCESS, PRINT_PEAK]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert 2**26 < int(result.stdout) < 2**30  # importing torch takes some 300 MB
