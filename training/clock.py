"""The clock of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic


class Clock:
    """Counts the seconds since `started`, a monotonic time, in total and for training alone."""

    def __init__(self, started: float):
        self.started = started
        self.paused = 0.0
        self.pauses: dict[str, float] = {}  # seconds of the last pause, by activity

    def add_earlier(self, seconds: float) -> None:
        """Add the time of the earlier processes that this process continues."""
        self.started -= seconds

    def total(self) -> float:
        return monotonic() - self.started

    def training(self) -> float:
        return self.total() - self.paused

    def forget(self, activity: str) -> None:
        """Forget how long the last pause for an activity took."""
        self.pauses.pop(activity, None)

    @contextmanager
    def pause(self, activity: str) -> Iterator[None]:
        """Exclude the time spent inside the `with` statement from the training time."""
        start = monotonic()
        yield
        self.pauses[activity] = monotonic() - start
        self.paused += self.pauses[activity]
