"""The memory of a training step, as an independent tracker counts it, and the micro-batch by it."""

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from run import config
from run.distributed import DistEnv
from run.instantiate import instantiate
from tests.conftest import SHORT, TINY, settings_of
from training import loss, memory
from training.loss import LanguageModelLoss
from training.memory import TrainingMemory, choose_micro_batch, fit_micro_batch, measure_memory
from training.parallel import checkpoint_activations

GB = 10**9
LARGE = ("model=124m", "data.vocab_size=32768", "context=1024", "batch_tokens=524288")
SMALL = ("model=15m", "model.depth=3", "data.vocab_size=4096", "context=256")


def tracked_peak(settings: dict, sequences: int) -> int:
    """The most bytes in use during two steps of two micro-batches, as torch's MemTracker counts."""
    with FakeTensorMode():
        model = instantiate(settings["model"])
        if settings["activation_checkpointing"]:
            checkpoint_activations(model)
        optimizers = instantiate(settings["optimizer"], "training")(model)
        loss_module = LanguageModelLoss(model, z_loss=0.0, bos=None)
        tokens = torch.zeros(sequences, settings["context"], dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(model, *optimizers)
        with tracker:
            for step in range(4):
                tracker.reset_mod_stats()
                with torch.autocast("cpu", torch.bfloat16):
                    nats, _ = loss_module(tokens, tokens)
                nats.backward()
                if step % 2:
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize(
    "sequences, words",
    [
        (8, ()),
        (48, ("attention=mla", "optimizer=adamw")),
        (8, ("attention=delta", "model.depth=4")),
        (8, ("activation_checkpointing=true",)),
        (48, ("activation_checkpointing=true",)),
        (8, ("model.tied=false", "data.vocab_size=16384", "optimizer=lion")),
    ],
)
def test_the_peak_of_a_step_is_the_trackers(monkeypatch, words, sequences):
    for device_type in ("cpu", "cuda"):
        monkeypatch.setitem(loss.MAX_LOGITS, device_type, 2**22)  # several chunks of logits
    settings = settings_of(*SMALL, *words)
    is_checkpointed = settings["activation_checkpointing"]
    peak = TrainingMemory(settings).peak(sequences, is_checkpointed=is_checkpointed)
    assert peak == pytest.approx(tracked_peak(settings, sequences), rel=0.1)


@pytest.fixture(scope="module")
def large() -> TrainingMemory:
    return TrainingMemory(settings_of(*LARGE))


def fitted(memory: TrainingMemory, free_bytes: float, *words: str, world: int = 1) -> int:
    return fit_micro_batch(memory, settings_of(*LARGE, *words), world, False, free_bytes)


def test_more_memory_never_holds_fewer_sequences(large):
    sizes = [fitted(large, gigabytes * GB) for gigabytes in (0, 8, 16, 24, 40, 80, 141, 1000)]
    assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] == 512
    assert len(set(sizes)) >= 6


def test_a_micro_batch_fits_and_fills_a_batch_and_the_next_larger_would_not(large):
    for batch in (512, 480, 509):  # many divisors, other divisors, a prime number
        settings = settings_of(*LARGE[:3], f"batch_tokens={batch * 1024}")
        size = fit_micro_batch(large, settings, 1, False, 40 * GB)
        larger = min(n for n in range(size + 1, batch + 1) if batch % n == 0)
        room = (1 - memory.MARGIN) * 40 * GB
        assert batch % size == 0 and large.peak(size) <= room < large.peak(larger)


def test_80_gb_fill_the_size_of_gpt2(large):
    assert fitted(large, 80 * GB) == 64
    assert fit_micro_batch(large, settings_of(*LARGE), 1, True, 80 * GB) == 128
    assert fitted(large, 80 * GB, "activation_checkpointing=true") == 512
    assert fitted(large, 80 * GB, world=64) == 8  # the whole batch of a process


def test_shards_leave_room_for_more_sequences():
    words = ("model=1b", "data.vocab_size=32768", "context=2048", "batch_tokens=983040")
    one_b = TrainingMemory(settings_of(*words))
    sizes = []
    for sharded in ("false", "true"):
        settings = settings_of(*words, f"sharded={sharded}")
        sizes.append(fit_micro_batch(one_b, settings, 8, False, 80 * GB))
    assert sizes == [6, 10]


def test_what_is_kept_depends_on_precision_and_documents():
    plain = TrainingMemory(settings_of(*SMALL))
    exact = TrainingMemory(settings_of(*SMALL), torch.float32)
    masked = TrainingMemory(settings_of(*SMALL, "document_mask=true"))
    assert plain.sequence_bytes < masked.sequence_bytes < exact.sequence_bytes
    assert exact.weight_copies < plain.weight_copies


def test_a_gpu_decides_by_its_free_memory_and_a_cpu_takes_eight(monkeypatch):
    settings = settings_of(*SMALL, "batch_tokens=65536", "compile=false")
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert measure_memory(settings, cpu, torch.bfloat16) is None
    assert choose_micro_batch(None, settings, DistEnv(0, 1, cpu)) == 8
    assert measure_memory(settings | {"micro_batch": 4}, gpu, torch.bfloat16) is None
    counted = measure_memory(settings, gpu, torch.bfloat16)
    pools = {"memory_reserved": 3 * GB, "memory_allocated": GB}  # of torch
    for name, value in pools.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    for free_bytes in (GB, 2 * GB):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, n=free_bytes: (n, 80 * GB))
        expected = fit_micro_batch(counted, settings, 1, False, free_bytes + 2 * GB)
        assert choose_micro_batch(counted, settings, DistEnv(0, 1, gpu)) == expected < 256


def test_all_ranks_take_what_fits_on_the_one_with_the_least_memory(monkeypatch):
    class Ranks(DistEnv):
        def all_reduce_max(self, number: int) -> int:
            return max(number, -2 * GB)  # another rank has 2 GB

    settings = settings_of(*SMALL, "batch_tokens=65536", "compile=false")
    counted = TrainingMemory(settings)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GB, 80 * GB))
    size = choose_micro_batch(counted, settings, Ranks(0, 2, torch.device("cuda")))
    assert size == fit_micro_batch(counted, settings, 2, False, 2 * GB) < 128


@pytest.mark.parametrize("micro, batch, expected", [("null", 20, 5), ("null", 13, 1), ("3", 2, 2)])
def test_a_chosen_micro_batch_of_a_cpu_divides_the_batch(micro, batch, expected):
    settings = settings_of(f"micro_batch={micro}", f"batch_tokens={batch * 256}")
    assert not config.find_problems(settings, 1)
    assert config.micro_batch_size(settings, 1) == expected


def test_a_resumed_run_keeps_the_micro_batch_it_had(command, story):
    words = (*TINY, *SHORT, "data=text", f"data.path={story}", "data.vocab_size=400")
    assert command("train.py", *words, "run_dir=run", "micro_batch=2").code == 0
    result = command("train.py", *words, "run_dir=run", "steps=6", "resume=true")
    assert result.code == 0 and "micro_batch=2, as before" in result.err, result.err
    saved = json.loads(Path("run/checkpoints/step-00000006/config.json").read_text())
    assert saved["micro_batch"] is None and saved["machine"]["micro_batch"] == 2
