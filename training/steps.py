"""The progress of a run: its step, its last step, and whether a periodic action is due."""

import math
from dataclasses import dataclass
from typing import NoReturn

from run import errors


@dataclass
class Progress:
    """The position of a run, in optimizer steps."""

    step: int = 0  # number of completed steps
    bound: float = math.inf  # the number of steps without max_minutes; infinite if unlimited
    # The last step, at which the schedule ends; equal to `bound` until it is fitted to max_minutes.
    total_steps: float = math.inf
    # The number of steps to which the peak learning rates are scaled. While steps are timed, it is
    # an estimate, which is not accurate enough for the schedule.
    expected_steps: float = math.inf
    first_step: int = 0  # step at which this process began
    saved_step: int = 0  # step of the newest checkpoint
    eval_tokens: int | None = None  # held-out tokens per evaluation; None until planned

    def start_at(self, step: int) -> None:
        """Begin this process at the step of a checkpoint."""
        self.step = step
        self.first_step = step
        self.saved_step = step

    @property
    def is_finished(self) -> bool:
        return self.step >= self.total_steps

    def is_due(self, interval: int) -> bool:
        """Whether the step is a multiple of `interval` or the last one, and not 0."""
        return self.step > 0 and (self.step % interval == 0 or self.is_finished)


def end_diverged(where: str, progress: Progress) -> NoReturn:
    """Exit with code 4. All checkpoints have finite weights."""
    problem = f"training diverged ({where}). A lower optimizer.lr or precision=fp32 may help"
    if progress.saved_step > 0:
        problem += f"; resume=true continues from step {progress.saved_step}"
    errors.exit_with(errors.DIVERGED, problem)
