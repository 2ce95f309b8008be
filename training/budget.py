"""The clock of a run, and how many optimizer steps fit into max_minutes and max_epochs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from data.loader import Loader

UNTIMED_STEPS = 3  # steps that compile and fill caches, and are not timed
TIMED_FRACTION = 0.1  # of the limit, during which steps are timed
RESERVED_SECONDS = 5.0  # for the last checkpoint, sample and plot
SAFETY_MARGIN = 0.03  # of the time left, for a machine that slows down


def count_epoch_steps(loader: Loader, epochs: int) -> float:
    """The optimizer steps, at least 1, that read each row at most `epochs` times.

    Infinite where no row comes twice.
    """
    if loader.rows_per_epoch == math.inf:
        return math.inf
    return max(1, epochs * loader.rows_per_epoch // loader.batch_size)


class Clock:
    """Seconds since `started`, a monotonic time: of the run, and of training alone."""

    def __init__(self, started: float):
        self.started = started  # earlier by the time of the processes that this one resumes
        self.paused = 0.0

    def total(self) -> float:
        return monotonic() - self.started

    def training(self) -> float:
        return self.total() - self.paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, something other than training goes on."""
        start = monotonic()
        yield
        self.paused += monotonic() - start


class TimeBudget:
    """Times the first steps of a process, then says how many more there is time for."""

    def __init__(self, minutes: float, clock: Clock):
        self.limit = 60 * minutes  # seconds
        self.clock = clock
        self.timed_steps = -UNTIMED_STEPS
        self.timed_from = 0.0

    def seconds_left(self) -> float:
        """Seconds that are left for steps, and for what goes on between them."""
        left = self.limit - self.clock.total()
        return max(0.0, (1 - SAFETY_MARGIN) * left - RESERVED_SECONDS)

    def count_steps(self) -> float | None:
        """Called after each step: how many more fit, or None while more have to be timed.

        Steps are timed for a tenth of the limit, or until half of the limit has passed.
        """
        self.timed_steps += 1
        if self.timed_steps <= 0:
            self.timed_from = self.clock.training()
            return None
        timed_seconds = self.clock.training() - self.timed_from
        if timed_seconds < TIMED_FRACTION * self.limit and self.clock.total() < 0.5 * self.limit:
            return None
        return self.seconds_left() * self.timed_steps / timed_seconds
