"""The processes of one run: one, or those that torchrun starts."""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, number: float) -> float:
        """The sum over all ranks."""
        if self.world == 1:
            return number
        x = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(x)
        return x.item()

    def agree(self, thing):
        """What the first rank says, on all of them."""
        said = [thing]
        if self.world > 1:
            dist.broadcast_object_list(said)
        return said[0]


def join(device: torch.device) -> Ranks:
    """Join the process group that torchrun describes, if there is one."""
    if "RANK" not in os.environ:
        return Ranks(0, 1, device)
    if device.type == "cuda":
        local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= there:
            raise ValueError(
                f"more processes than GPUs (process {local + 1} of {there} GPUs). fix: --nproc_per_node={there}"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


KEPT = []  # what holds on to a process group that has ended


def leave(*holders: object) -> None:
    """End the process group together. What used it is kept until `end`: gloo's destructor can wait for ever there."""
    if dist.is_initialized():
        KEPT.extend(holders)
        dist.barrier()
        dist.destroy_process_group()


def end() -> None:
    """The last words of a process that had a group: it goes without destructors."""
    if KEPT:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
