"""What training and decoding on the fake GPU may do: synchronizations, fp32 products, and graphs."""

from collections import Counter
from functools import partial

import torch

from inference.quantize import optimize_for_decoding
from inference.sampling import sample
from model.build import build_model
from model.transformer import Transformer
from tests.conftest import tree_of
from tests.gpu.fake_cuda import FakeGPU
from train import report, take_step
from training import setup

CUDA = torch.device("cuda")
# Functions that always multiply in fp32: the triangular inverse, and the means of keys.
FP32_FUNCTIONS = {"block_product", "BlockAttention.choose_blocks", "sum_blocks"}
# Functions that multiply in fp32 in a run in fp16, which may overflow.
FP32_IN_FP16 = {"recurrence", "decayed_products"}
FP32_IN_FP16 |= {"UnitTriangularSolve.forward", "UnitTriangularSolve.backward"}

# GradScaler keeps its scale on the device; the host reads once per optimizer if a step is skipped.
FP16_STEP_WAITS = {"Trainer.step": 2}
# A metrics line reads the loss and the gradient norm, after a check for finite values.
METRICS_WAITS = {"Meter.check_finite": 1, "Meter.report": 2}
SAMPLER = partial(sample, temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.1)


def check(gpu: FakeGPU, waits: dict[str, int], dtype: torch.dtype) -> None:
    """Assert that no synchronizations except `waits` and no unexpected fp32 products occurred."""
    assert not gpu.waits - Counter(waits), "the host waits for the device"
    if dtype != torch.float32:
        expected = FP32_FUNCTIONS | (FP32_IN_FP16 if dtype == torch.float16 else set())
        unasked = gpu.fp32_products.keys() - expected
        assert not unasked, f"products are in fp32 instead of {dtype}"
    gpu.reset()


def check_step(gpu: FakeGPU, run: setup.Run) -> None:
    gpu.reset()
    take_step(run)
    waits = Counter()
    if run.trainer.precision == torch.float16:
        waits.update(FP16_STEP_WAITS)
    check(gpu, waits, run.trainer.precision)
    report(run)
    check(gpu, METRICS_WAITS, run.trainer.precision)


def decoding_model(variant: str, dtype: torch.dtype, *, int8: bool = False) -> Transformer:
    tree = tree_of(*variant.split())
    model = build_model(tree, CUDA, dtype=dtype, seed=None).requires_grad_(False).eval()
    optimize_for_decoding(model, int8)
    return model


def check_compiled_training(run: setup.Run, graphs: list) -> None:
    run.trainer.is_compiled = True
    take_step(run)  # two micro-batches
    assert len(graphs) == 1, "the graphs of a training step"
