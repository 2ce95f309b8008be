"""Training and generation on a fake GPU: synchronizations, mixed devices and fp32 products.

All presets and options run in bf16, and some in fp16 and fp32; see tests/gpu/fake_cuda.py. The
number next to a function below is the number of host synchronizations in this function.
"""

import inspect
import textwrap
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from time import monotonic
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from data.corpus import Corpus
from data.loader import Loader
from inference.batch import Sequence
from inference.engine import Engine
from inference.quantize import optimize_for_decoding
from inference.sampling import sample
from model.attention.kernels import flex, fused
from model.build import build_model
from model.context import ForwardContext
from model.transformer import Transformer
from run import checkpoint, hardware
from run.distributed import DistEnv
from run.signals import Signals
from tests import conftest
from tests.conftest import TINY, VARIANTS, every_kind, settings_of, shortest, shrink, tree_of
from tests.gpu.fake_cuda import FakeGPU, fake_cuda
from tools.evaluate import Row, load_to_score, total_nats
from train import report, take_step
from training import setup
from training.clock import Clock
from training.environment import Environment
from training.optimizers import newton_schulz
from training.trainer import Trainer

CUDA = torch.device("cuda")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

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

# Functions that always multiply in fp32, because their states accumulate over all tokens.
FP32_FUNCTIONS = {"recurrence", "decayed_products", "block_product"}
FP32_FUNCTIONS |= {"UnitTriangularSolve.forward", "UnitTriangularSolve.backward"}
FP32_FUNCTIONS |= {"BlockAttention.choose_blocks", "sum_blocks"}  # means of keys

# GradScaler keeps its scale on the device; the host reads once per optimizer if a step is skipped.
FP16_STEP_WAITS = {"Trainer.step": 2}
# A metrics line reads the loss and the gradient norm, after a check for finite values.
METRICS_WAITS = {"Meter.check_finite": 1, "Meter.report": 2}
EVALUATION_WAITS = {"evaluate": 1}
TOKEN_WAITS = {"Engine.generate": 1}  # the copy of a sampled token
# Prompts of different lengths for a batch of two rows.
PROMPTS = ([0, 0, 0, 0, 0], [4, 5, 0, 0], [6, 7])
SAMPLER = partial(sample, temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.1)
# Decoding modes: the model's dtype, whether weights are int8, the cache's dtype, and the expected
# synchronizations for two tokens after each prompt.
DECODING = {
    "cached": ("bf16", False, torch.bfloat16, {"Engine.generate": 4}),
    "int8": ("bf16", True, torch.int8, {"Engine.generate": 4}),
    "fp16": ("fp16", False, torch.float16, {"Engine.generate": 4}),
    "uncached": ("fp32", False, None, {"Engine.generate": 6}),
}


def cases(variants: Iterable[str], precision: str = "bf16") -> list:
    """Pairs of precision and overrides, in which the presets cycle through the options."""
    parameters = []
    for number, variant in enumerate(variants):
        overrides = f"attention={variant} {OPTIONS[number % len(OPTIONS)]}".split()
        name = variant.partition("{")[0].replace(" ", "-")
        parameters.append(pytest.param(precision, overrides, id=f"{name}-{precision}"))
    return parameters


@pytest.fixture
def gpu(request):
    """An H100, or a GPU whose major compute capability is given as a parameter."""
    with fake_cuda(getattr(request, "param", 9)) as gpu:
        yield gpu


@pytest.fixture
def run_of(gpu, tokenizer, tmp_path):
    """A function that builds runs on the GPU, all in the same run folder."""

    def build(precision: str, *overrides: str) -> setup.Run:
        sizes = (
            "context=8",
            "batch_tokens=64",
            "micro_batch=4",
            "eval_tokens=65",
            "steps=6",
            "model.depth=1",
        )
        settings = settings_of(*TINY, *sizes, *overrides, "device=cuda", f"precision={precision}")
        model = shrink(settings.model) | {"vocab_size": tokenizer.vocab_size}
        settings.model = shortest(every_kind(model))
        text = [np.zeros(4096, np.uint16)]
        corpus = Corpus(text, text[0], tokenizer, "0" * 64)
        loader = Loader(text, context=8, batch_size=8, seed=0)
        ranks = DistEnv(0, 1, CUDA)
        clock = Clock(monotonic())
        env = Environment(settings, corpus, loader, tmp_path, ranks, Signals(), clock)
        is_resumed = "resume=true" in overrides
        start = setup.Start(checkpoint.newest_checkpoint(tmp_path) if is_resumed else None)
        return setup.build_run(env, start)

    return build


def check(gpu: FakeGPU, waits: dict[str, int], dtype: torch.dtype) -> None:
    """Assert that no synchronizations except `waits` and no unexpected fp32 products occurred."""
    assert not gpu.waits - Counter(waits), "the host waits for the device"
    if dtype != torch.float32:
        unasked = gpu.fp32_products.keys() - FP32_FUNCTIONS
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


WAITING = {
    "item": lambda x, host: x[0, 0].item(),
    "bool": lambda x, host: bool(x.any()),
    "tolist": lambda x, host: x.tolist(),
    "equal": lambda x, host: x.equal(x),
    "to the host": lambda x, host: x.cpu(),
    "into host memory": lambda x, host: host.copy_(x, non_blocking=True),
    "to the device": lambda x, host: host.pin_memory().to("cuda"),
    "from unpinned memory": lambda x, host: host.to("cuda", non_blocking=True),
    "indices on the host": lambda x, host: x[host[0].long()],
    "a list": lambda x, host: torch.tensor([1, 2], device="cuda"),
}
NOT_WAITING = {
    "an operation": lambda x, host: (x @ x.mT).softmax(dim=-1),
    "a number": lambda x, host: x[0].fill_(2.0),
    "from pinned memory": lambda x, host: host.pin_memory().to("cuda", non_blocking=True),
    "to pinned memory": lambda x, host: x.to("cpu", non_blocking=True),
    "into pinned memory": lambda x, host: host.pin_memory().copy_(x, non_blocking=True),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("what", WAITING | NOT_WAITING)
def test_operations_that_synchronize_with_the_host_are_counted(gpu, what, inference):
    with torch.inference_mode(inference):
        host = torch.zeros(2, 3)
        (WAITING | NOT_WAITING)[what](torch.zeros(2, 3, device="cuda"), host)
    assert gpu.waits.total() == (what in WAITING)


STEPS = [*cases(VARIANTS), *cases(EXTRAS), *cases(WAYS, "fp16"), *cases(WAYS, "fp32")]


@pytest.mark.parametrize("precision, overrides", STEPS)
def test_a_training_step_synchronizes_only_in_listed_functions(gpu, run_of, precision, overrides):
    run = run_of(precision, *overrides)
    check_step(gpu, run)
    run.evaluator.evaluate(run.progress)
    check(gpu, EVALUATION_WAITS, run.trainer.precision)


@pytest.mark.parametrize("precision, overrides", cases(WAYS))
def test_a_run_can_be_saved_sampled_and_resumed(gpu, run_of, precision, overrides):
    saved = run_of(precision, *overrides)
    take_step(saved)
    saved.checkpointer.save(saved.progress)

    gpu.reset()
    saved.evaluator.sample(saved.progress)
    num_tokens = saved.env.settings.context - 1
    waits = {name: num * num_tokens for name, num in TOKEN_WAITS.items()}
    check(gpu, waits, torch.float32)  # sampling computes in fp32

    resumed = run_of(precision, *overrides, "resume=true")
    assert resumed.progress.step == 1
    assert {p.device.type for p in resumed.trainer.model.parameters()} == {"cuda"}
    take_step(resumed)


@pytest.mark.parametrize("variant", ["gqa", "gdn"])
def test_scoring_uses_fp32_weights_and_the_training_precision(gpu, run_of, variant):
    saved = run_of("bf16", f"attention={variant}")
    take_step(saved)
    saved.checkpointer.save(saved.progress)
    model, _, _, products = load_to_score(saved.env.run_dir, "cuda")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert products == saved.trainer.precision
    gpu.reset()
    total_nats(model, [Row([1, 2, 3, 4], first=1)], 1, precision=products)
    assert not gpu.fp32_products.keys() - FP32_FUNCTIONS


def decoding_model(variant: str, dtype: torch.dtype, *, int8: bool = False) -> Transformer:
    tree = shortest(tree_of(*variant.split()))
    model = build_model(tree, CUDA, dtype=dtype, seed=None).requires_grad_(False).eval()
    optimize_for_decoding(model, int8)
    return model


def check_decoding(gpu: FakeGPU, variant: str, way: str) -> None:
    """Generate two tokens after each of three prompts, in batches of two."""
    dtype, is_int8, cache_dtype, waits = DECODING[way]
    model = decoding_model(variant, DTYPES[dtype], int8=is_int8)
    cache = None if cache_dtype is None else model.new_cache(2, 16, cache_dtype, CUDA)
    sequences = [Sequence([*prompt], 2) for prompt in PROMPTS]
    gpu.reset()
    for _ in Engine(model, SAMPLER, cache).generate(sequences):
        pass
    check(gpu, waits, DTYPES[dtype])


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_synchronizes_only_in_listed_functions(gpu, variant):
    check_decoding(gpu, f"{variant} model.depth=1", "cached")


@pytest.mark.parametrize("way", ["int8", "fp16", "uncached"])
@pytest.mark.parametrize(
    "variant", ["mla model.depth=1 model.softcap=15.0", "gdn ffn=relu2 model.tied=true"]
)
def test_int8_fp16_and_uncached_decoding_synchronize_only_in_listed_functions(gpu, variant, way):
    check_decoding(gpu, variant, way)


def capture_notes(variant: str, capsys, *, int8: bool = False) -> str:
    """Capture a decode step; return the note about a failure, or an empty string."""
    model = decoding_model(f"{variant} model.depth=1", torch.bfloat16, int8=int8)
    engine = Engine(model, SAMPLER, model.new_cache(2, 16, torch.bfloat16, CUDA))
    assert engine.can_capture
    engine.capture()
    return capsys.readouterr().err


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_decode_step_of_every_variant_can_be_captured(gpu, variant, capsys):
    for is_int8 in (False, True):
        assert capture_notes(variant, capsys, int8=is_int8) == ""


def test_a_decode_step_that_synchronizes_stays_eager(gpu, monkeypatch, capsys):
    begin = ForwardContext.__init__

    def read_and_begin(self, tokens, *more):
        tokens.max().item()
        begin(self, tokens, *more)

    monkeypatch.setattr(ForwardContext, "__init__", read_and_begin)
    reason = "CUDA error: operation not permitted when stream is capturing"
    assert capture_notes("gqa", capsys) == f"note: decoding without a CUDA graph ({reason})\n"


def test_commands_run_on_a_gpu(gpu, command, story):
    """Trains, resumes and generates with the commands."""
    text = ("data=text", f"data.path={story}", "data.vocab_size=400")
    sizes = ("model=tiny", "model.depth=1", "context=16", "batch_tokens=128", "eval_tokens=129")
    options = (
        *sizes,
        *text,
        "device=cuda",
        "micro_batch=4",
        "compile=false",
        "log_every=1",
        "eval_every=1",
    )
    result = command("train.py", *options, "steps=1").succeeded()
    assert "1 x cuda, torch.bfloat16" in result.err
    (run,) = Path("runs").iterdir()
    again = (*options, "steps=2", f"run_dir={run}", "resume=true")
    result = command("train.py", *again).succeeded()
    assert "resuming step 1" in result.err

    new_tokens = ("--device", "cuda", "--max-new-tokens", "3")
    ways = ((), ("--dtype", "int8", "--cache-dtype", "int8"), ("--no-cache",))
    for way in ways:
        with mock.patch.object(
            Engine, "capture", autospec=True, side_effect=Engine.capture
        ) as capture:
            result = command("generate.py", "Ann had", *new_tokens, *way).succeeded()
        assert "3 tokens" in result.err
        assert capture.call_count == (way != ("--no-cache",))


# Compilation. Graphs run without code generation, and the tests check how many there are.


@pytest.fixture
def graphs(monkeypatch):
    """Collect the compiled graphs, and forbid graph breaks."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compile_with = torch.compile
    options = {"backend": backend, "fullgraph": True, "dynamic": False}
    monkeypatch.setattr(torch, "compile", lambda model, **_: compile_with(model, **options))
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: compile_module(self, **options))
    yield graphs
    torch._dynamo.reset()


def check_compiled_training(run: setup.Run, graphs: list) -> None:
    run.trainer.is_compiled = True
    take_step(run)  # two micro-batches
    assert len(graphs) == 1, "the graphs of a training step"


def check_compiled_decoding(variant: str, graphs: list) -> None:
    model = decoding_model(variant, torch.bfloat16)
    cache = model.new_cache(2, 16, torch.bfloat16, CUDA)
    sequences = [Sequence([1, 2, 3], 5), Sequence([4, 5], 5)]
    engine = Engine(model, SAMPLER, cache)
    engine.compile()
    for _ in engine.generate(sequences):
        pass
    assert len(graphs) == 1, "the graphs of a decode step"


@pytest.mark.parametrize(
    "variant", ["gqa model.depth=1", "sink model.depth=1 document_mask=true", "gdn"]
)
def test_training_evaluation_and_decoding_compile_to_one_graph_each(gpu, run_of, graphs, variant):
    run = run_of("bf16", *f"attention={variant}".split())
    check_compiled_training(run, graphs)
    run.evaluator.evaluate(run.progress)  # without gradients, which requires a separate graph
    take_step(run)
    assert len(graphs) == 2, "the graphs of a training step and an evaluation"
    graphs.clear()
    check_compiled_decoding(variant.removesuffix(" document_mask=true"), graphs)


@pytest.mark.parametrize("variant", ["gqa", "mla", "retention"])
def test_compiled_layers_share_one_computation_of_cos_and_sin(gpu, run_of, graphs, variant):
    """Otherwise, the compiler would fuse cos and sin into each kernel that rotates queries or keys."""
    check_compiled_training(run_of("bf16", f"attention={variant}", "model.depth=2"), graphs)
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert targets.count("attend.cos_and_sin.default") == 1
    assert not {"cos", "sin"} & {*targets}


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("variant", ["gqa", "mla", "fox", "sliding_window", "gdn", "dsa"])
def test_all_inputs_of_the_decode_graph_have_static_addresses(gpu, graphs, variant, is_int8):
    """Otherwise, the CUDA graph would copy weights or cache for every token."""
    model = decoding_model(variant, torch.bfloat16, int8=is_int8)
    cache_dtype = torch.int8 if is_int8 else torch.bfloat16
    Engine(model, SAMPLER, model.new_cache(2, 16, cache_dtype, CUDA)).compile()
    (graph,) = graphs
    inputs = graph.graph.find_nodes(op="placeholder")
    moving = []
    for node in inputs:
        if "_dynamo_static_input_type" not in node.meta["tensor_dict"]:
            moving.append(node.name)
    assert len(inputs) > 20 and not moving


# GPUs that need different kernels.


@pytest.mark.parametrize(
    ("gpu", "names", "has_pdl"),
    [(9, None, True), (8, None, False), (9, ["triton.cudagraphs"], False)],
    indirect=["gpu"],
)
def test_decode_kernels_overlap_on_hopper_and_later(gpu, monkeypatch, names, has_pdl):
    """The option is set only if this version of torch supports it."""
    options_of = []

    def record(function, *, options, **_):
        options_of.append(options)
        return function

    monkeypatch.setattr(torch, "compile", record)
    if names is not None:
        monkeypatch.setattr(torch._inductor, "list_options", lambda: names)
    model = decoding_model("gqa model.depth=1", torch.bfloat16)
    Engine(model, SAMPLER, model.new_cache(2, 16, torch.bfloat16, CUDA)).compile()
    (options,) = options_of
    assert options["triton.cudagraphs"] and options["coordinate_descent_tuning"]
    assert options.get("triton.enable_pdl", False) is has_pdl


@pytest.mark.parametrize(
    ("gpu", "precision", "is_grouped"),
    [(9, "auto", True), (9, "fp32", False), (7, "auto", False)],
    indirect=["gpu"],
)
def test_grouped_heads_are_expanded_without_flash_attention(
    gpu, run_of, monkeypatch, precision, is_grouped
):
    """The fallback kernel for grouped heads would materialize all scores."""
    attend = fused.F.scaled_dot_product_attention
    calls = []

    def record(q, k, v, **options):
        calls.append(options["enable_gqa"])
        assert options["enable_gqa"] == (q.shape[1] != k.shape[1])
        return attend(q, k, v, **options)

    monkeypatch.setattr(fused.F, "scaled_dot_product_attention", record)
    take_step(run_of(precision))
    assert set(calls) == {is_grouped}


@pytest.mark.parametrize(
    ("gpu", "width", "dropout", "is_supported"),
    [
        (9, 256, 0.1, True),
        (9, 264, 0.0, False),
        (8, 192, 0.1, True),
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


@pytest.mark.parametrize("variant", ["gqa", "mqa", "mla"])
def test_an_uncompiled_decode_step_does_not_copy_the_cache(gpu, monkeypatch, variant):
    """Keys and values are not repeated for the query heads that share them."""
    model = decoding_model(f"{variant} model.depth=1", torch.bfloat16)
    engine = Engine(model, SAMPLER, model.new_cache(2, 16, torch.bfloat16, CUDA))
    repeat = torch.Tensor.repeat_interleave
    shapes = []

    def record(x, *arguments, **options):
        shapes.append(x.shape)
        return repeat(x, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "repeat_interleave", record)
    engine.decode_step()
    assert not shapes


@pytest.mark.parametrize(
    ("gpu", "dtype"), [(9, torch.bfloat16), (7, torch.float16)], indirect=["gpu"]
)
def test_training_and_its_optimizer_use_the_fastest_dtype_of_the_gpu(gpu, dtype):
    assert hardware.pick_precision("auto", CUDA) == dtype
    assert newton_schulz(torch.zeros(2, 16, 24, device="cuda")).dtype == dtype


def flex_attention_calls(graphs: list) -> list[torch.fx.Node]:
    """The calls to FlexAttention in compiled graphs."""
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    return [node for node in nodes if "flex_attention" in str(node.target)]


@pytest.mark.parametrize(
    ("gpu", "variant", "count"),
    [
        (9, "sink", 1),
        (9, "alibi", 1),
        (9, "fox", 0),
        (9, "fox document_mask=true", 1),
        (9, "mla document_mask=true", 1),
        (8, "gqa document_mask=true model.heads=2 model.dim=256", 1),
        (8, "fox document_mask=true model.heads=2 model.dim=240", 1),
        (8, "fox document_mask=true model.heads=2 model.dim=256", 0),  # gates add 8 columns
        (9, "sink model.heads=8", 0),  # Inductor refuses heads narrower than 16
        (9, "fox document_mask=true model.heads=8", 0),
        (7, "sink", 0),
    ],
    indirect=["gpu"],
)
def test_flex_attention_reads_no_tensor_with_a_gradient(gpu, run_of, graphs, variant, count):
    """The backward would accumulate such a gradient with one atomic addition per score."""
    check_compiled_training(run_of("auto", *f"attention={variant}".split()), graphs)
    calls = flex_attention_calls(graphs)
    assert len(calls) == count
    for call in calls:
        *_, of_scores, of_mask = call.args  # tensors read by score_mod and mask_mod
        for node in (*of_scores, *of_mask):
            assert not node.meta["example_value"].requires_grad, node


@pytest.mark.parametrize(
    ("variant", "rows"),
    [("sliding_window", 1), ("gqa document_mask=true", 4), ("alibi document_mask=true", 4)],
)
def test_flex_attention_reads_positions_instead_of_a_mask(run_of, graphs, variant, rows):
    """A mask over all pairs of tokens would take memory quadratic in the context."""
    check_compiled_training(run_of("auto", *f"attention={variant}".split()), graphs)
    calls = flex_attention_calls(graphs)
    assert calls
    for call in calls:
        *_, of_mask = call.args
        for node in of_mask:
            assert node.meta["example_value"].ndim <= 2, node
        block_mask = call.args[4]
        num_blocks = block_mask[2]  # blocks of keys for each row, head and block of queries
        assert num_blocks.meta["example_value"].shape == (rows, 1, 1)


@pytest.mark.parametrize(
    ("gpu", "width", "dtype", "fits"),
    [
        (9, 192, torch.bfloat16, True),
        (9, 128, torch.float32, True),
        (9, 136, torch.float32, False),
        (8, 128, torch.bfloat16, True),
        (8, 192, torch.bfloat16, False),
        (8, 64, torch.float32, True),
        (8, 128, torch.float32, False),
        (7, 64, torch.float16, False),
    ],
    indirect=["gpu"],
)
def test_flex_attention_is_avoided_if_it_exceeds_shared_memory(gpu, width, dtype, fits):
    """At a head width of 192 in bf16, its backward takes 114,688 bytes (pytorch/pytorch#198224)."""
    assert flex.fits_gpu([width, width], dtype, CUDA) is fits


# Fault injection: the checks above must fail if one line of code is replaced.


def replace_line(monkeypatch, function, line: str, replacement: str) -> None:
    """Replace a line in the code of a function, for all modules that have imported it."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{function.__qualname__} has another code than {line!r}"
    names = {}
    code = compile(source.replace(line, replacement), inspect.getsourcefile(function), "exec")
    exec(code, function.__globals__, names)
    monkeypatch.setattr(function, "__code__", names[function.__name__].__code__)


EMBED = "x = self.embed(tokens)"
# A function, a part of its code and the replacement; then the failing check and its message.
FAULTS = {
    "a hidden .item()": (
        (Trainer.accumulate, "torch.stack(sums)", "torch.stack(sums) * sums[0].item()"),
        ("training", "the host waits"),
    ),
    "a hidden .item() in decoding": (
        (sample, "logits = logits.float()", "logits = logits.float() * seeds.max().item()"),
        ("decoding", "the host waits"),
    ),
    "a tensor on the CPU": (
        (
            ForwardContext.__init__,
            "torch.arange(tokens.shape[1], device=tokens.device)",
            "torch.arange(tokens.shape[1])",
        ),
        ("decoding", "two.* devices"),
    ),
    "a dtype that autocast should have changed": (
        (Trainer.accumulate, "self.precision)", "torch.float32)"),
        ("training", "products are in fp32"),
    ),
    "a graph break": (
        (Transformer.hidden_states, EMBED, f"print(len(tokens)); {EMBED}"),
        ("compiled training", "the graphs of a training step"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checks_detect_each_fault(gpu, run_of, graphs, monkeypatch, fault):
    replacement, (path, message) = FAULTS[fault]
    checks = {
        "training": lambda: check_step(gpu, run_of("bf16")),
        "decoding": lambda: check_decoding(gpu, "gqa", "cached"),
        "compiled training": lambda: check_compiled_training(run_of("bf16"), graphs),
    }
    replace_line(monkeypatch, *replacement)
    with pytest.raises((AssertionError, RuntimeError), match=message):
        checks[path]()
