"""Tensors that may be spread over processes (DTensor)."""

import torch.distributed as dist
from torch import Tensor


def is_shard(x: Tensor) -> bool:
    if not dist.is_available() or not dist.is_initialized():  # the next line takes time
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def full_tensor(x: Tensor) -> Tensor:
    """All of it; every process calls."""
    return x.full_tensor() if is_shard(x) else x


def local(x: Tensor) -> Tensor:
    """This process's part of it, in the same memory."""
    return x.to_local() if is_shard(x) else x


def distribute(x: Tensor, target: Tensor) -> Tensor:
    """x, spread as `target` is; every process has all of it, and keeps its own part."""
    if not is_shard(target):
        return x.to(target.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
