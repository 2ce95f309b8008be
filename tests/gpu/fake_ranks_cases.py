"""Many GPUs without one: what a rank holds and sends."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model.build import build_model
from tests.conftest import settings_of
from tests.gpu.fake_ranks import MICRO_BATCHES, RankMonitor, process_group, simulate

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


def test_a_sharded_step_sends_blocks_twice_and_gradients_once_a_micro_batch():
    gpus = 8
    step = simulate(*SMALL, "sharded=true", CHECKPOINTED, gpus=gpus)
    # Embedding, head and norm stay whole from forward to backward. All ranks reduce the norms of
    # the gradients.
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
    # It holds its share of weights and moments, and less than a copy would.
    alone = simulate(*SMALL, CHECKPOINTED, gpus=1)
    assert step.held_bytes == pytest.approx(3 * 4 * (BLOCKS + OUTER) / gpus, rel=0.1)
    assert step.peak_bytes < alone.peak_bytes


def test_copies_send_their_gradients_once_a_step():
    gpus = 8
    # Numbers are computed here, on a CPU that may emulate bf16: of few tokens.
    step = simulate(*SMALL, "context=4", "micro_batch=1", gpus=gpus)
    gradients = 4 * (BLOCKS + OUTER)
    numbers = 8  # a signal's code
    assert step.sent_bytes == pytest.approx(2 * (gradients + numbers) * (gpus - 1) / gpus)
    assert step.calls.keys() == {"allreduce"}


def test_memory_is_counted_until_it_is_freed():
    with FakeTensorMode(), RankMonitor(1, torch.device("cpu")) as monitor:
        x = torch.zeros(1000)
        y = x.view(10, 100)  # of the same memory
        assert monitor.live_bytes == 4000
        del x
        z = y + 1
        assert monitor.live_bytes == 8000
        z.untyped_storage().resize_(0)
        assert (monitor.live_bytes, monitor.peak_bytes) == (4000, 8000)
        del y
        assert monitor.live_bytes == 0


@pytest.mark.parametrize(("name", "rounds"), [("all_reduce", 2), ("broadcast", 1)])
def test_a_collective_sends_all_but_one_part_around_the_ring(name, rounds):
    with process_group(4), RankMonitor(4, torch.device("cpu")) as monitor:
        x = torch.zeros(100)
        arguments = (0,) if name == "broadcast" else ()
        getattr(torch.distributed, name)(x, *arguments)
    assert monitor.sent_bytes == rounds * 400 * 3 / 4
