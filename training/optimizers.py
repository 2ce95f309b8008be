"""Optimizers over a model's parameters, as a list that steps together."""

from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from common.errors import IntegrityError
from common.hardware import multiplies_bf16
from common.sharding import full_tensor, local_shard, shard_like
from training.distributed import DistEnv

MAX_BATCHED_PARAMS = 2**28  # weights whose update is made at once
PLAIN = (Tensor, bool, int, float, str, type(None))  # what a checkpoint can hold


class Muon(Optimizer):
    """Momentum whose update of each matrix is made orthogonal. Jordan et al., kellerjordan.github.io/posts/muon.

    Updates are as large as AdamW's, 0.2 (Liu et al., 2502.16982), so that `lr` means the same for both.
    As torch's fused optimizers, it does nothing where `found_inf`, a number on the device, is 1.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    def __init__(self, matrices: list[Tensor], *, lr: float, momentum: float, weight_decay: float):
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            alike = defaultdict(list)  # orthogonalised together
            for p in group["params"]:
                if p.grad is not None:
                    alike[tuple(sorted(p.shape))].append(p)
            knobs = {key: group[key] for key in ("lr", "momentum", "weight_decay")}
            for (shorter, longer), matrices in alike.items():
                count = max(1, MAX_BATCHED_PARAMS // (shorter * longer))
                for start in range(0, len(matrices), count):
                    self._step(matrices[start : start + count], 0.2 * longer**0.5, **knobs)

    def _step(
        self, matrices: list[Tensor], size: float, lr: float, momentum: float, weight_decay: float
    ) -> None:
        for p in matrices:
            if p not in self.state:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        grads, means = (
            [p.grad for p in matrices],
            [self.state[p]["momentum_buffer"] for p in matrices],
        )
        rate = lr
        if self.found_inf is not None:  # then a mean is mixed with itself, and moves nothing
            rate = lr * (1 - self.found_inf)
            grads = [
                torch.where(self.found_inf > 0, mean, grad)
                for mean, grad in zip(means, grads, strict=True)
            ]
        torch._foreach_lerp_(means, grads, 1 - momentum)
        updates = [
            full_tensor(update) for update in torch._foreach_lerp(grads, means, momentum)
        ]  # Nesterov's
        tall = [update.shape[0] > update.shape[1] for update in updates]
        wide = torch.stack(
            [update.mT if turned else update for update, turned in zip(updates, tall, strict=True)]
        )
        wide = (map_sharded(newton_schulz, wide).to(matrices[0].dtype) * (-size * rate)).unbind()
        updates = [
            update.mT if turned else update for update, turned in zip(wide, tall, strict=True)
        ]
        updates = [shard_like(update, p) for update, p in zip(updates, matrices, strict=True)]
        torch._foreach_mul_(matrices, 1 - rate * weight_decay)
        torch._foreach_add_(matrices, updates)


def newton_schulz(x: Tensor) -> Tensor:
    """x (N, R, C), R <= C -> with all singular values near 1, by five Newton-Schulz steps.

    In bf16, but where that is slow: five steps need no precision.
    """
    if multiplies_bf16(x.device):
        x = x.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(
            x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445
        )
    return x


class Lion(Optimizer):
    """Sign of an interpolated momentum. Chen et al., 2302.06675, Algorithm 2.

        update = sign(beta1 * momentum + (1 - beta1) * gradient)
        weight = weight - lr * (update + weight_decay * weight)
        momentum = beta2 * momentum + (1 - beta2) * gradient

    As torch's fused optimizers, it does nothing where `found_inf`, a number on the device, is 1.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: list[Tensor] | list[dict],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if len(params) > 0:
                self._step(params, group["lr"], *group["betas"], group["weight_decay"])

    def _step(
        self, params: list[Tensor], lr: float, beta1: float, beta2: float, weight_decay: float
    ) -> None:
        for p in params:
            if p not in self.state:
                self.state[p]["exp_avg"] = torch.zeros_like(p)

        # Every operation is elementwise, so each rank works on its own shards.
        means = [local_shard(self.state[p]["exp_avg"]) for p in params]
        grads = [local_shard(p.grad) for p in params]
        params = [local_shard(p) for p in params]

        # A step that is not finite mixes the momentum with itself, and moves by a rate of 0.
        if self.found_inf is not None:
            bad = self.found_inf > 0
            lr = lr * (1 - self.found_inf)
            grads = [torch.where(bad, m, g) for m, g in zip(means, grads, strict=True)]

        updates = torch._foreach_lerp(means, grads, 1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(updates, -lr)
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        torch._foreach_add_(params, updates)
        torch._foreach_lerp_(means, grads, 1 - beta2)


def adamw(
    model: nn.Module, *, lr: float, betas: list[float], weight_decay: float
) -> list[Optimizer]:
    """AdamW with decay on matrices only. Loshchilov and Hutter, 1711.05101."""
    _check(betas)
    groups = decay_groups(model, weight_decay)
    return [AdamW(groups, lr=lr, betas=tuple(betas), fused=True)]


def lion(
    model: nn.Module, *, lr: float, betas: list[float], weight_decay: float
) -> list[Optimizer]:
    """Lion with decay on matrices only."""
    _check(betas)
    groups = decay_groups(model, weight_decay)
    return [Lion(groups, lr=lr, betas=tuple(betas), weight_decay=weight_decay)]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Groups of a model's matrices, with `weight_decay`, and of its other parameters, without."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def muon(
    model: nn.Module,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    embedding_lr: float,
    betas: list[float],
) -> list[Optimizer]:
    """Muon for the matrices inside the blocks, AdamW without decay for embedding, head and vectors."""
    _check(betas)
    if momentum >= 1:
        raise ValueError(f"optimizer.momentum must be below 1 (got {momentum}). fix: 0.85")
    hidden, ends, vectors = [], [], []
    for name, p in model.named_parameters():
        (vectors if p.ndim != 2 else hidden if name.startswith("blocks.") else ends).append(p)
    groups = [{"params": ends, "lr": embedding_lr}, {"params": vectors}]
    return [
        Muon(hidden, lr=lr, momentum=momentum, weight_decay=weight_decay),
        AdamW(groups, lr=lr, betas=tuple(betas), weight_decay=0.0, fused=True),
    ]


def _check(betas: list[float]) -> None:
    if len(betas) != 2 or max(betas) >= 1:
        raise ValueError(
            f"optimizer.betas must be two numbers below 1 (got {betas}). fix: [0.9, 0.95]"
        )


def handles_found_inf(optimizer: Optimizer) -> bool:
    """Whether a step does nothing where `optimizer.found_inf`, a number on the device, is 1.

    It is torch's own convention (GradScaler.step), which sets the name on such optimizers alone.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def state_by_name(
    optimizers: list[Optimizer], model: nn.Module, ranks: DistEnv
) -> dict[str, dict[str, object]]:
    """State of each parameter by the parameter's name; its tensors are gathered on the first rank.

    All ranks call alike. Raises TypeError for a value that a checkpoint cannot hold.
    """
    own = state_by_parameter(optimizers)
    named = {}
    for name, p in model.named_parameters():
        if p in own:
            for value in tree_leaves(own[p]):
                if not isinstance(value, PLAIN):
                    kind = type(value).__name__
                    raise TypeError(
                        f"the state of {name} holds a {kind}: no checkpoint can keep it"
                    )
            named[name] = tree_map_only(Tensor, ranks.gather_to_rank0, dict(own[p]))
    return named


def load_state_by_name(
    optimizers: list[Optimizer], model: nn.Module, state: dict[str, dict[str, object]]
) -> None:
    """Give each optimizer the state that `named_state` saved, spread as its own state is.

    No key is known here: each optimizer makes a state of its own by a step, and the saved one must
    have the same keys, shapes and dtypes. That step moves the weights: load them afterwards.
    All ranks call alike. Raises IntegrityError for the state of another model or optimizer.
    """
    init_state(optimizers)
    own = state_by_parameter(optimizers)
    named = {name: own[p] for name, p in model.named_parameters() if p in own}
    fix = "fix: another run_dir"
    if not isinstance(state, dict) or state.keys() != named.keys():
        raise IntegrityError(f"the optimizer's state has other parameters (than the model). {fix}")
    for name, made in named.items():
        saved = state[name]
        if not isinstance(saved, dict) or saved.keys() != made.keys():
            keys = sorted(map(str, saved)) if isinstance(saved, dict) else saved
            problem = f"{name} has {keys}, not {sorted(map(str, made))}"
            raise IntegrityError(f"not this optimizer's state ({problem}). {fix}")
        for key, value in made.items():
            if not same_structure(value, saved[key]):
                raise IntegrityError(f"not this optimizer's state ({name}: another {key}). {fix}")
            made[key] = tree_map(to_layout_of, value, saved[key])


def init_state(optimizers: list[Optimizer]) -> None:
    """Step once with zero gradients, which makes the state of every parameter. Moves the weights."""
    for optimizer in optimizers:
        # A step may also change options of its groups, such as a counter: those are put back.
        options = [dict(group) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(before)


def state_by_parameter(optimizers: list[Optimizer]) -> dict[Tensor, dict[str, object]]:
    """State of each parameter that has any."""
    return {
        p: state
        for optimizer in optimizers
        for p, state in optimizer.state.items()
        if len(state) > 0
    }


def same_structure(made: object, saved: object) -> bool:
    """Whether both nest alike and their tensors agree in shape and dtype; plain values may differ."""
    made, made_nesting = tree_flatten(made)
    saved, saved_nesting = tree_flatten(saved)
    return made_nesting == saved_nesting and all(map(same_leaf, made, saved))


def same_leaf(made: object, saved: object) -> bool:
    if not isinstance(made, Tensor) or not isinstance(saved, Tensor):
        return not isinstance(made, Tensor) and not isinstance(saved, Tensor)
    return made.shape == saved.shape and made.dtype == saved.dtype


def to_layout_of(made: object, saved: object) -> object:
    """`saved` on the device of `made`, and spread over the ranks as `made` is."""
    return shard_like(saved, made) if isinstance(made, Tensor) else saved


def set_learning_rates(optimizers: list[Optimizer], multiple: float) -> None:
    """Every group's own peak rate times `multiple`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak", group["lr"]) * multiple


def map_sharded(make: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """make(x), x (N, ...) the same on all processes, each of which makes a part of the N."""
    if not dist.is_available() or not dist.is_initialized():
        return make(x)
    count = -(-len(x) // dist.get_world_size())
    numbers = torch.arange(dist.get_rank() * count, (dist.get_rank() + 1) * count, device=x.device)
    mine = make(x[numbers % len(x)])
    made = mine.new_empty(count * dist.get_world_size(), *mine.shape[1:])
    dist.all_gather(list(made.split(count)), mine)
    return made[: len(x)]
