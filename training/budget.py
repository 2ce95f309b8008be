"""The number of optimizer steps of a run: set by the config, or fitted to max_minutes."""

import math

from data.loader import Loader
from model.build import build_model
from run import errors
from run.progress import print0
from run.settings import Settings
from training.environment import Environment
from training.steps import Progress

UNTIMED_STEPS = 3  # the first steps of a process, which compile and fill caches
TIMED_STEPS = 10  # steps that are timed before the number of steps is fitted, unless they are slow
TIMED_FRACTION = 0.1  # of the time limit, after which the number of steps is fitted
MARGIN = 0.08  # fraction of the time left that is reserved for evaluations, samples and saves
LATEST = 1.05  # multiple of the time limit after which a run that is too slow takes no more steps
FEW_STEPS = 20  # a model learns almost nothing in fewer steps


def planned_steps(settings: Settings, loader: Loader) -> float:
    """Return the number of optimizer steps, ignoring `max_minutes`; infinite if unbounded."""
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
    """Return how many steps read no row more than `epochs` times, but at least 1.

    Infinite if no row repeats.
    """
    if loader.rows_per_epoch == math.inf:
        return math.inf
    return max(1, epochs * loader.rows_per_epoch // loader.batch_size)


class TimeBudget:
    """Fits the number of steps to `max_minutes`, once, at the earliest after a tenth of that time.

    Until then, the schedule ends at `Progress.bound`, and the peak learning rates are scaled to an
    estimate of the number of steps. A run that becomes slower ends at LATEST times the limit.
    """

    def __init__(self, env: Environment):
        self.env = env
        self.limit = math.inf  # seconds
        if env.settings.max_minutes is not None:
            self.limit = 60 * env.settings.max_minutes
        self.is_fitted = self.limit == math.inf
        # The step after which steps are timed, and the training time at its end.
        self.timed_from: tuple[int, float] | None = None

    def check_time_left(self, progress: Progress) -> None:
        """Exit with code 2 if a resumed run is unfinished but has no time left."""
        total = self.env.clock.total()
        latest = LATEST * self.limit if self.is_fitted else self.limit
        if total > latest and not progress.is_finished:
            errors.exit_with(
                errors.INPUT,
                f"no time is left for training (max_minutes={self.env.settings.max_minutes:g} "
                f"includes the time of earlier processes: so far {total / 60:.1f} minutes). "
                "fix: a larger max_minutes, or steps=N max_minutes=null",
            )

    def fit(self, progress: Progress) -> bool:
        """After a step, estimate the number of steps, or end the run at LATEST times the limit.

        All ranks call this together. Returns whether this call has fitted the number of steps.
        """
        if self.limit == math.inf or progress.is_finished:
            return False
        ranks = self.env.ranks
        if self.is_fitted:
            is_late = self.env.clock.total() > LATEST * self.limit
            if ranks.all_reduce_max(int(is_late and ranks.is_main)):
                self.end_now(progress)
            return False

        steps, self.is_fitted = ranks.on_rank0(self.estimate, progress)
        progress.expected_steps = steps
        if self.is_fitted:
            progress.total_steps = steps
            print0(f"the run will end at step {steps}")
            if steps < FEW_STEPS:
                print0("warning: too few steps to train a useful model")
        return self.is_fitted

    def estimate(self, progress: Progress) -> tuple[float, bool]:
        """Return the number of steps that fit into the limit, and whether it is final.

        It is final after TIMED_FRACTION of the limit and TIMED_STEPS timed steps, or, if steps are
        very slow, after half of the limit. If no step has been timed by LATEST times the limit, the
        run ends.
        """
        clock = self.env.clock
        if self.timed_from is None and progress.step >= progress.first_step + UNTIMED_STEPS:
            self.timed_from = (progress.step, clock.training())
        total = clock.total()
        if self.timed_from is None or progress.step == self.timed_from[0]:
            if total > LATEST * self.limit:
                return progress.step, True
            return progress.expected_steps, False

        num_timed = progress.step - self.timed_from[0]
        seconds_per_step = (clock.training() - self.timed_from[1]) / num_timed
        seconds_left = max(0.0, (1 - MARGIN) * (self.limit - total))
        steps = progress.step + int(seconds_left / max(1e-6, seconds_per_step))
        is_final = total >= TIMED_FRACTION * self.limit and num_timed >= TIMED_STEPS
        is_final = is_final or total >= self.limit / 2
        return min(progress.bound, steps), is_final

    def end_now(self, progress: Progress) -> None:
        """Let the run end with this step."""
        progress.total_steps = progress.step
        print0(
            f"the run has become slower and exceeds max_minutes={self.env.settings.max_minutes:g}: "
            f"it ends at step {progress.step}, before its learning rate has decayed"
        )

    def expected_end(self, progress: Progress) -> float:
        """Return the step at which the run is expected to end; infinite if unknown."""
        if self.is_fitted or progress.is_finished:
            return progress.total_steps
        is_timed = self.timed_from is not None and progress.step > self.timed_from[0]
        return progress.expected_steps if is_timed else math.inf

    def time_to_end(self, progress: Progress, tokens_per_second: float | None) -> float:
        """Return the expected seconds to the end of the run; infinite if unknown."""
        seconds = math.inf
        if tokens_per_second is not None:
            steps_left = progress.total_steps - progress.step
            seconds = steps_left * self.env.settings.batch_tokens / tokens_per_second
        # Before the number of steps is fitted, max_minutes may end the run earlier.
        if not self.is_fitted:
            seconds = min(seconds, max(0.0, self.limit - self.env.clock.total()))
        return seconds
