"""How many optimizer steps a run takes: by the config, and as many as fit into max_minutes."""

import math

from data.corpus import Corpus
from data.loader import Loader
from model.build import build_model
from run.distributed import DistEnv
from run.progress import say
from run.settings import Settings
from training.clock import Clock
from training.evaluation import count_eval_tokens
from training.steps import Progress

UNTIMED_STEPS = 3  # steps that compile and fill caches, and are not timed
TIMED_FRACTION = 0.1  # of the limit, during which steps are timed
RESERVED_SECONDS = 5.0  # for the last checkpoint, sample and plot
SAFETY_MARGIN = 0.03  # of the time left, for a machine that slows down
EVALUATION_COST = 0.5  # time to evaluate a token, relative to training on it: 0.4 to 0.6 on CPUs


def planned_steps(settings: Settings, loader: Loader) -> float:
    """The optimizer steps of a run, not counting `max_minutes`; infinite without a bound."""
    if settings.steps is not None:
        return settings.steps
    if settings.tokens_per_parameter is not None:
        num_parameters = build_model(settings.model, "meta").num_parameters()
        tokens = settings.tokens_per_parameter * num_parameters
        return max(1, math.ceil(tokens / settings.batch_tokens))
    if settings.max_epochs is not None:
        return count_epoch_steps(loader, settings.max_epochs)
    return math.inf


def count_epoch_steps(loader: Loader, epochs: int) -> float:
    """The optimizer steps, at least 1, that read each row at most `epochs` times.

    Infinite where no row comes twice.
    """
    if loader.rows_per_epoch == math.inf:
        return math.inf
    return max(1, epochs * loader.rows_per_epoch // loader.batch_size)


class TimeBudget:
    """Fits the number of steps to `max_minutes`: times the first steps, then fits once.

    Until then there is an estimate, which learning rates follow.
    """

    def __init__(self, settings: Settings, corpus: Corpus, ranks: DistEnv, clock: Clock):
        self.settings = settings
        self.corpus = corpus
        self.ranks = ranks
        self.clock = clock
        self.has_limit = settings.max_minutes is not None
        self.limit = 60 * settings.max_minutes if self.has_limit else math.inf  # seconds
        self.is_fitted = False
        self.timed_steps = -UNTIMED_STEPS
        self.timed_from = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the number of steps is still to be fitted."""
        return self.has_limit and not self.is_fitted

    def mark_fitted(self) -> None:
        """Keep the number of steps that an earlier process has fitted."""
        self.is_fitted = True

    def fit(self, progress: Progress) -> bool:
        """After each step: estimate how many steps fit into `max_minutes`, and at last fit them.

        Returns True after the step at which the number of steps is fitted.
        """
        if not self.is_open:
            return False
        steps_left, is_final = self.ranks.on_rank0(self.count_steps)
        if steps_left is None:
            return False
        # Every evaluation takes the time of some steps.
        eval_tokens = count_eval_tokens(self.settings, self.corpus, progress.step + steps_left)
        eval_steps = EVALUATION_COST * eval_tokens / self.settings.batch_tokens
        steps_left = (steps_left - eval_steps) / (1 + eval_steps / self.settings.eval_every)
        fitted_steps = progress.step + max(1, int(steps_left))
        progress.expected_steps = min(progress.total_steps, fitted_steps)
        if is_final:
            progress.total_steps = progress.expected_steps
            self.is_fitted = True
            say(
                f"max_minutes={self.settings.max_minutes:g} has room for {fitted_steps} steps: "
                f"the run ends at step {progress.total_steps}"
            )
        return is_final

    def count_steps(self) -> tuple[float | None, bool]:
        """Called after each step: return (steps left, is_final); (None, False) until one is timed.

        Steps are timed for a tenth of the limit, or until half of the limit has passed.
        """
        self.timed_steps += 1
        if self.timed_steps <= 0:
            self.timed_from = self.clock.training()
            return None, False
        timed_seconds = max(1e-6, self.clock.training() - self.timed_from)
        is_final = (
            timed_seconds >= TIMED_FRACTION * self.limit or self.clock.total() >= 0.5 * self.limit
        )
        return self.seconds_left() * self.timed_steps / timed_seconds, is_final

    def seconds_left(self) -> float:
        """Seconds that are left for steps, and for what goes on between them."""
        left = self.limit - self.clock.total()
        return max(0.0, (1 - SAFETY_MARGIN) * left - RESERVED_SECONDS)

    def time_to_end(self, progress: Progress, tokens_per_second: float | None) -> float:
        """Seconds to the last step at this speed; infinite if it is not known."""
        seconds = math.inf
        if tokens_per_second is not None:
            steps_left = progress.total_steps - progress.step
            seconds = steps_left * self.settings.batch_tokens / tokens_per_second
        # Before the number of steps is fitted, the clock may end the run earlier.
        if self.is_open:
            seconds = min(seconds, self.seconds_left())
        return seconds
