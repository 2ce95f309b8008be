"""Prepare a model for training: activation checkpointing, FSDP2, DDP and torch.compile."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from model.build import build_model
from model.init import initial_values
from run import compilation
from run.distributed import Ranks, shard_like
from run.settings import Settings
from training.loss import LanguageModelLoss

# DDP sends gradients in buckets of this size. On a GPU, torch.compile splits the step into about
# one graph per bucket: with torch's default of 25 MiB, 90 graphs for `model=1b`. Up to 26 million
# parameters fit in one bucket, which is sent only after the backward pass.
BUCKET_MIB = 100


def build_parallel(
    settings: Settings, ranks: Ranks, precision: torch.dtype, *, bos: int | None
) -> tuple[LanguageModelLoss, nn.Module]:
    """Return the loss module of a model with initial weights, and the module that a step calls.

    The two are the same module, unless DDP wraps the first. If `bos` is a token, it begins each
    document, and tokens do not attend to other documents.
    """
    # A model to be sharded is built on the meta device, because it may not fit on one device.
    device = "meta" if settings.sharded else ranks.device
    model = build_model(settings.model, device, seed=None)
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    if settings.sharded:
        shard(model, ranks, precision)
        model.to_empty(device=ranks.device)
        # `to_empty` lost the values of buffers, so copy them from an unsharded model, whose
        # parameters are never touched and therefore take no memory.
        buffers = dict(build_model(settings.model, seed=None).named_buffers())
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    with torch.no_grad():
        for parameter, value in initial_values(model, settings.seed):
            parameter.copy_(shard_like(value, parameter))
    loss_module = LanguageModelLoss(model, z_loss=settings.z_loss, bos=bos)
    parallel = loss_module
    if ranks.world_size > 1 and not settings.sharded:
        parallel = DistributedDataParallel(
            loss_module, bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True
        )
    return loss_module, parallel


def checkpoint_activations(model: nn.Module) -> None:
    """Keep only the input of each block; the backward pass reruns the block. Chen, 1604.06174."""
    # Tensors shared by layers (masks, rotary tables) are built once, not again in the backward.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for block in model.blocks:
        block.forward = checkpointed(block.forward)


# torch's checkpoint_wrapper compiles to the same graphs, but adds a prefix to the parameter names,
# which seed the initial values and key the saved optimizer state.
def checkpointed(forward: Callable) -> Callable:
    """Wrap `forward` so that the backward pass recomputes it."""

    # torch.compile would skip a separately compiled block whose forward is `checkpoint` itself.
    def recomputed(*args):
        return checkpoint(forward, *args, use_reentrant=False)

    return recomputed


def shard(model: nn.Module, ranks: Ranks, precision: torch.dtype) -> None:
    """Shard weights, gradients and optimizer state over all ranks. FSDP: Zhao, 2304.11277.

    A block is gathered, in `precision`, only while it computes; gradients are reduced in fp32.
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
    # Embedding, head and final norm stay in fp32. The loss calls `hidden_states`, not `forward`.
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "hidden_states")


def compile_model(loss_module: LanguageModelLoss, settings: Settings, ranks: Ranks) -> None:
    """Let torch.compile compile the training step when it first runs."""
    # FSDP gathers weights before each block, so blocks and loss are compiled separately. On a CPU,
    # separate compilation takes a third less time, because most blocks share their code.
    modules = [loss_module]
    if settings.sharded or ranks.device.type == "cpu":
        modules = [*loss_module.model.blocks, loss_module.head_loss]
    compilation.prepare_to_compile()
    configure_compiler()
    for module in modules:
        module.compile(dynamic=False)


def configure_compiler() -> None:
    """Configure how torch.compile traces a training step in this process."""
    # Blocks share their code but not their constants, so each block counts as a recompilation.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.trace_autograd_ops = True  # for a forward pass that computes gradients
    # The backward pass runs outside autocast, so that values computed in fp32 have fp32 gradients.
    torch._functorch.config.backward_pass_autocast = "off"
    # Also cache graphs that contain autograd functions, which attention and loss use. The cache key
    # includes the code of their forward and backward, with all constants.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
