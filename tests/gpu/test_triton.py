"""Compile every preset for a GPU with Inductor and Triton: pytest -m triton. No GPU is needed.

Each test runs in a separate process, because torch and Triton cache the detected GPU.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.conftest import LONG, ROOT, VARIANTS, settings_of
from tests.gpu.lowering import GPUS, whole_pattern

has_triton = torch.version.cuda is not None and find_spec("triton") is not None
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not has_triton, reason="needs a CUDA build of torch, with Triton"),
]
MAX_STACK = 1024  # bytes per thread, for spilled registers
CASES = [
    *VARIANTS,
    "gqa document_mask=true",
    "gqa activation_checkpointing=true",
    "gqa model.softcap=15.0 z_loss=1e-4",
    "softcap precision=fp16",
    "sliding_window precision=fp32",
]


def run(module: str, *arguments: str) -> dict:
    """Run a test module as a command; return the JSON that it prints."""
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=LONG
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


# Cases for GPUs with less memory or without bf16: heads of 64, 128 and 192 (mla).
OTHER_GPUS = [
    ("sm_75", "gqa precision=fp16"),
    ("sm_75", "sink precision=fp16"),
    ("sm_80", "gqa document_mask=true"),
    ("sm_80", "sink"),
    ("sm_86", "gqa document_mask=true"),
    ("sm_86", "gqa document_mask=true model.heads=6"),
    ("sm_89", "mla document_mask=true attention.head_dim=128"),
    ("sm_89", "fox document_mask=true model.heads=6"),
    ("sm_89", "gqa document_mask=true precision=fp32"),
    ("sm_89", "gqa document_mask=true precision=fp32 model.heads=6"),
    ("sm_90", "fox document_mask=true model.heads=6"),
    ("sm_90", "fox document_mask=true precision=fp32 model.heads=6"),
    ("sm_100", "gqa document_mask=true"),
    ("sm_100", "sink"),
    ("sm_120", "sink"),
    ("sm_120", "kda document_mask=true"),
]


def lower(step: str, case: str, gpu: str = "sm_90") -> dict:
    """Lower a step with every kind of layer, and check that each kernel fits on the GPU."""
    preset, *more = case.split()
    depth = whole_pattern(settings_of(f"attention={preset}"))
    sizes = ("model=124m", f"model.depth={depth}", "context=1024")
    # Options come first: Python 3.11's argparse accepts no list of arguments after an option.
    options = ("--gpu", gpu)
    report = run("tests.gpu.lowering", *options, step, f"attention={preset}", *sizes, *more)
    assert report["kernels"] > 0
    assert report["shared_memory"] <= GPUS[gpu].shared_memory, report["shared_memory_of"]
    assert report["atomic_flex_attention"] == 0
    assert report["trigonometric"] == 0  # rotary tables are read from memory
    assert report["stack"] <= MAX_STACK, report["stack_of"]
    return report


@pytest.mark.parametrize("case", CASES)
def test_training_and_evaluation_lower_to_three_graphs_whose_kernels_fit(case):
    report = lower("training", case)
    assert report["graphs"] == 3  # forward, backward, and a forward without gradients
    # Plain causal attention is one kernel in each of the two layers of each graph.
    if case in ("gqa", "mha", "mqa"):
        assert report["flash_attention"] == 6


@pytest.mark.parametrize(("gpu", "case"), OTHER_GPUS)
def test_training_kernels_fit_on_other_gpus(gpu, case):
    assert lower("training", case, gpu)["graphs"] == 3


@pytest.mark.parametrize("preset", VARIANTS)
def test_a_decode_step_lowers_to_one_cuda_graph_whose_kernels_fit(preset):
    report = lower("decoding", preset)
    assert report["graphs"] == 1
    assert report["reasons_against_capture"] == []
