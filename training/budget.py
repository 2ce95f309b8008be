"""How many optimizer steps fit into max_minutes and max_epochs."""

import math
from bisect import bisect_right
from collections.abc import Callable

from data.loader import Loader

WARMUP_STEPS = 3  # steps that fill caches, and are not timed
TIMED_FRACTION = 0.1  # of the time left, during which steps are timed
RESERVED_SECONDS = 5.0  # for the last checkpoint, sample and plot
SAFETY_MARGIN = 0.03  # of the time left, for a machine that slows down
MOST_STEPS = 10**9


def count_epoch_steps(loader: Loader, epochs: int) -> float:
    """The optimizer steps, at least 1, that read each row at most `epochs` times.

    Infinite where no row comes twice.
    """
    if loader.rows_per_epoch == math.inf:
        return math.inf
    return max(1, epochs * loader.rows_per_epoch // loader.batch_size)


class TimeBudget:
    """Times the first steps of a process, then says how many more there is time for.

    `evaluation_steps(n)` is how many training steps take as long as all evaluations among n steps.
    """

    def __init__(self, max_minutes: float, evaluation_steps: Callable[[int], float]):
        self.limit = 60 * max_minutes  # seconds
        self.evaluation_steps = evaluation_steps
        self.warmup_end = 0.0  # seconds of training at the end of the warm-up

    def fit(self, steps: int, training_seconds: float, total_seconds: float) -> int | None:
        """The number of further steps that fit, or None while more steps have to be timed.

        Steps are timed for a tenth of the time left, or until half of the limit has passed.

        `steps` were done by this process in `training_seconds`, counted from any instant on.
        `total_seconds` are those of the run so far, evaluation, saving and imports included.
        """
        if steps == WARMUP_STEPS:
            self.warmup_end = training_seconds
        if steps <= WARMUP_STEPS:
            return None
        timed = training_seconds - self.warmup_end
        left = self.limit - total_seconds
        is_early = left > 0.5 * self.limit
        if is_early and timed < TIMED_FRACTION * left:
            return None

        # The largest number of steps that fit, with their evaluations, into what is left.
        left = (1 - SAFETY_MARGIN) * left - RESERVED_SECONDS
        steps_left = left * (steps - WARMUP_STEPS) / timed
        fitting = bisect_right(
            range(1, MOST_STEPS), steps_left, key=lambda n: n + self.evaluation_steps(n)
        )
        return max(1, fitting)
