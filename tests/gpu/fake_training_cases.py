"""Training on a fake GPU: synchronizations, mixed devices, fp32 products, kernels and graphs.

All presets and options run in bf16, and some in fp16 and fp32; see tests/gpu/fake_cuda.py. The
number next to a function is the number of host synchronizations in this function.
"""

from collections.abc import Iterable

import pytest
import torch

from model.attention.kernels import flex, fused
from run import hardware
from tests import conftest
from tests.conftest import COVERED, VARIANTS
from tests.gpu.fake_checks import CUDA, FP32_FUNCTIONS, check, check_compiled_training, check_step
from tools.evaluate import Row, load_to_score, total_nats
from train import take_step
from training.optimizers import newton_schulz

# Presets with different implementations: plain attention, FlexAttention and a recurrence.
WAYS = ("gqa", "sink document_mask=true", "gdn")
# Options that change the computation on the device. Each preset is combined with one of them. A
# batch has one or two micro-batches.
OPTIONS = (
    "",
    "document_mask=true z_loss=1e-4 micro_batch=8",
    "optimizer=adamw clip=null micro_batch=8",
    "activation_checkpointing=true optimizer=adamw",
    "document_mask=true model.softcap=15.0 model.tied=true micro_batch=8",
    "activation_checkpointing=true ffn=geglu norm=layernorm micro_batch=8",
    "ffn=relu2 micro_batch=8",
)
EXTRAS = (
    *conftest.EXTRAS,
    "gqa attention.dropout=0.1",
    "sink attention.dropout=0.1",
    "mla attention.dropout=0.1",
)
EVALUATION_WAITS = {"evaluate": 1}
TOKEN_WAITS = {"Engine.generate": 1}  # the copy of a sampled token


def cases(variants: Iterable[str], precision: str = "bf16") -> list:
    """Pairs of precision and overrides, in which the presets cycle through the options."""
    parameters = []
    for number, variant in enumerate(variants):
        overrides = f"attention={variant} {OPTIONS[number % len(OPTIONS)]}".split()
        name = variant.partition("{")[0].replace(" ", "-")
        marks = [pytest.mark.long] if variant in COVERED else []
        parameters.append(pytest.param(precision, overrides, marks=marks, id=f"{name}-{precision}"))
    return parameters


STEPS = [*cases(VARIANTS), *cases(EXTRAS), *cases(WAYS, "fp16"), *cases(["gqa"], "fp32")]


@pytest.mark.parametrize("precision, overrides", STEPS)
def test_a_training_step_synchronizes_only_in_listed_functions(
    gpu, run_on_gpu, precision, overrides
):
    run = run_on_gpu(precision, *overrides)
    check_step(gpu, run)
    run.evaluator.evaluate(run.progress)
    check(gpu, EVALUATION_WAITS, run.trainer.precision)


@pytest.mark.parametrize("precision, overrides", cases(["gqa", "gdn"]))
def test_a_run_can_be_saved_sampled_and_resumed(gpu, run_on_gpu, precision, overrides):
    saved = run_on_gpu(precision, *overrides)
    take_step(saved)
    saved.checkpointer.save(saved.progress)

    gpu.reset()
    saved.evaluator.sample(saved.progress)
    num_tokens = saved.env.settings.context - 1
    waits = {name: num * num_tokens for name, num in TOKEN_WAITS.items()}
    check(gpu, waits, torch.float32)  # sampling computes in fp32

    resumed = run_on_gpu(precision, *overrides, "resume=true")
    assert resumed.progress.step == 1
    assert {p.device.type for p in resumed.trainer.model.parameters()} == {"cuda"}
    take_step(resumed)


def test_scoring_uses_fp32_weights_and_the_training_precision(gpu, run_on_gpu):
    saved = run_on_gpu("bf16", "attention=gdn")
    take_step(saved)
    saved.checkpointer.save(saved.progress)
    model, _, _, products = load_to_score(saved.env.run_dir, "cuda")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert products == saved.trainer.precision
    gpu.reset()
    total_nats(model, [Row([1, 2, 3, 4], first=1)], 1, precision=products)
    assert not gpu.fp32_products.keys() - FP32_FUNCTIONS


# Compilation. Graphs run without code generation, and the tests check how many there are.


@pytest.mark.parametrize("variant", ["gqa", "gdn"])
def test_training_and_evaluation_compile_to_one_graph_each(gpu, run_on_gpu, graphs, variant):
    run = run_on_gpu("bf16", *f"attention={variant}".split())
    check_compiled_training(run, graphs)
    run.evaluator.evaluate(run.progress)  # without gradients, which requires a separate graph
    take_step(run)
    assert len(graphs) == 2, "the graphs of a training step and an evaluation"


@pytest.mark.parametrize("variant", ["gqa", "retention"])
def test_compiled_layers_share_one_computation_of_cos_and_sin(gpu, run_on_gpu, graphs, variant):
    """Otherwise, the compiler would fuse cos and sin into each kernel that rotates queries or keys."""
    check_compiled_training(run_on_gpu("bf16", f"attention={variant}", "model.depth=2"), graphs)
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert targets.count("attend.cos_and_sin.default") == 1
    assert not {"cos", "sin"} & {*targets}


# GPUs that need different kernels.


@pytest.mark.parametrize(
    ("gpu", "precision", "is_grouped"),
    [(9, "auto", True), (9, "fp32", False), (7, "auto", False)],
    indirect=["gpu"],
)
def test_grouped_heads_are_expanded_without_flash_attention(
    gpu, run_on_gpu, monkeypatch, precision, is_grouped
):
    """The fallback kernel for grouped heads would materialize all scores."""
    attend = fused.F.scaled_dot_product_attention
    calls = []

    def record(q, k, v, **options):
        calls.append(options["enable_gqa"])
        assert options["enable_gqa"] == (q.shape[1] != k.shape[1])
        return attend(q, k, v, **options)

    monkeypatch.setattr(fused.F, "scaled_dot_product_attention", record)
    take_step(run_on_gpu(precision))
    assert set(calls) == {is_grouped}


@pytest.mark.parametrize(
    ("gpu", "width", "dropout", "is_supported"),
    [
        (9, 256, 0.1, True),
        (9, 264, 0.0, False),
        (8, 200, 0.0, False),
        (8, 256, 0.0, True),
        (8, 256, 0.1, False),
        (7, 64, 0.0, False),
    ],
    indirect=["gpu"],
)
def test_flash_attention_is_expected_only_where_torch_supports_it(
    gpu, width, dropout, is_supported
):
    """Otherwise, grouped heads would run in the kernel that materializes all scores."""
    q = torch.zeros(1, 1, 1, width, dtype=torch.float16, device="cuda")
    assert fused.can_flash_attention(q, None, dropout) is is_supported


@pytest.mark.parametrize(
    ("gpu", "dtype"), [(9, torch.bfloat16), (7, torch.float16)], indirect=["gpu"]
)
def test_training_and_its_optimizer_use_the_fastest_dtype_of_the_gpu(gpu, dtype):
    assert hardware.pick_precision("auto", CUDA) == dtype
    assert newton_schulz(torch.zeros(2, 16, 24, device="cuda")).dtype == dtype


@pytest.mark.parametrize(
    ("gpu", "variant", "count"),
    [
        (9, "sink", 1),
        (9, "sliding_window", 1),
        (9, "fox", 0),
        (9, "fox document_mask=true", 1),
        (9, "alibi document_mask=true", 1),
        (8, "fox document_mask=true model.heads=2 model.dim=240", 1),
        (8, "fox document_mask=true model.heads=2 model.dim=256", 0),  # gates add 8 columns
        (9, "sink model.heads=8", 0),  # Inductor refuses heads narrower than 16
        (7, "sink", 0),
    ],
    indirect=["gpu"],
)
def test_flex_attention_reads_positions_and_no_tensor_with_a_gradient(
    gpu, run_on_gpu, graphs, variant, count
):
    """A mask over all pairs of tokens would take memory quadratic in the context.

    The backward would accumulate a gradient of such a tensor with one atomic addition per score.
    """
    check_compiled_training(run_on_gpu("auto", *f"attention={variant}".split()), graphs)
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    calls = [node for node in nodes if "flex_attention" in str(node.target)]
    assert len(calls) == count
    num_rows = 4 if "document_mask" in variant else 1  # whose masks differ
    for call in calls:
        *_, of_scores, of_mask = call.args  # tensors read by score_mod and mask_mod
        for node in (*of_scores, *of_mask):
            assert not node.meta["example_value"].requires_grad, node
        for node in of_mask:
            assert node.meta["example_value"].ndim <= 2, node
        block_mask = call.args[4]
        num_blocks = block_mask[2]  # blocks of keys for each row, head and block of queries
        assert num_blocks.meta["example_value"].shape == (num_rows, 1, 1)


@pytest.mark.parametrize(
    ("gpu", "width", "dtype", "fits"),
    [
        (9, 192, torch.bfloat16, True),
        (9, 128, torch.float32, True),
        (9, 136, torch.float32, False),
        (8, 128, torch.bfloat16, True),
        (8, 192, torch.bfloat16, False),
        (8, 128, torch.float32, False),
        (7, 64, torch.float16, False),
    ],
    indirect=["gpu"],
)
def test_flex_attention_is_avoided_if_it_exceeds_shared_memory(gpu, width, dtype, fits):
    """At a head width of 192 in bf16, its backward takes 114,688 bytes (pytorch/pytorch#198224)."""
    assert flex.fits_gpu([width, width], dtype, CUDA) is fits
