"""Functions for plain tensors and for tensors that FSDP shards over processes (DTensor)."""

import torch.distributed as dist
from torch import Tensor


def is_sharded(x: Tensor) -> bool:
    """Return whether x is a DTensor."""
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
