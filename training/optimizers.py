"""Muon, Lion, the optimizers that a config can choose, and their state by parameter name."""

from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from run.distributed import DistEnv
from run.errors import IntegrityError
from run.hardware import multiplies_bf16
from run.sharding import full_tensor, local_shard, shard_like

MAX_BATCHED_PARAMS = 2**28  # weights that Muon updates at a time
StateByName = dict[str, dict[str, object]]  # of each parameter, by the parameter's name
PLAIN = (Tensor, bool, int, float, str, type(None))  # types that a checkpoint can hold


class FoundInfOptimizer(Optimizer):
    """An optimizer whose step does nothing where `found_inf`, a number on the device, is 1.

    This is the convention of torch's fused optimizers: the host never waits to know whether the
    gradients are finite.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self.step_group(params, group)

    def momenta_and_grads(
        self, params: list[Tensor], key: str
    ) -> tuple[list[Tensor], list[Tensor], float | Tensor]:
        """Momenta (state `key`, zeros at first) and gradients of the parameters; a factor of lr.

        Where `found_inf` is 1, a step with these changes nothing: each gradient is overwritten by
        its momentum, so that interpolating the two keeps the momentum, and the factor is 0.
        """
        for p in params:
            if p not in self.state:
                self.state[p][key] = torch.zeros_like(p)
        momenta = [self.state[p][key] for p in params]
        grads = [p.grad for p in params]
        if self.found_inf is None:
            return momenta, grads, 1.0

        # Elementwise, so each rank works on its own shards.
        local_grads = [local_shard(grad) for grad in grads]
        local_momenta = [local_shard(momentum) for momentum in momenta]
        if self.found_inf.is_cuda:
            copy_all_where(self.found_inf.int(), local_momenta, local_grads)
        else:
            for grad, momentum in zip(local_grads, local_momenta, strict=True):
                torch.where(self.found_inf > 0, momentum, grad, out=grad)
        return momenta, grads, 1 - self.found_inf


def copy_all_where(condition: Tensor, sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy fp32 sources to targets if `condition`, an int32 on the device, is 1 and not 0.

    This takes three kernels; torch.where(condition, source, target) would take one for each pair.
    """
    # There is no _foreach_where. Here source * condition + target * (1 - condition) is computed on
    # the bits, read as integers, so that 0 times NaN is 0.
    source_bits = [source.view(torch.int32) for source in sources]
    target_bits = [target.view(torch.int32) for target in targets]
    torch._foreach_mul_(target_bits, 1 - condition)
    torch._foreach_add_(target_bits, torch._foreach_mul(source_bits, condition))


class Muon(FoundInfOptimizer):
    """Nesterov momentum whose update of each matrix is orthogonalized.

    Jordan, kellerjordan.github.io/posts/muon. Updates are scaled to the size of AdamW's, an RMS of
    0.2 (Liu, 2502.16982), so that `lr` and `weight_decay` mean the same for both.
    """

    def __init__(self, matrices: list[Tensor], *, lr: float, momentum: float, weight_decay: float):
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def step_group(self, params: list[Tensor], group: dict) -> None:
        # Not all at a time, so that the memory beside weights, momenta and gradients is bounded.
        batch_size = max(1, MAX_BATCHED_PARAMS // max(p.numel() for p in params))
        for start in range(0, len(params), batch_size):
            self.step_batch(params[start : start + batch_size], group)

    def step_batch(self, matrices: list[Tensor], group: dict) -> None:
        momenta, grads, lr_factor = self.momenta_and_grads(matrices, "momentum_buffer")
        lr = group["lr"] * lr_factor

        # Momentum, and Nesterov's look ahead of it, which overwrites the gradient.
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        torch._foreach_lerp_(grads, momenta, group["momentum"])
        torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])

        # Matrices of one shape, or of its transpose, are orthogonalized together, the tall ones last.
        by_shape = defaultdict(list)
        for p in sorted(matrices, key=is_tall):
            by_shape[tuple(sorted(p.shape))].append(p)
        ordered = []
        deltas = []
        for same_shape in by_shape.values():
            ordered += same_shape
            deltas += self.deltas(same_shape, lr)
        torch._foreach_add_(ordered, deltas)

    def deltas(self, matrices: list[Tensor], lr: float | Tensor) -> list[Tensor]:
        """Updates times -lr, of the wide matrices (R, C), R <= C, then of the tall ones (C, R)."""
        # Orthogonalize whole matrices, all laid on their side so that they stack.
        updates = torch.stack([to_wide(full_tensor(p.grad)) for p in matrices])
        updates = map_over_ranks(newton_schulz, updates).to(matrices[0].dtype)

        # An orthogonal matrix has an RMS of 1 / sqrt(its longer side).
        rms_scale = 0.2 * updates.shape[2] ** 0.5
        updates = updates * (-rms_scale * lr)

        # Strides like those of the weights let _foreach_add_ take all matrices in one kernel.
        num_tall = sum(map(is_tall, matrices))
        wide, tall = updates.tensor_split([len(matrices) - num_tall])
        deltas = [*wide, *tall.mT.clone(memory_format=torch.contiguous_format)]
        return [shard_like(delta, p) for delta, p in zip(deltas, matrices, strict=True)]


def is_tall(x: Tensor) -> bool:
    return x.shape[0] > x.shape[1]


def to_wide(x: Tensor) -> Tensor:
    """x (R, C), transposed where R > C."""
    return x.mT if is_tall(x) else x


def map_over_ranks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), where x (N, ...) is the same on all ranks: each computes a part of the N."""
    if not dist.is_initialized():
        return function(x)
    # All parts are equally long; where N is too short, the last parts repeat the first items.
    world_size = dist.get_world_size()
    part_size = -(-len(x) // world_size)
    first = dist.get_rank() * part_size
    indices = torch.arange(first, first + part_size, device=x.device) % len(x)
    part = function(x[indices])
    result = part.new_empty(part_size * world_size, *part.shape[1:])
    dist.all_gather(list(result.split(part_size)), part)
    return result[: len(x)]


def newton_schulz(x: Tensor) -> Tensor:
    """x (N, R, C) with R <= C -> its matrices with all singular values near 1.

    Five Newton-Schulz steps, in bf16 where that is fast: they need no more precision.
    """
    if multiplies_bf16(x.device):
        x = x.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        # x = a x + (b A + c A^2) x with A = x x^T, and Jordan's coefficients a, b, c.
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x


class Lion(FoundInfOptimizer):
    """Sign of an interpolated momentum. Chen, 2302.06675, Algorithm 2.

    update = sign(beta1 * momentum + (1 - beta1) * gradient)
    weight = weight - lr * (update + weight_decay * weight)
    momentum = beta2 * momentum + (1 - beta2) * gradient
    """

    def __init__(
        self,
        params: list[Tensor] | list[dict],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def step_group(self, params: list[Tensor], group: dict) -> None:
        momenta, grads, lr_factor = self.momenta_and_grads(params, "exp_avg")
        lr = group["lr"] * lr_factor
        # Every operation is elementwise, so each rank works on its own shards.
        momenta = [local_shard(momentum) for momentum in momenta]
        grads = [local_shard(grad) for grad in grads]
        params = [local_shard(p) for p in params]

        beta1, beta2 = group["betas"]
        updates = torch._foreach_lerp(momenta, grads, 1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(updates, -lr)
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, updates)
        torch._foreach_lerp_(momenta, grads, 1 - beta2)


def adamw(
    model: nn.Module, *, lr: float, betas: list[float], weight_decay: float
) -> list[Optimizer]:
    """AdamW with decay on matrices only. Loshchilov, 1711.05101."""
    check_betas(betas)
    groups = decay_groups(model, weight_decay)
    return [AdamW(groups, lr=lr, betas=tuple(betas), fused=True)]


def lion(
    model: nn.Module, *, lr: float, betas: list[float], weight_decay: float
) -> list[Optimizer]:
    """Lion with decay on matrices only."""
    check_betas(betas)
    groups = decay_groups(model, weight_decay)
    return [Lion(groups, lr=lr, betas=tuple(betas), weight_decay=weight_decay)]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Groups of a model's matrices, with `weight_decay`, and of its other parameters, without."""
    matrices, vectors = split_parameters(model)
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def split_parameters(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices of a model, and its other parameters."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    return matrices, vectors


def muon(
    model: nn.Module,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    embedding_lr: float,
    betas: list[float],
) -> list[Optimizer]:
    """Muon for matrices inside the blocks, AdamW without decay for embedding, head and vectors."""
    check_betas(betas)
    if momentum >= 1:
        raise ValueError(
            f"optimizer.momentum must be below 1 (got {momentum}). fix: optimizer.momentum=0.85"
        )
    matrices, vectors = split_parameters(model)
    in_blocks = set(model.blocks.parameters())
    hidden = [p for p in matrices if p in in_blocks]
    embeddings = [p for p in matrices if p not in in_blocks]
    groups = [{"params": embeddings, "lr": embedding_lr}, {"params": vectors}]
    return [
        Muon(hidden, lr=lr, momentum=momentum, weight_decay=weight_decay),
        AdamW(groups, lr=lr, betas=tuple(betas), weight_decay=0.0, fused=True),
    ]


def check_betas(betas: list[float]) -> None:
    if len(betas) != 2 or max(betas) >= 1:
        raise ValueError(
            f"optimizer.betas must be two numbers below 1 (got {betas}). "
            "fix: optimizer.betas=[0.9,0.95]"
        )


def set_learning_rates(optimizers: list[Optimizer], factor: float) -> None:
    """Set the rate of every group to its own peak rate times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            peak = group.setdefault("peak", group["lr"])
            group["lr"] = peak * factor


def handles_found_inf(optimizer: Optimizer) -> bool:
    """Whether a step does nothing where `optimizer.found_inf`, a number on the device, is 1.

    The attribute is torch's own marker of such optimizers, which GradScaler.step reads.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def named_states(optimizers: list[Optimizer], model: nn.Module) -> StateByName:
    """The state of each parameter that has any, not a copy, by the parameter's name."""
    states = {}
    for name, p in model.named_parameters():
        for optimizer in optimizers:
            if optimizer.state.get(p):
                states[name] = optimizer.state[p]
    return states


# torch.distributed.checkpoint.state_dict resumes bit for bit too, but loads a state with a missing
# key, another shape or another dtype without an error, and steps an optimizer without state.
def state_by_name(optimizers: list[Optimizer], model: nn.Module, ranks: DistEnv) -> StateByName:
    """State of each parameter by the parameter's name, its tensors gathered on the CPU of rank 0.

    All ranks call this together. Raises TypeError for a value that a checkpoint cannot hold.
    """
    by_name = {}
    for name, state in named_states(optimizers, model).items():
        for value in tree_leaves(state):
            if not isinstance(value, PLAIN):
                kind = type(value).__name__
                raise TypeError(f"the state of {name} holds a {kind}: no checkpoint can keep it")
        by_name[name] = tree_map_only(Tensor, ranks.gather_to_rank0, dict(state))
    return by_name


def load_state_by_name(optimizers: list[Optimizer], model: nn.Module, state: StateByName) -> None:
    """Give each optimizer the state that `state_by_name` saved, sharded as its own state is.

    No key of any optimizer is known here: a step with zero gradients makes a state to compare with,
    and the saved one must have the same keys, shapes and dtypes. That step moves the weights: load
    them afterwards. All ranks call this together. Raises IntegrityError for the state of another
    model or optimizer.
    """
    init_state(optimizers)
    own_states = named_states(optimizers, model)
    if not isinstance(state, dict) or state.keys() != own_states.keys():
        raise IntegrityError(
            "the optimizer's state has other parameters (than the model). fix: another run_dir"
        )
    for name, own in own_states.items():
        if tree_map(tensor_type, state[name]) != tree_map(tensor_type, own):
            raise IntegrityError(
                f"not this optimizer's state ({name} has other keys, shapes or dtypes). "
                "fix: another run_dir"
            )
        own.update(tree_map(to_layout_of, own, state[name]))


def init_state(optimizers: list[Optimizer]) -> None:
    """Make the state of all parameters by a step with zero gradients. It moves the weights."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()


def tensor_type(value: object) -> tuple | None:
    """Shape and dtype of a tensor; None for a plain value, which may be any."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def to_layout_of(own: object, saved: object) -> object:
    """`saved` on the device of `own` and sharded as it is; a plain value as it was saved."""
    return shard_like(saved, own) if isinstance(own, Tensor) else saved
