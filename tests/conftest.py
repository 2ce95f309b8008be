"""Shared helpers: list variants, build random models, and run commands in this process."""

import json
import os

# Must be set before the imports below. `OMP_NUM_THREADS=2 pytest` runs with two threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="disabled")
# Compiled code is shared by all tests.
os.environ.setdefault("ATTEND_CACHE", os.path.abspath(f"{__file__}/../../.cache"))

import runpy
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from time import monotonic
from unittest import mock

import pytest
import torch

from data.corpus import Corpus
from data.loader import Loader
from data.prepare import prepare
from data.tokenizer import Tokenizer
from inference.batch import Sequence
from inference.engine import Engine
from inference.sampling import sample
from model.build import build_model
from run import checkpoint, errors
from run.compose import compose
from run.distributed import Ranks
from run.instantiate import instantiate
from run.settings import Settings
from run.signals import Signals
from tests.run.forks import LONG as LONG
from train import take_step
from training import logger, setup
from training.clock import Clock
from training.environment import Environment

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
DATASETS = ROOT.parent / "shared" / "datasets"
STORIES = DATASETS / "stories260K"
stories = pytest.mark.skipif(
    not STORIES.exists(), reason="needs the datasets next to the repository"
)
VARIANTS = sorted(path.stem for path in (CONFIGS / "attention").glob("*.yaml"))
# Shipped presets that share all their classes and options with other presets. Costly tests run for
# these presets only with `-m long`. A preset that is not listed here always runs.
COVERED = [
    "chunked",
    "gated",
    "gdn_sigmoid",
    "l2norm",
    "llama",
    "local_global",
    "mha",
    "nope",
    "sink",
    "sliding_window",
    "window_nope",
]
YARN = "attention.rope_scaling={_target_:model.rope.YaRN,factor:4,fast:8,slow:1,context:16}"
EXTRAS = (
    "llama model.tied=true attention.bias=true",
    f"gqa attention.rope_fraction=0.5 {YARN}",
    "shared_kv attention.share=half attention.window=5 model.depth=4",
    "value_residual model.softcap=15.0",
)
# The precision of training commands: fp32, bf16, or auto (train.py picks it for this processor).
PRECISION = os.environ.get("ATTEND_TEST_PRECISION", "auto")
TINY = (
    "model=tiny",
    "context=64",
    "batch_tokens=512",
    "max_minutes=null",
    "log_every=1",
    "device=cpu",
    "compile=false",
    f"precision={PRECISION}",
)
SHORT = ("steps=4", "eval_every=2", "sample_every=4", "save_every=2")
close = torch.testing.assert_close
greedy = partial(sample, temperature=0)

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# A shell makes background commands ignore SIGINT, which the tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the layers and their laws first, because most changes break them."""
    order = {"model": 0, "laws": 1, "gpu": 2}
    items.sort(key=lambda item: order.get(item.path.parent.name, 3))


def preset_case(name: str, *values: object):
    """A test's parameters for an attention preset: its name, or these values.

    If other presets cover its mechanisms, the test runs only with `-m long`.
    """
    marks = [pytest.mark.long] if name in COVERED else []
    if not values:
        values = (name,)
    return pytest.param(*values, marks=marks, id=name)


EACH_MECHANISM = [preset_case(name) for name in VARIANTS]


def settings_of(*overrides: str) -> Settings:
    """The settings that `python train.py OVERRIDES` composes."""
    return composed(*overrides).model_copy(deep=True)


@cache
def composed(*overrides: str) -> Settings:
    return compose(["name=test", *overrides])


def tree_of(variant: str, *overrides: str) -> dict:
    """The config of a tiny model of this variant."""
    tiny = ("model=tiny", "model.depth=2", "data.vocab_size=128", "context=64")
    return every_kind(shrink(settings_of(f"attention={variant}", *tiny, *overrides).model))


def every_kind(tree: dict) -> dict:
    """A model config with the shortest pattern, and enough layers, for every kind of layer."""
    attention = tree["attention"]
    depth = tree["depth"]
    if "cross_layer" in attention["_target_"]:  # a first layer, and a layer that reads it
        depth = max(depth, 2)
    if "pattern" in attention:
        pattern = [*dict.fromkeys(attention["pattern"])]
        attention = attention | {"pattern": pattern}
        depth = max(depth, len(pattern))
    return tree | {"depth": depth, "attention": attention}


SHORT_REACH = {"window": 5, "chunk": 5, "block": 2, "topk": 3}


def shrink(tree):
    """Shorten windows, chunks and top-k so that a few tokens exceed them."""
    if not isinstance(tree, dict):
        return tree
    return {
        key: SHORT_REACH[key] if key in SHORT_REACH and isinstance(value, int) else shrink(value)
        for key, value in tree.items()
    }


def continued(
    model,
    prompts: list[list[int]],
    most: int,
    draw=greedy,
    rows: int = 0,
    eos=(),
    compiled=False,
    captured=False,
):
    """Continue each prompt up to `eos`, in batches of `rows`; rows=0 decodes without a cache."""
    weight = model.embed.weight
    cache = model.new_cache(rows, model.context, weight.dtype, weight.device) if rows else None
    continuations = {}
    for seed, prompt in enumerate(prompts):
        continuations[Sequence([*prompt], most, seed=seed, eos=eos)] = []
    # The first steps read only a few cache slots, and the last steps read the whole context.
    with mock.patch("inference.engine.READ_SLOTS_MULTIPLE", 4):
        engine = Engine(model, draw, cache, prefill_chunk=9)
        if compiled:
            engine.compile()
        if captured:
            engine.capture()
        for sequence in engine.generate(continuations):
            continuations[sequence].append(sequence.tokens[-1])
    return [*continuations.values()]


def compile_without_inductor(monkeypatch, backend: str | Callable = "aot_eager") -> None:
    """Make torch.compile capture full graphs and run them without code generation."""
    compile_with = torch.compile

    def compile_whole(function, dynamic=False, options=None, isolate_recompiles=False, **_):
        guard_filter = (options or {}).get("guard_filter_fn")
        return compile_with(
            function,
            backend=backend,
            dynamic=dynamic,
            fullgraph=True,
            isolate_recompiles=isolate_recompiles,
            options=None if guard_filter is None else {"guard_filter_fn": guard_filter},
        )

    monkeypatch.setattr(torch, "compile", compile_whole)


@torch.no_grad()
def assert_greedy(
    model: torch.nn.Module, prompt: list[int], one: list[int], other: list[int]
) -> None:
    """Check that greedy continuations are equal until two float64 logits differ by under 0.0001."""
    assert len(one) == len(other)
    parted = next((at for at in range(len(one)) if one[at] != other[at]), None)
    if parted is not None:  # a near-tie, decided by rounding
        logits = deepcopy(model).double()(torch.tensor([[*prompt, *one[:parted]]]))[0, -1]
        assert abs(logits[one[parted]] - logits[other[parted]]) < 1e-4, (parted, one, other)


def redraw(model: torch.nn.Module) -> torch.nn.Module:
    """Randomize all parameters (norm weights near 1), because zeros would hide a broken law."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in name:
                p.copy_(1 + 0.2 * noise)
            elif p.ndim < 2:
                p.copy_(0.5 * noise)
            else:
                p.copy_(noise * p.shape[1] ** -0.5)
    return model


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Make torch fill uninitialized memory with NaN inside the block."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def drawn(tree: dict, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A model built as in training and generation, with all parameters randomized."""
    with poisoned_memory():
        model = build_model(tree, dtype=dtype, seed=None)
    return redraw(model).eval()


@cache
def drawn_once(variant: str) -> torch.nn.Module:
    return drawn(tree_of(*variant.split()), torch.float64)


@pytest.fixture(params=[*VARIANTS, *EXTRAS])
def model(request):
    return deepcopy(drawn_once(request.param))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(
        ["Ann had a red ball. Bob said: may I have a red ball, Ann?\n", "Тест  e\u0301"] * 20, 360
    )


def saved(folder: Path, tree: dict, tokenizer: Tokenizer, step: int = 1) -> torch.nn.Module:
    """Save a run with one checkpoint of a model with this config and randomized parameters."""
    tree = tree | {"vocab_size": tokenizer.vocab_size}
    model = drawn(tree)
    checkpoint.save(folder, step, model.state_dict(), {"model": tree}, tokenizer.files, {})
    return model


@dataclass
class Result:
    code: int
    out: str
    err: str

    def succeeded(self) -> "Result":
        assert self.code == 0, self.err
        return self


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """A function that runs `python FILE ARGUMENTS` in this process, in a temporary folder.

    It returns the exit code, stdout and stderr. Loss curves are not plotted, because that would
    take as long as training; only `finished` has a loss curve.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logger, "draw_loss", lambda _, path: path.touch() or [0.0])
    monkeypatch.setattr(setup, "cache_folder", lambda: Path(".cache"))  # of text
    monkeypatch.setattr(errors, "hard_exit", nullcontext)

    def run(file: str, *arguments: str) -> Result:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", [str(ROOT / file), *arguments])
        try:
            runpy.run_path(str(ROOT / file), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        # Undo what training on a GPU and generate.py change in their process.
        torch.set_float32_matmul_precision("highest")
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        return Result(code, *capfd.readouterr())

    return run


def tell(folder: Path) -> Path:
    """Write a text of 60 short documents that a tiny model learns in a few steps."""
    names = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Fay")
    things = ("a red ball", "an old map", "the blue cup", "a small dog", "one warm hat")
    lines = [
        f"{a} had {t}. {b} saw {t} and said: may I have {t}, {a}?\n"
        for a in names
        for b in names
        for t in things
    ]
    path = folder / "story.txt"
    path.write_text(
        "<|endoftext|>\n".join("".join(lines[i : i + 3]) for i in range(0, len(lines), 3)),
        encoding="utf-8",
    )
    return path


train_tokenizer = cache(Tokenizer.train)


@pytest.fixture
def story(tmp_path, monkeypatch) -> Path:
    """The text in the test's folder; its tokenizer is trained only once per process."""
    monkeypatch.setattr(Tokenizer, "train", lambda texts, size: train_tokenizer((*texts,), size))
    return tell(tmp_path)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A function that prepares the story with given data settings, only once per process."""
    folder = tmp_path_factory.mktemp("prepared")
    path = str(tell(folder))

    @cache
    def corpus_of(data: str) -> Corpus:
        return prepare(instantiate(json.loads(data), "data"), folder / "cache")

    return lambda data: replace(corpus_of(json.dumps(data | {"path": path})))


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A folder with a run of train.py on the story, trained only once per process."""
    folder = tmp_path_factory.mktemp("finished")
    text = ("data=text", f"data.path={tell(folder)}", "data.vocab_size=400")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(setup, "cache_folder", lambda: Path(".cache"))
        patch.setattr(sys, "argv", ["train.py", *TINY, *SHORT, *text])
        patch.setattr(errors, "hard_exit", nullcontext)
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    return folder


@pytest.fixture
def trained(command, story, finished) -> Path:
    """A tiny run on the story that the test may modify."""
    for name in ("runs", ".cache"):
        shutil.copytree(finished / name, name)
    return Path("runs/text-tiny-gqa")


@pytest.fixture
def drawn_run(command, tokenizer) -> Path:
    """A run with random weights, so its generated text does not depend on training.

    For each prompt used in tests, the top two logits differ by at least 0.0001 for 100 tokens.
    """
    saved(Path("runs/drawn"), tree_of("gqa"), tokenizer)
    return Path("runs/drawn")


@pytest.fixture
def run_of(tmp_path, story, prepared):
    """A function that builds runs on the story, each in a new folder unless `folder` is given."""

    def build(*overrides: str, folder: str | None = None) -> setup.Run:
        text = ("data=text", "data.path=story.txt", "data.vocab_size=400")
        words = [word for word in overrides if word != "resume=true"]
        # Composed once and shared by all folders and by new and resumed runs.
        settings = settings_of(*TINY, *text, "steps=6", "precision=fp32", *words)
        settings.resume = len(words) < len(overrides)
        settings.data["path"] = str(story)
        corpus = prepared(settings.data)
        settings.model["vocab_size"] = corpus.tokenizer.vocab_size
        loader = Loader(
            corpus.train, context=64, batch_size=settings.batch_tokens // 64, seed=settings.seed
        )
        run_dir = tmp_path / (folder or f"run{len(list(tmp_path.iterdir()))}")
        run_dir.mkdir(exist_ok=True)
        ranks = Ranks(0, 1, torch.device(settings.device))
        start = setup.Start(checkpoint.newest_checkpoint(run_dir) if settings.resume else None)
        clock = Clock(monotonic())
        env = Environment(settings, corpus, loader, run_dir, ranks, Signals(), clock)
        return setup.build_run(env, start)

    return build


def weights(run: setup.Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.trainer.model.named_parameters()}


def learn_by_heart(run: setup.Run, steps: int) -> list[float]:
    """Overfit one batch; return its losses in nats, which fall in fp32 and bf16 for all seeds."""
    load = Loader.__call__

    def load_first(loader: Loader, step: int, rows: slice = slice(None)):
        return load(loader, 0, rows)

    losses = []
    with mock.patch.object(Loader, "__call__", load_first):
        for _ in range(steps):
            run.meter.loss_sum.zero_()
            take_step(run)
            losses.append(run.meter.loss_sum[0].item() / run.env.settings.batch_tokens)
    return losses
