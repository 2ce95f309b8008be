"""Simulate training on many GPUs: the memory of one rank and the bytes that it sends per step.

    python -m tests.gpu.fake_ranks 8 model=350m sharded=true micro_batch=4

prints both for one of eight GPUs; the overrides are the same as for train.py.

A rank is a process whose tensors have no values (tests/gpu/fake_cuda.py), in a process group that
sends nothing (torch's "fake" backend). It runs the Trainer, so tensors and collectives have the
sizes and the order of a real run without torch.compile. NCCL and cuBLAS buffers and allocator
fragmentation are not included. RMSNorm is decomposed into operations that keep one more fp32 tensor
than the fused GPU kernel.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.loader import Loader
from run.distributed import Ranks
from run.signals import Signals
from tests.conftest import settings_of
from tests.gpu.fake_cuda import fake_cuda
from training.clock import Clock
from training.environment import Environment
from training.steps import Progress
from training.trainer import Trainer

MICRO_BATCHES = 2  # per rank and step, so that gradients exist when the last forward begins


@dataclass
class Step:
    """The memory and communication of a training step on one rank."""

    held_bytes: int  # tensors on the device between two steps
    peak_bytes: int
    calls: Counter[str]  # number of collectives of each kind on device tensors
    sent_bytes: float  # by these collectives, with ring algorithms

    def __str__(self) -> str:
        return (
            f"memory: {self.peak_bytes / 1e9:.1f} GB at the peak, {self.held_bytes / 1e9:.1f} GB "
            f"between steps; each step: {self.calls.total()} collectives, which send "
            f"{self.sent_bytes / 1e9:.1f} GB"
        )


class RankMonitor(TorchDispatchMode):
    """Counts the current and peak bytes of device storages, and collectives."""

    def __init__(self, world_size: int, device: torch.device):
        super().__init__()
        self.world_size = world_size
        self.device = device
        self.sizes: dict[int, int] = {}  # bytes of each storage by address
        self.live_bytes = 0
        self.reset()

    def reset(self) -> None:
        """Start counting a new step."""
        self.peak_bytes = self.live_bytes
        self.calls: Counter[str] = Counter()
        self.sent_bytes = 0.0

    def __enter__(self):
        self.mode = active_fake_mode()
        # FSDP frees memory by resizing the storages of tensors, which dispatches no operation.
        self.resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            self.resize(storage, size)
            if storage._cdata in self.sizes:
                self.count(storage)

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Operations on a DTensor arrive here again for its local tensors.
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        # DTensor infers layouts by running operations in a different fake mode.
        if active_fake_mode() is not self.mode:
            return result
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.device == self.device:
                self.count(x.untyped_storage())
        if func.namespace in ("c10d", "_c10d_functional"):
            self.record_collective(func.name(), tree_leaves((args, kwargs)))
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        """Record the current size of a storage."""
        address = storage._cdata
        if address not in self.sizes:
            self.sizes[address] = 0
            weakref.finalize(storage, self.forget, address)
        self.live_bytes += storage.nbytes() - self.sizes[address]
        self.sizes[address] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def forget(self, address: int) -> None:
        self.live_bytes -= self.sizes.pop(address)

    def record_collective(self, name: str, arguments: list) -> None:
        """Count a collective and the bytes that a rank sends in a ring: all parts except one."""
        sizes = [x.nbytes for x in arguments if isinstance(x, Tensor) and x.device == self.device]
        name = name.partition(".")[0].replace("_", "")
        kinds = {"allgather": 1, "reducescatter": 1, "allreduce": 2, "broadcast": 1}
        for kind, rounds in kinds.items():
            if kind in name and sizes:
                # Gathers and scatters have a tensor per part; others only have the whole tensor.
                part = min(sizes)
                if kind in ("allreduce", "broadcast"):
                    part = sum(sizes) / self.world_size
                self.calls[kind] += 1
                self.sent_bytes += rounds * part * (self.world_size - 1)


@contextmanager
def process_group(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of `world_size` ranks; the other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Stream:
    """A stream or an event that never waits."""

    def __init__(self, *args, **kwargs):
        pass

    def wait(self, *args) -> None:
        pass

    def record_event(self, *args) -> "Stream":
        return Stream()

    wait_event = wait_stream = record = synchronize = wait


def flash_attention(q, k, v, *, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """Call FlashAttention directly; F.scaled_dot_product_attention would query the device."""
    assert attn_mask is None
    operation = torch.ops.aten._scaled_dot_product_flash_attention
    return operation(q, k, v, dropout_p, is_causal, scale=scale)[0]


def all_reduce(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Like DDP's all-reduce, but without waiting for a result, which the fake group lacks."""
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@cache
def register_silu_backward() -> torch.library.Library:
    """Register a kernel of silu_backward for the device; it is never called.

    A build of torch without CUDA has no such kernel and would decompose the operation.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("silu_backward", lambda grad, x: torch.empty_like(x), "CUDA")
    return library


@contextmanager
def gpu_of_a_rank() -> Iterator[None]:
    """Simulate a GPU with streams and FlashAttention."""
    answers = {
        "torch.cuda.Stream": Stream,
        "torch.cuda.Event": Stream,
        "torch.cuda.current_stream": Stream,
        "torch.cuda.stream": lambda stream: nullcontext(),
        "torch.nn.functional.scaled_dot_product_attention": flash_attention,
    }
    register_silu_backward()
    with ExitStack() as stack:
        stack.enter_context(fake_cuda())
        for name, answer in answers.items():
            stack.enter_context(patch(name, answer))
        yield


def simulate(*overrides: str, gpus: int) -> Step:
    """Simulate one bf16 training step with these overrides for train.py, on one of `gpus` GPUs.

    DDP needs timers, which a fake GPU lacks. Therefore, several GPUs without sharded=true are
    replaced by CPUs, which compute real values.
    """
    settings = settings_of(*overrides, "precision=bf16")
    context = settings.context
    batch_size = MICRO_BATCHES * settings.micro_batch * gpus
    settings.batch_tokens = context * batch_size
    settings.model["vocab_size"] = settings.data["vocab_size"]
    text = [np.zeros(context * (batch_size + 2), np.uint16)]
    loader = Loader(text, context=context, batch_size=batch_size, seed=0)

    with ExitStack() as stack:
        device = torch.device("cpu")
        if gpus > 1:
            stack.enter_context(process_group(gpus))
        if gpus == 1 or settings.sharded:
            device = torch.device("cuda", 0)
            stack.enter_context(gpu_of_a_rank())
            # Sampling initial values on the CPU would take minutes.
            stack.enter_context(patch("training.parallel.initial_values", lambda *args: []))
        monitor = stack.enter_context(RankMonitor(gpus, device))
        corpus = SimpleNamespace(tokenizer=SimpleNamespace(bos=1))
        ranks = Ranks(0, gpus, device)
        env = Environment(settings, corpus, loader, Path(), ranks, Signals(), Clock(0.0))
        trainer = Trainer(env, is_compiled=False)
        if trainer.parallel is not trainer.loss_module:
            trainer.parallel.register_comm_hook(None, all_reduce)
        # The first step creates the optimizer state, and the second creates DDP's final buckets.
        progress = Progress()
        trainer.step(progress, settings.micro_batch)
        trainer.step(progress, settings.micro_batch)
        monitor.reset()
        held_bytes = monitor.live_bytes
        trainer.step(progress, settings.micro_batch)
    return Step(held_bytes, monitor.peak_bytes, monitor.calls, monitor.sent_bytes)


if __name__ == "__main__":
    num_gpus, *words = sys.argv[1:]
    print(simulate(*words, gpus=int(num_gpus)))
