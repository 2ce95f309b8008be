"""Acceptance of a GPU: pytest -m gpu. A table of presets and checks ends it.

An estimated ten minutes on one H100 with eight processes (-n 8), most of them compilation. None of
it has run on a GPU yet. With ATTEND_TEST_GPU=cpu the tests themselves are tried on a CPU, with short
contexts and a backend of torch.compile that generates no code.
"""

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from inference import quantize
from inference.engine import compile_decode_step, decode_step
from run import hardware
from run.instantiate import instantiate
from tests.conftest import EXTRAS, LONG, ROOT, TINY, VARIANTS, continued, redraw, tree_of, weights
from training.loss import LanguageModelLoss

DEVICE = torch.device(os.environ.get("ATTEND_TEST_GPU", "cuda"))
IS_GPU = DEVICE.type == "cuda"
CONTEXTS = (64, 257, 1024) if IS_GPU else (64, 130)  # the second needs two blocks of 128
BACKEND = "inductor" if IS_GPU else "aot_eager"
COMPILE = "compile=true" if IS_GPU else "compile=false"
HALF = "precision=fp16" if IS_GPU else "precision=bf16"
BOS = 0
# fp32 products of another order differ by some 1e-6, those in TF32 by 1e-3.
FP32_BOUND = 1e-4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_GPU and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """Products in fp32 as a CPU has them, and kernels that add in one order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def report(record_property):
    """Notes a cell of the table that ends the run: preset, check and, if any, a difference."""

    def note(preset: str, check: str, difference: float | None = None) -> None:
        record_property("gpu", (preset, check, difference))

    return note


def drawn_model(variant: str, context: int = 64) -> torch.nn.Module:
    name, *overrides = variant.split()
    return redraw(instantiate(tree_of(name, f"context={context}", *overrides))).eval()


def new_step():
    """A compiled decode step; it belongs to one cache."""
    if IS_GPU:
        return compile_decode_step(DEVICE)
    return torch.compile(decode_step, backend=BACKEND, dynamic=False)


def gradients(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    device: torch.device,
    precision: torch.dtype,
    *,
    bos: int | None,
    is_compiled: bool,
) -> dict[str, torch.Tensor]:
    """The gradients of the loss of tokens (B, T + 1), in float64 on the CPU."""
    module = LanguageModelLoss(deepcopy(model).to(device), z_loss=1e-4, bos=bos)
    if is_compiled:
        module.compile(dynamic=False, fullgraph=True, backend=BACKEND)
    tokens = tokens.to(device)
    with hardware.autocast(device, precision):
        loss, _ = module(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    (loss / tokens.numel()).backward()
    return {name: p.grad.double().cpu() for name, p in module.model.named_parameters()}


def largest_difference(found: dict, expected: dict) -> float:
    """Of all parameters, the largest norm of a difference relative to that of the gradient."""
    assert found.keys() == expected.keys()
    differences = [(found[name] - g).norm() / g.norm() for name, g in expected.items()]
    return torch.stack(differences).max().item()  # NaN if one is


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("variant", [*VARIANTS, *EXTRAS])
def test_gradients_of_the_compiled_loss_are_those_of_the_cpu(
    variant, context, has_documents, report
):
    model = drawn_model(variant, context)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(128, (2, context + 1), generator=generator)
    bos = None
    if has_documents:
        bos = BOS
        tokens[:, context // 3] = bos
    cpu = torch.device("cpu")
    expected = gradients(model, tokens, cpu, torch.float32, bos=bos, is_compiled=False)
    found = gradients(model, tokens, DEVICE, torch.float32, bos=bos, is_compiled=True)
    difference = largest_difference(found, expected)
    report(variant, "fp32 gradients", difference)
    assert difference < FP32_BOUND


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_gradients_in_bf16_are_as_close_to_fp32_as_eager_ones(variant, report):
    context = CONTEXTS[1]
    model = drawn_model(variant, context)
    tokens = torch.randint(128, (2, context + 1), generator=torch.Generator().manual_seed(1))
    differences = []
    cpu = torch.device("cpu")
    expected = gradients(model, tokens, cpu, torch.float32, bos=BOS, is_compiled=False)
    for is_compiled in (False, True):
        found = gradients(model, tokens, DEVICE, torch.bfloat16, bos=BOS, is_compiled=is_compiled)
        differences.append(largest_difference(found, expected))
    eager, compiled = differences
    report(variant, "bf16 gradients", compiled)
    assert compiled < 2 * eager


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("compiled", [False, True])
def test_greedy_tokens_are_those_of_the_cpu(variant, compiled, report):
    """Three texts in two rows: a row is filled again while the step stays compiled."""
    model = drawn_model(variant)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    report(variant, "greedy, compiled" if compiled else "greedy")
    expected = continued(model, prompts, 20)
    model = model.to(DEVICE)
    for guesses in (0, 3):
        step = new_step() if compiled else decode_step
        found = continued(model, prompts, 20, rows=2, step=step, num_draft_tokens=guesses)
        assert found == expected


@torch.inference_mode()
def decoded_logits(model, device, dtype, cache_dtype, step, is_int8) -> torch.Tensor:
    """Logits (B, T, V) of the same tokens, read one by one with a cache, in float64 on the CPU."""
    model = deepcopy(model).to(device, dtype)
    quantize.optimize_for_decoding(model, is_int8)
    tokens = torch.randint(128, (2, 24), generator=torch.Generator().manual_seed(1)).to(device)
    cache = model.new_cache(2, 64, cache_dtype, device)
    logits = [model(tokens[:, :8], cache)]
    for position in range(8, 24):
        logits.append(step(model, tokens[:, position : position + 1], cache, None).clone())
    return torch.cat(logits, dim=1).double().cpu()


@pytest.mark.parametrize(
    "check, dtype, cache_dtype, is_int8",
    [
        ("bf16", torch.bfloat16, torch.bfloat16, False),
        ("int8 cache", torch.float32, torch.int8, False),
        ("int8 weights", torch.bfloat16, torch.bfloat16, True),
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_low_precision_decodes_as_well_as_on_the_cpu(
    variant, check, dtype, cache_dtype, is_int8, report
):
    model = drawn_model(variant)
    options = (dtype, cache_dtype)
    cpu = torch.device("cpu")
    exact = decoded_logits(model, cpu, torch.float32, torch.float32, decode_step, False)
    on_cpu = decoded_logits(model, cpu, *options, decode_step, is_int8)
    step = new_step() if check == "bf16" else decode_step
    found = decoded_logits(model, DEVICE, *options, step, is_int8)
    expected = float((on_cpu - exact).norm() / exact.norm())
    difference = float((found - exact).norm() / exact.norm())
    report(variant, check, difference)
    assert difference < 2 * expected + FP32_BOUND


@pytest.mark.parametrize(
    "variant, overrides",
    [
        *((variant, f"precision=bf16 {COMPILE}") for variant in VARIANTS),
        ("gqa", f"{HALF} compile=false"),
        ("delta", f"{HALF} compile=false"),
        ("gqa", f"activation_checkpointing=true z_loss=1e-4 {COMPILE}"),
    ],
)
def test_a_run_learns_and_generates(command, story, variant, overrides, report):
    report(variant, "learns")
    words = [word for word in TINY if not word.startswith(("device", "compile", "precision"))]
    text = ("data=text", f"data.path={story}", "data.vocab_size=400", f"device={DEVICE}")
    run = (f"attention={variant}", "steps=50", *overrides.split())
    result = command("train.py", *words, *text, *run)
    assert result.code == 0, result.err
    lines = metrics_of(next(Path("runs").iterdir()))
    assert lines[49]["train_loss"] < lines[0]["train_loss"] / 2
    words = ("--device", str(DEVICE), "--max-new-tokens", "10")
    assert command("generate.py", "Ann had", *words).code == 0


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_no_step_waits_for_the_device(trainer_of, optimizer, report):
    report(optimizer, "no wait")
    trainer = trainer_of(f"device={DEVICE}", f"optimizer={optimizer}", "micro_batch=4")
    trainer.train_step()
    waits = torch.cuda.set_sync_debug_mode if IS_GPU else str
    waits("error")
    try:
        for _ in range(3):
            trainer.train_step()
    finally:
        waits("default")


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_a_resumed_run_goes_on_to_the_bit(trainer_of, optimizer, report):
    report(optimizer, "resume")
    words = (f"device={DEVICE}", f"optimizer={optimizer}", "micro_batch=4")
    torch.use_deterministic_algorithms(True)
    try:
        whole = trainer_of(*words, run="whole")
        whole.restore_or_start(None)
        for step in range(6):
            whole.train_step()
            if step == 2:
                whole.save()
        # The checkpoint of step 3 is the only one.
        again = trainer_of(*words, "resume=true", run="whole")
        again.restore_or_start(None)
        assert again.step == 3
        for _ in range(3):
            again.train_step()
    finally:
        torch.use_deterministic_algorithms(False)
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())


@pytest.mark.skipif(IS_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sharded", ["false", "true"])
def test_two_gpus_learn_what_one_does(command, story, tmp_path, sharded, report):
    report("two GPUs", f"sharded={sharded}")
    words = [word for word in TINY if not word.startswith(("device", "precision"))]
    words += ["data=text", f"data.path={story}", "data.vocab_size=400", f"device={DEVICE}"]
    words += ["steps=10", "optimizer=adamw", "precision=fp32", "micro_batch=4"]
    alone = command("train.py", *words, "run_dir=alone")
    assert alone.code == 0, alone.err
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    start += [str(ROOT / "train.py"), *words, "run_dir=both", f"sharded={sharded}"]
    both = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, timeout=LONG)
    assert both.returncode == 0, both.stderr
    losses = []
    for run in ("alone", "both"):
        lines = metrics_of(tmp_path / run)
        losses.append([line["train_loss"] for line in lines if "train_loss" in line])
    # Sums of gradients in another order, of products that train.py computes in TF32.
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)


def test_a_run_ends_when_its_minutes_do(command, story, report):
    report("gqa", "max_minutes")
    minutes = 0.5
    words = [word for word in TINY if not word.startswith(("device", "max_minutes", "log_every"))]
    text = ("data=text", f"data.path={story}", "data.vocab_size=400", f"device={DEVICE}")
    run = (f"max_minutes={minutes}", "max_epochs=null", "log_every=50")
    result = command("train.py", *words, *text, *run)
    assert result.code == 0, result.err
    seconds = metrics_of(next(Path("runs").iterdir()))[-1]["seconds"]
    assert 0.5 * 60 * minutes < seconds < 1.05 * 60 * minutes
