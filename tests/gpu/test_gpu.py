"""Acceptance tests for a GPU: pytest -m gpu.

They take an estimated fifteen minutes on one H200 with ten processes (-n 10 --maxprocesses 10),
mostly for compilation. ATTEND_TEST_GPU=cpu runs the tests on a CPU, with short contexts and a
torch.compile backend that generates no code.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from inference import quantize
from inference.engine import Engine
from run import hardware
from run.instantiate import instantiate
from tests import conftest
from tests.conftest import EXTRAS, TINY, VARIANTS, tree_of
from tests.inference.recorded_graph import recorded_graphs
from train import take_step
from training.loss import LanguageModelLoss
from training.parallel import configure_compiler

CPU = torch.device("cpu")
DEVICE = torch.device(os.environ.get("ATTEND_TEST_GPU", "cuda"))
IS_GPU = DEVICE.type == "cuda"
CONTEXTS = (64, 257, 1024) if IS_GPU else (64, 130)  # 130 needs two blocks of 128
BACKEND = "inductor" if IS_GPU else "aot_eager"
BOS = 0
# Reordered fp32 products differ by about 1e-6, and TF32 products by 1e-3.
FP32_BOUND = 1e-4
MIN_NORM = 1e-3  # fp32 is too coarse for a gradient that is nearly zero
BF16_SLACK = 0.02  # in case eager bf16 happens to be nearly exact

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_GPU and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """Use full fp32 products, as on a CPU, and a fixed workspace for cuBLAS."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()
    if not IS_GPU:
        conftest.compile_without_inductor(monkeypatch)
    yield
    torch.set_float32_matmul_precision(before)


def drawn_model(variant: str, context: int = 64) -> torch.nn.Module:
    name, *overrides = variant.split()
    return conftest.redraw(instantiate(tree_of(name, f"context={context}", *overrides))).eval()


def gradients(
    variant: str,
    context: int,
    bos: int | None,
    *,
    device: torch.device = CPU,
    weights: torch.dtype = torch.float32,
    precision: torch.dtype = torch.float32,
    is_compiled: bool = False,
) -> dict[str, torch.Tensor]:
    """The gradients of the loss for two random texts, returned in float64 on the CPU."""
    model = drawn_model(variant, context).to(device, weights)
    tokens = torch.randint(128, (2, context + 1), generator=torch.Generator().manual_seed(1))
    tokens[:, context // 3] = BOS
    tokens = tokens.to(device)
    module = LanguageModelLoss(model, z_loss=1e-4, bos=bos)
    if is_compiled:
        configure_compiler()
        module.compile(dynamic=False, fullgraph=True, backend=BACKEND)
    with hardware.autocast(device, precision):
        objective, _ = module(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    (objective / tokens.numel()).backward()
    return {name: p.grad.double().cpu() for name, p in model.named_parameters()}


def differences(found: dict, expected: dict, min_norm: float = 0.0) -> dict[str, float]:
    """The norm of each gradient's difference, relative to the gradient's norm; NaN for NaN.

    Smaller norms count as `min_norm`.
    """
    assert found.keys() == expected.keys()
    relative = {}
    for name, g in expected.items():
        relative[name] = ((found[name] - g).norm() / g.norm().clamp(min=min_norm)).item()
    return relative


def assert_within(differences: dict[str, float], bounds: dict[str, float]) -> None:
    outside = {}
    for name, difference in differences.items():
        if not difference < bounds[name]:
            outside[name] = (difference, bounds[name])
    assert not outside


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("variant", [*VARIANTS, *EXTRAS])
def test_gradients_of_the_compiled_loss_are_as_accurate_as_on_the_cpu(variant, context, bos):
    exact = gradients(variant, context, bos, weights=torch.float64)
    on_cpu = gradients(variant, context, bos)
    found = gradients(variant, context, bos, device=DEVICE, is_compiled=True)
    # Some gradients are ill-conditioned: in fp32, they are inaccurate on any device.
    bounds = {}
    for name, difference in differences(on_cpu, exact, MIN_NORM).items():
        bounds[name] = max(4 * difference, FP32_BOUND)
    assert_within(differences(found, exact, MIN_NORM), bounds)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_bf16_gradients_are_as_accurate_as_eager_gradients(variant):
    case = (variant, CONTEXTS[1], BOS)
    expected = gradients(*case)
    eager = gradients(*case, device=DEVICE, precision=torch.bfloat16)
    compiled = gradients(*case, device=DEVICE, precision=torch.bfloat16, is_compiled=True)
    # Bounded by twice the eager error, and below 1, the relative difference of a zero gradient.
    bounds = {}
    for name, difference in differences(eager, expected).items():
        bounds[name] = min(2 * difference + BF16_SLACK, 0.99)
    assert_within(differences(compiled, expected), bounds)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_greedy_tokens_match_the_cpu(variant, is_compiled):
    """Decodes three texts in two rows, so one row is reused without recompilation."""
    model = drawn_model(variant)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    expected = conftest.continued(model, prompts, 20)
    found = conftest.continued(model.to(DEVICE), prompts, 20, rows=2, compiled=is_compiled)
    assert found == expected


@pytest.mark.parametrize("variant", VARIANTS)
def test_captured_steps_generate_the_same_tokens_as_eager_steps(variant, capsys):
    """Decodes three texts in two rows beyond the context, as in generate.py, without a note."""
    model = drawn_model(variant).to(DEVICE)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    expected = conftest.continued(model, prompts, 80, rows=2)
    with nullcontext() if IS_GPU else recorded_graphs():
        found = conftest.continued(model, prompts, 80, rows=2, captured=True)
    assert found == expected
    assert capsys.readouterr().err == ""


@torch.inference_mode()
def decoded_logits(
    model: torch.nn.Module, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype
) -> torch.Tensor:
    """Decode tokens one by one; return the logits (T, B, V) in float64 on the CPU.

    The weights are int8 if the cache is int8.
    """
    model = deepcopy(model).to(device, dtype)
    quantize.optimize_for_decoding(model, int8=cache_dtype == torch.int8)
    tokens = torch.randint(128, (2, 24), generator=torch.Generator().manual_seed(1)).to(device)
    cache = model.new_cache(2, 64, cache_dtype, device)
    engine = Engine(model, conftest.greedy, cache)
    logits = []
    for position in range(tokens.shape[1]):
        engine.state.tokens.copy_(tokens[:, position : position + 1])
        logits.append(engine.decode_step())
    return torch.stack(logits).double().cpu()


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("variant", VARIANTS)
def test_low_precision_decoding_is_as_accurate_as_on_the_cpu(variant, cache_dtype):
    model = drawn_model(variant)
    exact = decoded_logits(model, CPU, torch.float32, torch.float32)
    on_cpu = decoded_logits(model, CPU, torch.bfloat16, cache_dtype)
    found = decoded_logits(model, DEVICE, torch.bfloat16, cache_dtype)
    assert (found - exact).norm() < 2 * (on_cpu - exact).norm()


def run_words(story: Path, *more: str) -> list[str]:
    """Overrides of a short run on the story; later ones replace earlier ones."""
    keys = [word.partition("=")[0] for word in more]
    words = [word for word in TINY if word.partition("=")[0] not in ("device", *keys)]
    text = ("data=text", f"data.path={story}", "data.vocab_size=400")
    return [*words, *text, f"device={DEVICE}", *more]


def losses_of(run: Path) -> list[float]:
    lines = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [line["train_loss"] for line in lines if "train_loss" in line]


RUNS = [(variant, "precision=bf16") for variant in VARIANTS]
RUNS += [("gqa", "precision=fp16"), ("gqa", "activation_checkpointing=true z_loss=1e-4")]


@pytest.mark.parametrize("variant, overrides", RUNS)
def test_a_run_learns_and_generates_text(command, story, variant, overrides):
    if not IS_GPU:
        overrides = overrides.replace("fp16", "bf16")
    more = (f"attention={variant}", "steps=50", f"compile={str(IS_GPU).lower()}")
    command("train.py", *run_words(story, *more, *overrides.split())).succeeded()
    losses = losses_of(next(Path("runs").iterdir()))
    assert losses[-1] < losses[0] / 2
    words = ("--device", str(DEVICE), "--max-new-tokens", "10")
    command("generate.py", "Ann had", *words).succeeded()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_steps_do_not_synchronize_with_the_device(run_of, optimizer):
    run = run_of(f"device={DEVICE}", f"optimizer={optimizer}", "micro_batch=4")
    take_step(run)
    set_sync_debug_mode = torch.cuda.set_sync_debug_mode if IS_GPU else str
    set_sync_debug_mode("error")
    try:
        for _ in range(3):
            take_step(run)
    finally:
        set_sync_debug_mode("default")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_resumes_bit_for_bit(run_of, monkeypatch, optimizer):
    words = (f"device={DEVICE}", f"optimizer={optimizer}", "micro_batch=4")
    with conftest.poisoned_memory():  # also makes torch deterministic
        whole = run_of(*words, folder="whole")
        for step in range(6):
            take_step(whole)
            if step == 2:
                whole.checkpointer.save(whole.progress)
        # Step 3 has the only checkpoint.
        again = run_of(*words, "resume=true", folder="whole")
        assert again.progress.step == 3
        for _ in range(3):
            take_step(again)
    torch.testing.assert_close(conftest.weights(again), conftest.weights(whole), rtol=0, atol=0)


@pytest.mark.skipif(IS_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sharded", ["false", "true"])
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ("optimizer=adamw precision=fp32", 2e-3),
        ("optimizer=muon precision=bf16 compile=true", 0.02),
        ("attention=sliding_window document_mask=true precision=bf16 compile=true", 0.02),
        ("activation_checkpointing=true precision=bf16", 0.02),
    ],
)
def test_training_on_two_gpus_matches_one(command, story, tmp_path, options, tolerance, sharded):
    words = run_words(story, "steps=10", "micro_batch=4", *options.split())
    alone = command("train.py", *words, "run_dir=alone")
    assert alone.code == 0, alone.err
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--standalone",
        conftest.ROOT / "train.py",
        *words,
        "run_dir=both",
        f"sharded={sharded}",
    ]
    subprocess.run(start, cwd=tmp_path, check=True, timeout=conftest.LONG)
    # Gradients are summed in a different order, and train.py uses TF32 products.
    expected = losses_of(tmp_path / "alone")
    assert losses_of(tmp_path / "both") == pytest.approx(expected, abs=tolerance)
