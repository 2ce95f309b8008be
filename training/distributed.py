"""The processes of one run: one, or those that torchrun starts."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from common import errors
from common.sharding import full_tensor


@dataclass(frozen=True)
class DistEnv:
    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, number: float) -> float:
        """The sum over all ranks."""
        if self.world_size == 1:
            return number
        x = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(x)
        return x.item()

    def all_reduce_min_(self, x: Tensor) -> None:
        """Makes a number on the device the smallest of all ranks."""
        if self.world_size > 1:
            dist.all_reduce(x, dist.ReduceOp.MIN)

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def all_reduce_max(self, number: int) -> int:
        """The largest of all ranks; the hosts wait for each other, the devices for nobody."""
        if self.world_size == 1:
            return number
        x = torch.tensor(number)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x.item()

    def gather_to_rank0(self, x: Tensor) -> Tensor | None:
        """All of what may be spread, on the first process's CPU."""
        x = full_tensor(x)
        return x.cpu() if self.is_main else None

    def on_rank0(self, action: Callable):
        """What `action` gives on the first rank, on all of them; where it ends the process there, all end."""
        said = [None, 0]
        if self.is_main:
            try:
                with errors.report_errors():
                    said[0] = action()
            except SystemExit as end:
                said[1] = end.code
        if self.world_size > 1:
            dist.broadcast_object_list(said)
        if said[1]:
            raise SystemExit(said[1])
        return said[0]


def init_distributed(device: torch.device) -> DistEnv:
    """Join the process group that torchrun describes, if there is one."""
    if "RANK" not in os.environ:
        return DistEnv(0, 1, device)
    if device.type == "cuda":
        local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= there:
            raise ValueError(
                f"more processes than GPUs (process {local + 1} of {there} GPUs). fix: --nproc_per_node={there}"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return DistEnv(dist.get_rank(), dist.get_world_size(), device)


@contextmanager
def hard_exit_on_error() -> Iterator[None]:
    """Around a whole process: one that had a group goes without destructors, for gloo's can wait for ever there."""
    code = errors.BUG
    try:
        yield
        code = 0
    except SystemExit as end:
        code = end.code or 0
        raise
    except BaseException:
        if "RANK" in os.environ:
            traceback.print_exc()
        raise
    finally:
        if "RANK" in os.environ:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
