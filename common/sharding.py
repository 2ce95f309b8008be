"""Tensors that may be spread over processes (DTensor)."""

import torch.distributed as dist
from torch import Tensor


def is_sharded(x: Tensor) -> bool:
    if not dist.is_available() or not dist.is_initialized():  # the next line takes time
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def full_tensor(x: Tensor) -> Tensor:
    """All of it; every process calls."""
    return x.full_tensor() if is_sharded(x) else x


def local_shard(x: Tensor) -> Tensor:
    """This process's part of it, in the same memory."""
    return x.to_local() if is_sharded(x) else x


def shard_like(x: Tensor, target: Tensor) -> Tensor:
    """x, spread as `target` is; every process has all of it, and keeps its own part."""
    if not is_sharded(target):
        return x.to(target.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        x.to(target.device), target.device_mesh, target.placements, src_data_rank=None
    )
