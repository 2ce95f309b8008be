"""The optimizers that a config can choose: functions of a model that return torch optimizers."""

from collections import defaultdict
from collections.abc import Callable
from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import Len
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from run.distributed import full_tensor, shard_like
from run.hardware import fastest_dtype
from run.ranges import BelowOne, NonNegativeFloat, PositiveFloat
from training.rates import Reference, parameter_groups

MAX_BATCHED_PARAMS = 2**28  # weights that Muon orthogonalizes at a time
Betas = Annotated[list[BelowOne], Len(2, 2)]


class Muon(Optimizer):
    """Nesterov momentum with an orthogonalized update of each matrix.

    Jordan, kellerjordan.github.io/posts/muon. A step moves a matrix (R, C) by `lr` in the spectral
    norm, or by `lr` * sqrt(R / C) if it is taller than wide, so that its outputs move by about `lr`
    times its inputs at every width (Bernstein, 2409.20325). The options of a group are `lr`,
    `weight_decay` and `momentum`.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            # The matrices that have gradients, the gradients, and the momenta, initially zeros.
            matrices = [p for p in group["params"] if p.grad is not None]
            for p in matrices:
                if p not in self.state:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            grads = [p.grad for p in matrices]
            momenta = [self.state[p]["momentum"] for p in matrices]

            # Update the momenta; Nesterov's lookahead overwrites the gradients.
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            torch._foreach_lerp_(grads, momenta, group["momentum"])
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])

            # Matrices of the same shape form a batch, unless their updates take too much memory.
            by_shape = defaultdict(list)
            for p in matrices:
                by_shape[p.shape].append(p)
            for shape, same_shape in by_shape.items():
                batch_size = max(1, MAX_BATCHED_PARAMS // shape.numel())
                for start in range(0, len(same_shape), batch_size):
                    add_updates(same_shape[start : start + batch_size], group["lr"])


def add_updates(matrices: list[Tensor], lr: float) -> None:
    """Orthogonalize the updates that `step` left in p.grad; apply them to matrices of one shape."""
    updates = torch.stack([full_tensor(p.grad) for p in matrices])
    updates = map_over_ranks(newton_schulz, updates).to(matrices[0].dtype)
    rows, columns = matrices[0].shape
    parts = [shard_like(update, p) for update, p in zip(updates, matrices, strict=True)]
    torch._foreach_add_(matrices, parts, alpha=-lr * max(1, rows / columns) ** 0.5)


def map_over_ranks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x) for x (N, ...), which is equal on all ranks; each rank computes a part."""
    if not dist.is_initialized():
        return function(x)
    # All parts have the same length. If the world size does not divide N, the last repeat items.
    world_size = dist.get_world_size()
    part_size = -(-len(x) // world_size)
    indices = torch.arange(part_size, device=x.device) + dist.get_rank() * part_size
    part = function(x[indices % len(x)])
    result = part.new_empty(part_size * world_size, *x.shape[1:])
    dist.all_gather_single(result, part)
    return result[: len(x)]


def newton_schulz(x: Tensor) -> Tensor:
    """x (N, R, C) -> its matrices, with singular values moved close to 1.

    Runs five Newton-Schulz steps in the fastest dtype; the precision of bf16 is sufficient.
    """
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    # Scaled before the cast, because gradients may be too small for fp16.
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    x = x.to(fastest_dtype(x.device))
    for _ in range(5):
        # x = a x + (b A + c A^2) x with A = x x^T, and Jordan's coefficients a, b, c.
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    if is_tall:
        x = x.mT.clone(memory_format=torch.contiguous_format)
    return x


def adamw(
    model: nn.Module,
    *,
    lr: PositiveFloat,
    betas: Betas,
    weight_decay: NonNegativeFloat,
    reference: Reference | None,
) -> list[Optimizer]:
    """AdamW with weight decay on the matrices in the blocks. Loshchilov, 1711.05101."""
    groups = parameter_groups(model, lr, weight_decay, reference, scale_matrices=True)
    return [AdamW(groups, betas=betas, fused=True)]


def muon(
    model: nn.Module,
    *,
    lr: PositiveFloat,
    momentum: BelowOne,
    weight_decay: NonNegativeFloat,
    betas: Betas,
    reference: Reference | None,
) -> list[Optimizer]:
    """Muon for matrices in the blocks, AdamW without decay for embedding, head and vectors."""
    groups = parameter_groups(model, lr, weight_decay, reference, scale_matrices=False)
    matrices = [group for group in groups if group["role"] == "matrices"]
    others = [group for group in groups if group["role"] != "matrices"]
    return [Muon(matrices, {"momentum": momentum}), AdamW(others, betas=betas, fused=True)]
