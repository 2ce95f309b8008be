"""Fixtures of the cases on a fake GPU, each of which runs in a process of test_fake_cuda.py."""

from time import monotonic

import numpy as np
import pytest
import torch
from torch import nn

from data.corpus import Corpus
from data.loader import Loader
from run import checkpoint
from run.distributed import Ranks
from run.signals import Signals
from tests.conftest import TINY, every_kind, settings_of, shrink
from tests.gpu.fake_cuda import fake_cuda
from training import setup
from training.clock import Clock
from training.environment import Environment


@pytest.fixture
def gpu(request):
    """An H100, or a GPU whose major compute capability is given as a parameter."""
    with fake_cuda(getattr(request, "param", 9)) as gpu:
        yield gpu


@pytest.fixture
def run_on_gpu(gpu, tokenizer, tmp_path):
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
        settings.model = every_kind(model)
        text = [np.zeros(4096, np.uint16)]
        corpus = Corpus(text, text[0], tokenizer, "0" * 64)
        loader = Loader(text, context=8, batch_size=8, seed=0)
        ranks = Ranks(0, 1, torch.device("cuda"))
        clock = Clock(monotonic())
        env = Environment(settings, corpus, loader, tmp_path, ranks, Signals(), clock)
        is_resumed = "resume=true" in overrides
        start = setup.Start(checkpoint.newest_checkpoint(tmp_path) if is_resumed else None)
        return setup.build_run(env, start)

    return build


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
