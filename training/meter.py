"""Measurements between two reports of a run: losses, gradient norm and throughput."""

import math

import torch
from torch import Tensor

from run import hardware
from training.environment import Environment
from training.steps import Progress, end_diverged
from training.trainer import StepResult, Trainer


class Meter:
    """Accumulates the losses and the duration of steps until they are reported."""

    def __init__(self, env: Environment, trainer: Trainer):
        self.env = env
        self.ranks = env.ranks
        self.clock = env.clock
        self.loss_names = trainer.loss_names
        # FLOPs per token of a training step, for the MFU; the second counts causal attention as a
        # full square.
        self.flops_per_token = trainer.model.training_flops()
        self.whole_flops_per_token = trainer.model.training_flops(whole_attention=True)

        # Losses (1 + L,), summed over targets since the last report. Only their sum over all ranks
        # is reported and saved, because a save gives each rank an equal share.
        device = self.ranks.device
        self.loss_sum = torch.zeros(len(self.loss_names), device=device)
        self.reported_step = 0

        # Values of the last step, and whether `is_finite` was true in all steps.
        self.grad_norm = torch.zeros((), device=device)
        self.learning_rates: dict[str, float] = {}
        self.is_finite = torch.ones((), dtype=torch.bool, device=device)

        # Steps after this step are timed, starting at this time.
        self.timed_step = 0
        self.timed_from = self.clock.training()

    def add(self, result: StepResult, progress: Progress) -> None:
        """Add a step that `progress` has not counted yet."""
        assert result.loss_sums.shape == self.loss_sum.shape, result.loss_sums.shape
        self.loss_sum += result.loss_sums
        self.grad_norm = result.grad_norm
        self.learning_rates = result.learning_rates
        self.is_finite = self.is_finite & result.is_finite
        if result.has_compiled:
            self.restart_clock(progress.step + 1)

    def restart_clock(self, step: int) -> None:
        """Time the steps after `step`, from now on."""
        self.timed_step = step
        self.timed_from = self.clock.training()

    def report(self, progress: Progress) -> dict[str, float | int | None]:
        """Return the metrics of the steps since the last report, and begin the next report.

        Losses are means over targets. Throughput is None if no step was timed, for example if the
        only step compiled the model. The model FLOP utilization is also None if the device's peak
        is unknown. Exits with code 4 if the run has diverged.
        """
        self.check_finite(progress)
        loss_sum = self.ranks.all_reduce(self.loss_sum.cpu())
        steps = range(self.reported_step, progress.step)
        losses = loss_sum / sum(map(self.env.loader.num_targets, steps))

        tokens_per_second = None
        mfu = None
        whole_mfu = None
        now = self.clock.training()
        if progress.step > self.timed_step:
            steps_per_second = (progress.step - self.timed_step) / (now - self.timed_from)
            tokens_per_second = steps_per_second * self.env.settings.batch_tokens
            peak_flops = hardware.peak_flops(self.ranks.device)
            if peak_flops is not None:
                share = tokens_per_second / peak_flops / self.ranks.world_size
                mfu = share * self.flops_per_token
                whole_mfu = share * self.whole_flops_per_token

        grad_norm = self.grad_norm.item()
        metrics = dict(zip(self.loss_names, losses.tolist(), strict=True))
        metrics |= {
            **self.learning_rates,
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
            "tokens_per_second": tokens_per_second,
            "mfu": mfu,
            "mfu_whole_attention": whole_mfu,
            "peak_memory_bytes": hardware.peak_memory(self.ranks.device),
        }

        # Begin the next report.
        self.loss_sum.zero_()
        self.reported_step = progress.step
        self.timed_step = progress.step
        self.timed_from = now
        return metrics

    def check_finite(self, progress: Progress) -> None:
        """Exit with code 4 if a loss was not finite, or `is_finite` was false in a step."""
        is_finite = self.is_finite & self.loss_sum.isfinite().all()
        if self.ranks.all_reduce_max(int(not is_finite)):
            end_diverged(f"by step {progress.step}", progress)

    def share_losses(self) -> None:
        """Give each rank an equal share of the losses since the last report.

        A resumed run begins with equal shares. An uninterrupted run must use them as well, so that
        both round identically.
        """
        loss_sum = self.ranks.all_reduce(self.loss_sum.cpu())
        self.loss_sum.copy_(loss_sum / self.ranks.world_size)

    def restore(self, loss_sum: Tensor, reported_step: int, step: int) -> None:
        """Continue at `step`; `loss_sum` is over the steps since `reported_step` and all ranks."""
        self.loss_sum.copy_(loss_sum / self.ranks.world_size)
        self.reported_step = reported_step
        self.restart_clock(step)
