"""Training and generation on a GPU, without one: what waits, what mixes devices, what is in fp32.

Every preset meets every precision, every option every path; see tests/gpu/fake_cuda.py. The number
after a function below is how often the host waits in it for the device.
"""

import inspect
import textwrap
from collections import Counter
from collections.abc import Iterable
from functools import partial
from time import monotonic

import numpy as np
import pytest
import torch
from torch import nn

from data.corpus import Corpus
from data.loader import Loader
from inference.batch import Sequence
from inference.engine import decode_step, generate
from inference.quantize import optimize_for_decoding
from inference.sampling import sample
from model.build import build_model, materialize
from model.context import ForwardContext
from model.transformer import Transformer
from run.distributed import DistEnv
from run.signals import Signals
from tests import conftest
from tests.conftest import TINY, VARIANTS, settings_of, shrink, tree_of
from tests.gpu.fake_cuda import FakeGPU, fake_cuda
from training.divergence import NEVER
from training.evaluation import evaluate
from training.loss import LanguageModelLoss
from training.trainer import Trainer

CUDA = torch.device("cuda")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# What the host reads of the guard against divergence: no step was bad.
VALUES = {"DivergenceGuard.bad_step": NEVER}

# Options that change what is computed on the device. A case has one of each kind.
ATTENTION_OPTIONS = ("", "document_mask=true", "activation_checkpointing=true")
OPTIONS = (
    "",
    "z_loss=1e-4",
    "optimizer=adamw clip=null",
    "optimizer=lion",
    "model.softcap=15.0 model.tied=true",
    "ffn=geglu norm=layernorm",
    "ffn=relu2",
    "ffn=gelu norm=layernorm",
)
EXTRAS = (
    *conftest.EXTRAS,
    "gqa attention.dropout=0.1",
    "sink attention.dropout=0.1",
    "mla attention.dropout=0.1",
)

# Functions that multiply in fp32 in any precision: their states accumulate over all tokens.
FP32_FUNCTIONS = {"delta_rule", "states_by_scan", "retain"}

# GradScaler has its scale on the device, and skips a step on the host.
FP16_STEP_WAITS = {"Trainer.train_step": 1, "Trainer._must_skip": 2}  # the 2 for each optimizer
# A line of metrics has the loss and the norm of the gradient, if no step was bad.
METRICS_WAITS = {"DivergenceGuard.bad_step": 1, "Trainer.log_metrics": 2}
EVALUATION_WAITS = {"evaluate": 1}
TOKEN_WAITS = {"generate": 1}  # the copy of a token that was drawn
# Ragged prompts for two rows. The host reads the token 0, so the first prompts repeat themselves.
PROMPTS = ([0, 0, 0, 0, 0], [4, 5, 0, 0], [6, 7])
SAMPLER = partial(sample, temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.1)
# Ways of decoding: the dtype of the model, whether its weights are in int8, the dtype of the cache,
# the number of draft tokens, and the waits for three tokens after each prompt.
DECODING = {
    "cached": ("bf16", False, torch.bfloat16, 0, {"generate": 6}),
    "int8": ("bf16", True, torch.int8, 0, {"generate": 6}),
    "drafts": ("fp16", False, torch.float16, 2, {"speculate": 5}),
    "uncached": ("fp32", False, None, 0, {"generate": 9}),
}
MODEL_OPTIONS = ("", *OPTIONS[4:])

# Presets that are compiled in other ways: plain, by FlexAttention, and a recurrence.
COMPILED = ("gqa", "sink document_mask=true", "alibi", "delta")


def cases(variants: Iterable[str], precisions: Iterable[str] = DTYPES) -> list:
    """A precision and overrides: each preset in each precision, with options in turn."""
    parameters = []
    for number, variant in enumerate(variants):
        for shift, precision in enumerate(precisions):
            # 3 and 8 have no common divisor, so every option meets every precision.
            attention_option = ATTENTION_OPTIONS[(number + shift) % 3]
            option = OPTIONS[(3 * number + shift) % 8]
            overrides = f"attention={variant} {attention_option} {option}".split()
            name = variant.partition("{")[0].replace(" ", "-")
            parameters.append(pytest.param(precision, overrides, id=f"{name}-{precision}"))
    return parameters


@pytest.fixture
def gpu():
    with fake_cuda(VALUES) as gpu:
        yield gpu


@pytest.fixture
def trainer_of(gpu, tokenizer, tmp_path):
    """Makes trainers for the GPU, all in one run folder."""

    def make(precision: str, *overrides: str) -> Trainer:
        sizes = ("context=8", "batch_tokens=64", "micro_batch=4", "eval_tokens=65", "steps=6")
        settings = settings_of(*TINY, *sizes, *overrides) | {"device": "cuda"}
        settings["model"] = shrink(settings["model"]) | {"vocab_size": tokenizer.vocab_size}
        text = [np.zeros(4096, np.uint16)]
        corpus = Corpus(text, text, 4096, tokenizer, "0" * 64)
        loader = Loader(text, context=8, batch_size=8, seed=0)
        ranks = DistEnv(0, 1, CUDA)
        started = monotonic()
        trainer = Trainer(
            settings, corpus, loader, tmp_path, ranks, DTYPES[precision], Signals(), started
        )
        trainer.restore_or_start(None)
        trainer.log.open(trainer.log_state)
        return trainer

    return make


def check(gpu: FakeGPU, waits: dict[str, int], dtype: torch.dtype) -> None:
    """Assert that the host waits there alone, at most so often, and that no other product is in fp32."""
    assert not gpu.waits - Counter(waits), "the host waits for the device"
    if dtype != torch.float32:
        unasked = gpu.fp32_products.keys() - FP32_FUNCTIONS
        assert not unasked, f"products are in fp32 instead of {dtype}"
    gpu.reset()


def check_step(gpu: FakeGPU, trainer: Trainer) -> None:
    gpu.reset()
    trainer.train_step()
    waits = Counter()
    if trainer.precision == torch.float16:
        waits.update(FP16_STEP_WAITS)
        waits["Trainer._must_skip"] *= len(trainer.optimizers)
    check(gpu, waits, trainer.precision)
    trainer.log_metrics()
    check(gpu, METRICS_WAITS, trainer.precision)


def check_evaluation(gpu: FakeGPU, trainer: Trainer) -> None:
    gpu.reset()
    trainer.evaluate()
    check(gpu, EVALUATION_WAITS, trainer.precision)


WAITING = {
    "item": lambda x, host: x[0, 0].item(),
    "bool": lambda x, host: bool(x.any()),
    "tolist": lambda x, host: x.tolist(),
    "equal": lambda x, host: x.equal(x),
    "to the host": lambda x, host: x.cpu(),
    "into memory of the host": lambda x, host: host.copy_(x, non_blocking=True),
    "to the device": lambda x, host: host.pin_memory().to("cuda"),
    "from memory that is not pinned": lambda x, host: host.to("cuda", non_blocking=True),
    "indices of the host": lambda x, host: x[host[0].long()],
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
def test_what_makes_the_host_wait_is_counted(gpu, what, inference):
    with torch.inference_mode(inference):
        host = torch.zeros(2, 3)
        (WAITING | NOT_WAITING)[what](torch.zeros(2, 3, device="cuda"), host)
    assert gpu.waits.total() == (what in WAITING)


@pytest.mark.parametrize("precision, overrides", [*cases(VARIANTS), *cases(EXTRAS, ["bf16"])])
def test_a_step_waits_only_where_it_must(gpu, trainer_of, precision, overrides):
    trainer = trainer_of(precision, *overrides)
    check_step(gpu, trainer)
    check_evaluation(gpu, trainer)


@pytest.mark.parametrize("number, variant", [*enumerate(VARIANTS)], ids=VARIANTS)
def test_a_run_is_saved_sampled_and_resumed(gpu, trainer_of, number, variant):
    precision = list(DTYPES)[number % 3]
    overrides = (f"attention={variant}", *OPTIONS[number % 8].split())
    saved = trainer_of(precision, *overrides)
    saved.train_step()
    saved.save()

    gpu.reset()
    saved.sample()
    num_tokens = saved.settings["context"] - 1
    waits = {name: num * num_tokens for name, num in TOKEN_WAITS.items()}
    check(gpu, waits, torch.float32)  # it is computed in fp32

    resumed = trainer_of(precision, *overrides, "resume=true")
    assert resumed.step == 1
    assert {p.device.type for p in resumed.model.parameters()} == {"cuda"}
    resumed.train_step()


def decoding_model(variant: str, dtype: torch.dtype, *, int8: bool = False) -> Transformer:
    tree = tree_of(*variant.split())
    model = materialize(build_model(tree), CUDA, dtype).requires_grad_(False).eval()
    optimize_for_decoding(model, int8)
    return model


def check_decoding(gpu: FakeGPU, variant: str, way: str) -> None:
    """Continue three ragged prompts by three tokens each, two at a time."""
    dtype, is_int8, cache_dtype, num_draft_tokens, waits = DECODING[way]
    model = decoding_model(variant, DTYPES[dtype], int8=is_int8)
    cache = None if cache_dtype is None else model.new_cache(2, 16, cache_dtype, CUDA)
    sequences = [Sequence(prompt, 3) for prompt in PROMPTS]
    gpu.reset()
    for _ in generate(model, sequences, SAMPLER, cache=cache, num_draft_tokens=num_draft_tokens):
        pass
    check(gpu, waits, DTYPES[dtype])


@pytest.mark.parametrize("way", DECODING)
@pytest.mark.parametrize("number, variant", [*enumerate(VARIANTS)], ids=VARIANTS)
def test_decoding_waits_only_where_it_must(gpu, number, variant, way):
    options = MODEL_OPTIONS[number % len(MODEL_OPTIONS)]
    check_decoding(gpu, f"{variant} {options}", way)


def test_the_commands_run_on_a_gpu(gpu, command, story):
    """From the options to the text: train, resume, generate."""
    text = ("data=text", f"data.path={story}", "data.vocab_size=400")
    sizes = ("model=tiny", "context=16", "batch_tokens=128", "eval_tokens=129")
    options = (*sizes, *text, "device=cuda", "compile=false", "log_every=1", "eval_every=1")
    result = command("train.py", *options, "steps=1")
    assert result.code == 0, result.err
    assert "1 x cuda, torch.bfloat16" in result.err
    result = command("train.py", *options, "steps=2", "resume=true")
    assert result.code == 0, result.err
    assert "resuming step 1" in result.err

    new_tokens = ("--device", "cuda", "--max-new-tokens", "3")
    ways = ((), ("--dtype", "int8", "--cache-dtype", "int8", "--prompt-lookup", "2"))
    for way in ways:
        result = command("generate.py", "Ann had", *new_tokens, *way)
        assert result.code == 0, result.err
        assert "3 tokens" in result.err


# Compilation. The graphs are run as they are: what counts is how many there are.


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are compiled, of whole functions alone."""
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


def check_compiled_training(trainer: Trainer, graphs: list) -> None:
    trainer.compile()
    trainer.train_step()  # of two micro-batches
    assert len(graphs) == 1, "the graphs of a training step"


def check_compiled_evaluation(trainer: Trainer, graphs: list) -> None:
    check_compiled_training(trainer, graphs)
    trainer.evaluate()  # without gradients, so by a graph of its own
    trainer.train_step()
    assert len(graphs) == 2, "the graphs of a training step and an evaluation"


def check_compiled_decoding(variant: str, graphs: list) -> None:
    model = decoding_model(variant, torch.bfloat16)
    cache = model.new_cache(2, 16, torch.bfloat16, CUDA)
    sequences = [Sequence([1, 2, 3], 5), Sequence([4, 5], 5)]
    step = torch.compile(decode_step)
    for _ in generate(model, sequences, SAMPLER, cache=cache, step=step):
        pass
    assert len(graphs) == 1, "the graphs of a decode step"


@pytest.mark.parametrize("overrides", COMPILED)
def test_training_and_evaluation_are_a_graph_each(gpu, trainer_of, graphs, overrides):
    trainer = trainer_of("bf16", *f"attention={overrides} compile=true".split())
    check_compiled_evaluation(trainer, graphs)


@pytest.mark.parametrize("variant", [overrides.split()[0] for overrides in COMPILED])
def test_a_decode_step_is_one_graph(gpu, graphs, variant):
    check_compiled_decoding(variant, graphs)


# Faults: with one line of the code replaced, the checks above fail.


def replace_line(monkeypatch, function, line: str, replacement: str) -> None:
    """Replace a line in the code of a function, for all that have imported it."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{function.__qualname__} has another code than {line!r}"
    names = {}
    code = compile(source.replace(line, replacement), inspect.getsourcefile(function), "exec")
    exec(code, function.__globals__, names)
    monkeypatch.setattr(function, "__code__", names[function.__name__].__code__)


POSITIONS = "torch.arange(tokens.shape[1], device=tokens.device)"
EMBED = "x = self.embed(tokens)"
FAULTS = {
    "a hidden .item()": {
        "training": (Trainer._accumulate, "loss_sum.detach()", "loss_sum * loss_sum.item()"),
        "evaluation": (
            LanguageModelLoss.forward,
            "model = self.model",
            "model = self.model; inputs.max().item()",
        ),
        "decoding": (
            sample,
            "logits = logits.float()",
            "logits = logits.float() * seeds.max().item()",
        ),
    },
    "a tensor on the CPU": dict.fromkeys(
        ("training", "evaluation", "decoding"),
        (ForwardContext.__init__, POSITIONS, "torch.arange(tokens.shape[1])"),
    ),
    "a dtype that autocast should have changed": {
        "training": (Trainer._forward, "self.precision)", "torch.float32)"),
        "evaluation": (evaluate, "autocast(ranks.device, precision)", "torch.no_grad()"),
        "decoding": (
            Transformer.logits,
            "self.head(hidden)",
            "F.linear(hidden.float(), self.head.weight.float())",
        ),
    },
    "a graph break": {
        "training": (Transformer.hidden, EMBED, f"print(len(tokens)); {EMBED}"),
        "evaluation": (Transformer.hidden, EMBED, f"self.training or print(); {EMBED}"),
        "decoding": (Transformer.hidden, EMBED, f"print(len(tokens)); {EMBED}"),
    },
    "an extra recompilation": {
        "training": (Transformer.hidden, EMBED, f"self.context += 1; {EMBED} * self.context"),
        "evaluation": (
            Transformer.hidden,
            EMBED,
            f"self.context += not self.training; {EMBED} * self.context",
        ),
        "decoding": (Transformer.hidden, EMBED, f"self.context += 1; {EMBED} * self.context"),
    },
}
MESSAGES = {
    "a hidden .item()": "the host waits",
    "a tensor on the CPU": "two.* devices",
    "a dtype that autocast should have changed": "products are in fp32",
    "a graph break": "graph break|Unsupported|print",
    "an extra recompilation": "the graphs of",
}


@pytest.mark.parametrize("path", ("training", "evaluation", "decoding"))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(gpu, trainer_of, graphs, monkeypatch, fault, path):
    checks = {
        "training": lambda: check_step(gpu, trainer_of("bf16")),
        "evaluation": lambda: check_evaluation(gpu, trainer_of("bf16")),
        "decoding": lambda: check_decoding(gpu, "gqa", "cached"),
    }
    if fault in ("a graph break", "an extra recompilation"):
        checks = {
            "training": lambda: check_compiled_training(trainer_of("bf16"), graphs),
            "evaluation": lambda: check_compiled_evaluation(trainer_of("bf16"), graphs),
            "decoding": lambda: check_compiled_decoding("gqa", graphs),
        }
    replace_line(monkeypatch, *FAULTS[fault][path])
    with pytest.raises((AssertionError, RuntimeError), match=MESSAGES[fault]):
        checks[path]()
