"""The micro-batch divides the batch, and on a GPU it fits in the measured memory."""

from types import SimpleNamespace

import pytest
import torch

from run.distributed import Ranks
from tests.conftest import settings_of
from train import take_step
from training.memory import choose_micro_batch

GB = 10**9
WEIGHTS = 10**6  # number of weights of the model below


class FakeGPU:
    """A GPU on which a step needs memory for the weights, and `sequence_bytes` per sequence."""

    def __init__(self, monkeypatch, free_bytes: int, sequence_bytes: int):
        self.sequence_bytes = sequence_bytes
        self.free_bytes = free_bytes
        self.peak = 0
        self.measured = []
        functions = {
            "reset_peak_memory_stats": lambda device: None,
            "max_memory_allocated": lambda device: self.peak,
            "memory_allocated": lambda device: 8 * WEIGHTS,
            "memory_reserved": lambda device: 2 * GB,
            "mem_get_info": lambda device: (free_bytes - 2 * GB, free_bytes),
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def accumulate(self, step: int, rows: slice, *, is_last: bool) -> None:
        if rows.stop * self.sequence_bytes > self.free_bytes:
            raise torch.OutOfMemoryError
        self.measured.append(rows.stop)
        self.peak = 8 * WEIGHTS + rows.stop * self.sequence_bytes


def chosen(gpu: FakeGPU | None, ranks: Ranks, *words: str) -> int:
    settings = settings_of("context=256", *words)
    model = torch.nn.Linear(1000, 1000, bias=False)
    accumulate = None if gpu is None else gpu.accumulate
    trainer = SimpleNamespace(ranks=ranks, model=model, accumulate=accumulate)
    return choose_micro_batch(trainer, settings)


def test_the_micro_batch_fills_the_memory_and_divides_the_batch(monkeypatch):
    cuda = Ranks(0, 1, torch.device("cuda"))
    for batch in (512, 480, 509):  # many divisors, few divisors, a prime number
        sizes = []
        for free_bytes in (2 * GB, 8 * GB, 40 * GB, 1000 * GB):
            gpu = FakeGPU(monkeypatch, free_bytes, sequence_bytes=GB // 4)
            size = chosen(gpu, cuda, f"batch_tokens={batch * 256}")
            # Weights, gradients, two values per weight in the optimizer, and a margin of 10 %.
            room = 0.9 * free_bytes - 16 * WEIGHTS
            larger = min((n for n in range(size + 1, batch + 1) if batch % n == 0), default=10**6)
            assert batch % size == 0 and size * GB // 4 <= room < larger * GB // 4
            sizes.append(size)
        assert sizes == sorted(sizes) and sizes[-1] == batch
        assert gpu.measured == [1, 1, 2]


def test_the_micro_batch_is_one_sequence_if_two_do_not_fit(monkeypatch):
    gpu = FakeGPU(monkeypatch, 8 * GB, sequence_bytes=5 * GB)
    assert chosen(gpu, Ranks(0, 1, torch.device("cuda")), "batch_tokens=1024") == 1
    assert gpu.measured == [1, 1]


# Whether the other rank can measure two sequences, and how many fit into its memory.
@pytest.mark.parametrize(("other", "measured"), [((0, 1), [1, 1]), ((1, 3), [1, 1, 2])])
def test_ranks_use_the_sizes_of_the_rank_with_the_least_memory(monkeypatch, other, measured):
    """Ranks of a sharded forward wait for each other, so all must measure the same sizes."""
    others = iter(other)
    monkeypatch.setattr(Ranks, "all_reduce_min", lambda self, number: min(number, next(others)))
    gpu = FakeGPU(monkeypatch, 80 * GB, sequence_bytes=GB)
    assert chosen(gpu, Ranks(0, 2, torch.device("cuda")), "batch_tokens=6144") == other[1]
    assert gpu.measured == measured


@pytest.mark.parametrize(
    "micro, batch, expected", [("null", 20, 5), ("null", 13, 1), ("null", 64, 8), ("3", 2, 2)]
)
def test_the_micro_batch_on_a_cpu_divides_the_batch(micro, batch, expected):
    words = (f"micro_batch={micro}", f"batch_tokens={batch * 256}")
    cpu = Ranks(0, 1, torch.device("cpu"))
    settings_of(*words, "context=256").check_combinations(1)
    assert chosen(None, cpu, *words) == expected


def test_a_resumed_run_keeps_its_micro_batch(run_of):
    run = run_of("micro_batch=2", folder="run")
    take_step(run)
    run.checkpointer.save(run.progress)
    assert run_of("micro_batch=null", "resume=true", folder="run").micro_batch_size == 2
