"""What Inductor and Triton make of every preset for a GPU: pytest -m triton. No GPU is needed.

Each test is a process of its own, because torch and Triton remember what GPU they have found.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.conftest import LONG, ROOT, VARIANTS, settings_of
from tests.gpu.interpreted import CASES
from tests.gpu.lowering import GPUS, whole_pattern

has_triton = torch.version.cuda is not None and find_spec("triton") is not None
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not has_triton, reason="needs a CUDA build of torch, with Triton"),
]
REPORTS = ROOT / ".cache" / "triton.jsonl"  # for tests/gpu/gpu_table.py
# Launches are counted for one GPU: they hardly depend on it.
PARTS = {"sm_80": ["--build"], "sm_90": ["--build", "--per-layer"], "sm_120": ["--build"]}
MAX_STACK = 1024  # bytes of a thread, where registers do not suffice
SIZES = ("model=124m", "micro_batch=8")


def run(module: str, *arguments: str) -> list[dict]:
    """The lines of JSON that a module of the tests prints."""
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    if module == "tests.gpu.interpreted":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONG
    )
    if result.returncode != 0:
        pytest.fail(result.stderr[-2000:])
    REPORTS.parent.mkdir(exist_ok=True)
    with REPORTS.open("a") as file:
        file.write(result.stdout)
    return [json.loads(line) for line in result.stdout.splitlines()]


def lower(step: str, gpu: str, preset: str, *more: str) -> dict:
    """Lower a step of a preset with all kinds of its layers, and build its kernels."""
    depth = whole_pattern(settings_of(f"attention={preset}"))
    overrides = (f"attention={preset}", f"model.depth={depth}", "context=1024")
    (report,) = run(
        "tests.gpu.lowering", *overrides, *SIZES, *more, f"--gpu={gpu}", f"--step={step}", "--json"
    )
    return report


def assert_kernels_fit(report: dict) -> None:
    """Every kernel was built, within shared memory, and without large spills."""
    assert report["kernels"] > 0
    limit = GPUS[report["gpu"]].shared_memory
    assert report["shared_memory"] <= limit, report["shared_memory_of"]
    assert report["stack"] <= MAX_STACK, report["stack_of"]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("preset", VARIANTS)
def test_a_training_step_is_two_graphs_whose_kernels_fit(gpu, preset):
    report = lower("training", gpu, preset, *PARTS[gpu])
    assert report["graphs"] == 2  # forward and backward
    assert_kernels_fit(report)


@pytest.mark.parametrize(
    "overrides",
    [
        "gqa document_mask=true",
        "gqa activation_checkpointing=true",
        "gqa model.softcap=15.0 z_loss=1e-4",
        "softcap precision=fp16",
        "sliding_window precision=fp32",
        "sink document_mask=true attention.window=128",
    ],
)
def test_options_of_training_lower_too(overrides):
    preset, *more = overrides.split()
    report = lower("training", "sm_90", preset, *more, "--build")
    assert report["graphs"] == 2
    assert_kernels_fit(report)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("preset", VARIANTS)
def test_a_decode_step_is_one_cuda_graph_whose_kernels_fit(gpu, preset):
    report = lower("decoding", gpu, preset, *PARTS[gpu])
    assert report["graphs"] == 1
    assert report["reasons_against_capture"] == []
    assert_kernels_fit(report)


def test_drawing_a_token_adds_few_launches_to_the_graph():
    plain = lower("decoding", "sm_90", "gqa")
    drawing = lower("decoding", "sm_90", "gqa", "--draw")
    assert drawing["graphs"] == 1
    assert drawing["reasons_against_capture"] == []
    added = sum(drawing["launches"].values()) - sum(plain["launches"].values())
    assert added <= 5


@pytest.mark.parametrize("preset", ["gqa", "mha", "mqa"])
def test_plain_causal_attention_is_flash_attention(preset):
    launches = lower("training", "sm_90", preset)["launches"]
    assert launches["scaled_dot_product_flash_attention"] == 2  # layers
    assert launches["scaled_dot_product_flash_attention_backward"] == 2
    assert "bmm" not in launches


@pytest.mark.parametrize("step, most", [("training", 50), ("decoding", 15)])
def test_a_layer_launches_few_kernels(step, most):
    launches = lower(step, "sm_90", "gqa", "--per-layer")["each_layer"]
    assert sum(launches.values()) <= most, launches


@pytest.mark.parametrize("context", [64, 100, 257])
@pytest.mark.parametrize("case", CASES)
def test_interpreted_attention_equals_its_definition(case, context):
    (report,) = run("tests.gpu.interpreted", "attention", f"--case={case}", f"--context={context}")
    errors = report["errors"]
    assert max(errors.values()) < 1e-5, errors  # of fp32


@pytest.mark.parametrize("preset", VARIANTS)
def test_an_interpreted_training_step_equals_the_uncompiled_one(preset):
    (report,) = run("tests.gpu.interpreted", "training", f"attention={preset}")
    errors = report["errors"]
    assert max(errors.values()) < 1e-4, errors  # of fp32
