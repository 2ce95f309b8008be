"""A model made parallel: DDP, FSDP2, activation checkpointing."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from common.sharding import shard_like
from model.init import initialize
from model.materialize import build_model, materialize
from training.distributed import DistEnv
from training.loss import LanguageModelLoss


def shard(model: nn.Module, ranks: DistEnv, precision: torch.dtype) -> None:
    """Spreads weights, gradients and the optimizers' state over all processes; a block is whole only while it computes,
    in the precision of its products. FSDP: Zhao et al., 2304.11277.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy(precision, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "hidden")


def checkpointed(forward: Callable) -> Callable:
    def again(
        *args,
    ):  # compiled by itself, this is what the compiler sees; `checkpoint` alone it would leave out
        return checkpoint(forward, *args, use_reentrant=False)

    return again


def build_parallel(
    settings: dict, bos: int | None, ranks: DistEnv, precision: torch.dtype
) -> tuple[LanguageModelLoss, nn.Module]:
    """The objective of a model at its first step, and what makes it parallel.

    With `activation_checkpointing`, a block keeps its input alone and computes the rest again. Chen et al., 1604.06174.
    """
    model = build_model(settings["model"])
    if settings["activation_checkpointing"]:
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = (
            True  # what layers share is made once
        )
        for block in model.blocks:
            block.forward = checkpointed(block.forward)
    if settings["sharded"]:
        shard(model, ranks, precision)
    initialize(materialize(model, ranks.device), settings["seed"], shard_like)
    objective = LanguageModelLoss(model, z_loss=settings["z_loss"], bos=bos)
    alone = ranks.world_size == 1 or settings["sharded"]
    return objective, objective if alone else DistributedDataParallel(
        objective, gradient_as_bucket_view=True
    )
