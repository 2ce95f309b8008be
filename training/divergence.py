"""Finds the first step that is not finite, without making the host wait for the device."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from run.distributed import DistEnv
from training.optimizers import handles_found_inf

NEVER = 2**62  # a step that does not come


class DivergenceGuard:
    """The first step, on any rank, whose loss or gradient was not finite.

    `found_inf` is 1 from that step on. Optimizers that are attached read it on the device and then
    leave weights and state alone.
    """

    def __init__(self, ranks: DistEnv):
        self.ranks = ranks
        self.first_bad_step = torch.full((), NEVER, device=ranks.device)
        self.found_inf = torch.zeros((), device=ranks.device)

    def attach(self, optimizers: list[Optimizer]) -> None:
        """Have the optimizers that can read `found_inf` do so."""
        for optimizer in filter(handles_found_inf, optimizers):
            optimizer.grad_scale = None
            optimizer.found_inf = self.found_inf

    def update(self, step: int, value: Tensor) -> None:
        """Record `step` as bad where `value` is not finite, on the device."""
        # Only tensors are computed here: the host reads none of them.
        bad_step = torch.where(value.isfinite(), NEVER, step)
        self.first_bad_step.copy_(bad_step.minimum(self.first_bad_step))
        self.ranks.all_reduce_min_(self.first_bad_step)
        self.found_inf.copy_(self.first_bad_step < NEVER)

    def bad_step(self) -> int | None:
        """The first bad step, or None. Waits for the device."""
        step = int(self.first_bad_step)
        return step if step < NEVER else None
