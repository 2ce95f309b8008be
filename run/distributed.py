"""The processes of one run: a single process, or the processes that torchrun starts.

A tensor is whole, or FSDP shards it over the processes (DTensor).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from run import errors


@dataclass(frozen=True)
class Ranks:
    """The rank and device of this process, and collectives, which all ranks call together."""

    rank: int
    world_size: int
    device: torch.device

    def __post_init__(self):
        assert 0 <= self.rank < self.world_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def with_device(self, device: torch.device) -> "Ranks":
        """Return a copy with this device or, under torchrun on CUDA, this process's own GPU."""
        if device.type == "cuda" and "LOCAL_RANK" in os.environ:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        return replace(self, device=device)

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def all_reduce_max(self, number: int) -> int:
        """Return the maximum over all ranks, computed on the CPU to avoid synchronizing a GPU."""
        if self.world_size == 1:
            return number
        return self.all_reduce(torch.tensor(number), dist.ReduceOp.MAX).item()

    def all_reduce_min(self, number: int) -> int:
        """Return the minimum over all ranks, computed on the CPU."""
        return -self.all_reduce_max(-number)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
        """Reduce x over all ranks, in place, and return it."""
        if self.world_size > 1:
            dist.all_reduce(x, op)
        return x

    def gather_to_rank0(self, x: Tensor) -> Tensor | None:
        """Return all of x, sharded or plain, on the CPU of rank 0; None on the other ranks."""
        x = full_tensor(x)
        if not self.is_main:
            return None
        return x.cpu()

    def on_rank0(self, action: Callable, *arguments: object) -> object:
        """Run action(*arguments) on rank 0, and return its picklable result on all ranks.

        If `action` exits with an exit code, all ranks exit with the same code.
        """
        result = None
        exit_code = None  # the exit code, which may be 0, if `action` exits
        if self.is_main:
            try:
                with errors.report_errors():
                    result = action(*arguments)
            except SystemExit as exit_request:
                exit_code = exit_request.code
        if self.world_size > 1:
            message = [result, exit_code]
            dist.broadcast_object_list(message)
            result, exit_code = message
        if exit_code is not None:
            raise SystemExit(exit_code)
        return result


def init_distributed() -> Ranks:
    """Join the process group that torchrun describes in the environment, if any; else run alone.

    Until `with_device`, the device is the CPU.
    """
    cpu = torch.device("cpu")
    if "RANK" not in os.environ:
        return Ranks(0, 1, cpu)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), cpu)


def is_sharded(x: Tensor) -> bool:
    """Whether x is a DTensor."""
    # Importing DTensor is slow, and without a process group no DTensor exists.
    if not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def full_tensor(x: Tensor) -> Tensor:
    """Gather a sharded x from all ranks, which must all call this; return any other x unchanged."""
    if is_sharded(x):
        return x.full_tensor()
    return x


def shard_like(x: Tensor, target: Tensor) -> Tensor:
    """Move x to the device of `target`, and shard it like `target`. All ranks pass the whole x."""
    assert x.shape == target.shape
    x = x.to(target.device)
    if not is_sharded(target):
        return x
    from torch.distributed.tensor import distribute_tensor

    # Without a source rank, each rank takes its shard from its own x, and nothing is sent.
    return distribute_tensor(x, target.device_mesh, target.placements, src_data_rank=None)
