"""The processes of one run: a single process, or the processes that torchrun starts."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from run import errors
from run.sharding import full_tensor


@dataclass(frozen=True)
class DistEnv:
    """The rank and device of this process, and collectives, which all ranks call together."""

    rank: int
    world_size: int
    device: torch.device

    def __post_init__(self):
        assert 0 <= self.rank < self.world_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

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
        """Run action(*arguments) on rank 0, and return its pickled result on all ranks.

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


def init_distributed(device: torch.device) -> DistEnv:
    """Join the process group that torchrun describes in the environment, if any; else run alone.

    Raises ValueError if torchrun started more processes than this machine has GPUs, or if the
    device is MPS, which torch.distributed does not support.
    """
    if "RANK" not in os.environ:
        return DistEnv(0, 1, device)
    if device.type == "mps":
        raise ValueError(
            "torchrun cannot train on MPS. fix: run train.py without torchrun, or use device=cpu"
        )
    backend = "gloo"
    if device.type == "cuda":
        num_gpus = torch.cuda.device_count()
        num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if num_processes > num_gpus:
            raise ValueError(
                f"torchrun started {num_processes} processes, but this machine has {num_gpus} "
                f"GPU(s). fix: torchrun --nproc_per_node={num_gpus}"
            )
        backend = "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    return DistEnv(dist.get_rank(), dist.get_world_size(), device)


@contextmanager
def hard_exit(is_needed: bool = True) -> Iterator[None]:
    """If `is_needed`, exit through os._exit, with the exit code that the process would have had."""
    if not is_needed:
        yield
        return
    exit_code = errors.BUG
    try:
        yield
        exit_code = 0
    except SystemExit as exit_request:
        exit_code = exit_request.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
