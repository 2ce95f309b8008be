"""Memory and communication of a rank on simulated GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from model.build import build_model
from run.distributed import Ranks, full_tensor, shard_like
from run.settings import Settings
from tests.conftest import redraw, settings_of
from tests.gpu.fake_ranks import MICRO_BATCHES, simulate
from training.parallel import BUCKET_MIB, build_parallel, compile_model

DEPTH = 2
SMALL = (
    "model=15m",
    f"model.depth={DEPTH}",
    "attention=gqa",
    "optimizer=adamw",
    "data.vocab_size=2048",
    "context=128",
    "micro_batch=4",
)
PARAMETERS = list(build_model(settings_of(*SMALL).model, "meta").named_parameters())
BLOCKS = sum(p.numel() for name, p in PARAMETERS if "blocks" in name)
OUTER = sum(p.numel() for name, p in PARAMETERS if "blocks" not in name)
CHECKPOINTED = "activation_checkpointing=true"


def test_a_sharded_step_gathers_blocks_twice_and_reduces_gradients_once_per_micro_batch():
    gpus = 8
    step = simulate(*SMALL, "sharded=true", CHECKPOINTED, gpus=gpus)
    # Embedding, head and norm stay gathered from forward to backward. Gradient norms are reduced
    # over all ranks.
    assert step.calls == {
        "allgather": MICRO_BATCHES * (2 * DEPTH + 1),
        "reducescatter": MICRO_BATCHES * (DEPTH + 1),
        "allreduce": 1,
    }
    gathered = 2 * 2 * BLOCKS + 4 * OUTER  # blocks in bf16
    reduced = 4 * (BLOCKS + OUTER)
    numbers = 4 * len(PARAMETERS)
    sent = MICRO_BATCHES * (gathered + reduced) + 2 * numbers
    assert step.sent_bytes == pytest.approx(sent * (gpus - 1) / gpus)
    # Each rank holds only its shard of weights and moments.
    alone = simulate(*SMALL, CHECKPOINTED, gpus=1)
    assert step.held_bytes == pytest.approx(3 * 4 * (BLOCKS + OUTER) / gpus, rel=0.1)
    assert step.peak_bytes < alone.peak_bytes


def test_replicas_reduce_their_gradients_once_per_step():
    gpus = 8
    # Use few tokens, because this runs on a CPU that may emulate bf16.
    step = simulate(*SMALL, "context=4", "micro_batch=1", gpus=gpus)
    gradients = 4 * (BLOCKS + OUTER)
    numbers = 8  # the signal code
    assert step.sent_bytes == pytest.approx(2 * (gradients + numbers) * (gpus - 1) / gpus)
    assert step.calls.keys() == {"allreduce"}


# Compilation on one rank with real collectives. Graphs run without code generation.


@contextmanager
def lone_rank() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def drawn_gradients(
    monkeypatch, settings: Settings, is_compiled: bool
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients for two texts with random weights, and the number of graphs."""
    ranks = Ranks(0, 1 if settings.sharded else 2, torch.device("cpu"))
    loss_module, parallel = build_parallel(settings, ranks, torch.float32, bos=0)
    drawn = dict(redraw(build_model(settings.model, "cpu", seed=None)).named_parameters())
    with torch.no_grad():
        for name, parameter in loss_module.model.named_parameters():
            parameter.copy_(shard_like(drawn[name], parameter))

    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    if is_compiled:
        compile_module = torch.nn.Module.compile
        monkeypatch.setattr(
            torch.nn.Module,
            "compile",
            lambda self, **options: compile_module(self, **options, backend=count, fullgraph=True),
        )
        # As on a GPU: the whole loss is one graph, which DDP splits at its buckets.
        compile_model(loss_module, settings, replace(ranks, device=torch.device("cuda")))
        if not settings.sharded:
            assert parallel.bucket_bytes_cap == BUCKET_MIB * 2**20
            parallel.bucket_bytes_cap = 2**16  # several graphs, even for this small model
    tokens = torch.randint(1, 128, (2, 65), generator=torch.Generator().manual_seed(1))
    tokens[:, 20] = 0
    objective, _ = parallel(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    objective.backward()
    gradients = {}
    for name, parameter in loss_module.model.named_parameters():
        gradients[name] = full_tensor(parameter.grad).clone()
    return gradients, len(graphs)


@pytest.mark.parametrize(("sharded", "num_graphs"), [("false", range(3, 99)), ("true", (3,))])
def test_compiled_ranks_compute_the_same_gradients_as_eager_ranks(monkeypatch, sharded, num_graphs):
    """DDPOptimizer splits the loss at buckets; FSDP's blocks and loss are compiled separately.

    With FSDP, the first block, the other blocks and the loss are one graph each.
    """
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 2**16)
    words = ("attention=gqa", "model.depth=3", "data.vocab_size=128", "context=64")
    settings = settings_of("model=tiny", *words, f"sharded={sharded}")
    # An earlier test in which compilation failed may have disabled it in this process.
    with lone_rank(), torch.compiler.set_stance("default"):
        expected, _ = drawn_gradients(monkeypatch, settings, is_compiled=False)
        found, count = drawn_gradients(monkeypatch, settings, is_compiled=True)
    assert count in num_graphs
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
