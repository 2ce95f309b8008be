"""The clock of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic


class Clock:
    """Counts the seconds since `started`, a monotonic time, with and without pauses."""

    def __init__(self, started: float):
        self.started = started
        self.paused = 0.0

    def add_earlier(self, seconds: float) -> None:
        """Include the time that earlier processes of the run took."""
        self.started -= seconds

    def total(self) -> float:
        return monotonic() - self.started

    def training(self) -> float:
        return self.total() - self.paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time spent inside the `with` statement from `training`."""
        start = monotonic()
        yield
        self.paused += monotonic() - start
