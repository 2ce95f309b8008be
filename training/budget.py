"""The number of optimizer steps of a run: set by the config, or fitted to max_minutes."""

import math
from collections import deque
from collections.abc import Callable

from data.corpus import Corpus
from data.loader import Loader
from model.build import build_model
from run import errors
from run.distributed import DistEnv
from run.progress import say
from run.settings import Settings
from training.clock import Clock
from training.evaluation import SAMPLE_TOKENS, count_eval_tokens
from training.steps import Progress

UNTIMED_STEPS = 3  # steps that compile and fill caches, and are not timed unless they are slow
FEW_STEPS = 20  # a model learns almost nothing in fewer steps
TIMED_FRACTION = 0.1  # fraction of the time limit over which the speed is averaged
TOLERANCE = 0.05  # relative change in the number of steps below which it is not refitted
SAID_TOLERANCE = 0.15  # relative change in the number of steps below which it is not reported
CHECKS = 100  # number of times per run that a fitted number is checked
RESERVED_SECONDS = 5.0  # for the last checkpoint, sample and plot
SAFETY_MARGIN = 0.03  # fraction of the time left that is reserved in case the machine slows down
EVALUATION_COST = 0.5  # time to evaluate a token relative to training on it: 0.4 to 0.6 on CPUs
# Estimates, used until the first sample and the first save have been timed.
LAYER_SECONDS = 4e-4  # per layer and token of a sample
SAVED_BYTES_PER_SECOND = 2e8  # including checksums
BYTES_PER_WEIGHT = 12  # in a checkpoint: the weight and up to two optimizer values, in fp32
# On a GPU, the first evaluation compiles a graph without gradients. Its time, as a fraction of the
# time of the first step, which compiles forward and backward.
EVALUATION_COMPILATION = 0.5


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
    """Return the largest number of steps, at least 1, that reads each row at most `epochs` times.

    Infinite if no row repeats.
    """
    if loader.rows_per_epoch == math.inf:
        return math.inf
    return max(1, epochs * loader.rows_per_epoch // loader.batch_size)


class TimeBudget:
    """Fits the number of steps to `max_minutes`, for the first time after a tenth of that time.

    Until then, an estimate sets the learning rates. The number is refitted later if the speed has
    changed enough to affect the schedule. A schedule with a constant phase, such as WSD, starts its
    decay when the limit requires it. `schedule` maps a step and the number of steps to a multiple
    of the peak rate; `bound` is the number of steps without a time limit. Time is reserved for the
    remaining evaluations, saves and samples.
    """

    def __init__(
        self,
        settings: Settings,
        corpus: Corpus,
        ranks: DistEnv,
        clock: Clock,
        *,
        schedule: Callable[[int, float], float],
        is_compiled: bool,
        bound: float,
        num_parameters: int,
    ):
        self.settings = settings
        self.corpus = corpus
        self.ranks = ranks
        self.clock = clock
        self.schedule = schedule
        self.is_compiled = is_compiled
        self.bound = bound
        self.num_parameters = num_parameters
        self.has_limit = settings.max_minutes is not None
        self.limit = 60 * settings.max_minutes if self.has_limit else math.inf  # seconds
        self.is_fitted = False
        self.is_frozen = False  # whether an earlier process has fitted the number of steps
        self.said_steps = bound  # last reported end of the run
        self.first_step: int | None = None  # steps after this one are timed
        self.compile_seconds = 0.0  # duration of the first step, if it compiles
        self.last_time = 0.0  # training time at the last step
        # (step, seconds of training) of recent steps, over about a tenth of the limit.
        self.times: deque[tuple[int, float]] = deque()
        self.start_timing()

    @property
    def is_open(self) -> bool:
        """Whether the number of steps has not been fitted yet."""
        return self.has_limit and not self.is_fitted

    def start_timing(self) -> None:
        """Time the first step from now on, without the time of earlier processes."""
        self.last_time = self.clock.training()

    def mark_fitted(self) -> None:
        """Keep the number of steps fitted by an earlier process, regardless of the speed."""
        self.is_fitted = True
        self.is_frozen = True

    def check_time_left(self, progress: Progress) -> None:
        """Exit with code 2 if the earlier processes of an unfinished run have used up the limit."""
        if self.is_open and not progress.is_finished and self.seconds_left() == 0:
            minutes = self.clock.total() / 60
            errors.exit_with(
                errors.INPUT,
                f"no time is left for training (max_minutes={self.settings.max_minutes:g} includes "
                f"earlier processes, and the run has taken {minutes:.1f} minutes). fix: "
                f"max_minutes={math.ceil(minutes + self.settings.max_minutes)}, or steps=N "
                "max_minutes=null",
            )

    def fit(self, progress: Progress) -> bool:
        """Re-estimate how many steps fit into `max_minutes`, and update their number if needed.

        Returns True after the step at which the number of steps is fitted for the first time.
        """
        if not self.has_limit or self.is_frozen or progress.is_finished:
            return False
        if self.is_fitted and progress.step % self.check_interval(progress) != 0:
            return False
        steps_left, is_final = self.ranks.on_rank0(self.count_steps, progress)
        if steps_left is None:
            return False
        last_step = progress.step + max(0, int(steps_left))
        steps = min(self.bound, last_step)

        # Once fitted, the number changes only if the change affects the schedule.
        if self.is_fitted:
            if self.is_outdated(progress, steps):
                progress.total_steps = steps
                self.say_new_end(steps)
            return False

        progress.expected_steps = steps
        if is_final:
            progress.total_steps = steps
            self.is_fitted = True
            self.said_steps = steps
            limit = f"max_minutes={self.settings.max_minutes:g}"
            say(f"{limit} leaves time for {last_step} steps: the run ends at step {steps}")
            if last_step < min(FEW_STEPS, self.bound):
                say(
                    f"warning: too few steps to train a useful model ({last_step}). fix: increase "
                    f"max_minutes, reduce batch_tokens (now {self.settings.batch_tokens}), or use "
                    "a smaller model"
                )
        return is_final

    def say_new_end(self, steps: int) -> None:
        """Report the new end of the run, unless it is close to the last reported end."""
        if abs(steps - self.said_steps) > SAID_TOLERANCE * self.said_steps:
            self.said_steps = steps
            say(
                f"the speed has changed: the run now ends at step {steps}, to fit "
                f"max_minutes={self.settings.max_minutes:g}"
            )

    def expected_end(self, progress: Progress) -> float:
        """Return the step at which the run is expected to end; infinite if unknown."""
        if not self.is_open or progress.is_finished:
            return progress.total_steps
        # Until steps are timed, `max_minutes` may end the run at any step.
        return progress.expected_steps if len(self.times) > 1 else math.inf

    def check_interval(self, progress: Progress) -> int:
        """Return the number of steps between two checks of the fitted number of steps."""
        return max(1, progress.total_steps // CHECKS)

    def is_outdated(self, progress: Progress, steps: int) -> bool:
        """Return whether the run should end at `steps` instead of the previously fitted step.

        True if all of these hold: the number changes by more than TOLERANCE; at the next check, it
        would be too late, because the two schedules already differ or one of the two ends has
        passed; and the new schedule does not raise the learning rate.
        """
        difference = abs(steps - progress.total_steps)
        next_check = progress.step + self.check_interval(progress)
        fitted = self.schedule(next_check, progress.total_steps)
        refitted = self.schedule(next_check, steps)
        last = self.schedule(progress.step - 1, progress.total_steps)  # of the step just taken
        is_large = difference > TOLERANCE * progress.total_steps
        is_urgent = refitted != fitted or min(steps, progress.total_steps) <= next_check
        return is_large and is_urgent and refitted <= last

    def count_steps(self, progress: Progress) -> tuple[float | None, bool]:
        """Return (steps left, is_final) after a step; (None, False) until a step is timed.

        Steps are timed for a tenth of the limit, or until half of the limit has passed. A single
        step that takes a tenth of the limit is enough, unless it compiles.
        """
        step = progress.step
        now = self.clock.training()
        step_seconds = now - self.last_time
        self.last_time = now
        duration = TIMED_FRACTION * self.limit
        compiles = self.is_compiled and self.first_step is None
        if self.first_step is None:
            self.first_step = step - 1 + UNTIMED_STEPS
            if compiles:
                self.compile_seconds = step_seconds
                # An evaluation before the first step did not compile, so its time does not count.
                self.clock.forget("evaluation")
        if step < self.first_step:
            if step_seconds < duration or compiles:
                return None, False
            return self.count_steps_left(progress, step_seconds), True

        # Keep one time that is at least a tenth of the limit ago, or else the first time.
        self.times.append((step, now))
        while len(self.times) > 2 and now - self.times[1][1] >= duration:
            self.times.popleft()
        timed_from, start = self.times[0]
        if step == timed_from:
            return None, False
        seconds = max(1e-6, now - start)
        is_final = seconds >= duration or self.clock.total() >= 0.5 * self.limit
        return self.count_steps_left(progress, seconds / (step - timed_from)), is_final

    def count_steps_left(self, progress: Progress, step_seconds: float) -> float:
        """Return how many steps, with evaluations, samples and saves, fit into the time left."""
        settings = self.settings
        seconds_left = self.seconds_left()
        eval_tokens = progress.eval_tokens
        if eval_tokens is None:
            expected_steps = progress.step + seconds_left / step_seconds
            eval_tokens = count_eval_tokens(settings, self.corpus, expected_steps)
        eval_seconds = EVALUATION_COST * eval_tokens / settings.batch_tokens * step_seconds
        sample_seconds = self.clock.pauses.get("sample")
        if sample_seconds is None:
            sample_seconds = SAMPLE_TOKENS * settings.model["depth"] * LAYER_SECONDS
        save_seconds = self.clock.pauses.get("save")
        if save_seconds is None:
            save_seconds = BYTES_PER_WEIGHT * self.num_parameters / SAVED_BYTES_PER_SECOND

        # The end of the run adds one evaluation, sample and save. RESERVED_SECONDS, for the last
        # save and sample, have already been subtracted from the seconds left.
        seconds_left -= eval_seconds + max(0.0, sample_seconds + save_seconds - RESERVED_SECONDS)
        if self.ranks.device.type == "cuda" and "evaluation" not in self.clock.pauses:
            seconds_left -= EVALUATION_COMPILATION * self.compile_seconds
        seconds_per_step = (
            step_seconds
            + eval_seconds / settings.eval_every
            + sample_seconds / settings.sample_every
            + save_seconds / settings.save_every
        )
        return seconds_left / seconds_per_step

    def seconds_left(self) -> float:
        """Return the seconds left for steps and the evaluations, samples and saves among them."""
        left = self.limit - self.clock.total()
        return max(0.0, (1 - SAFETY_MARGIN) * left - RESERVED_SECONDS)

    def time_to_end(self, progress: Progress, tokens_per_second: float | None) -> float:
        """Return the seconds to the last step at this speed; infinite if the speed is unknown."""
        seconds = math.inf
        if tokens_per_second is not None:
            steps_left = progress.total_steps - progress.step
            seconds = steps_left * self.settings.batch_tokens / tokens_per_second
        # Before the number of steps is fitted, the clock may end the run earlier.
        if self.is_open:
            seconds = min(seconds, self.seconds_left())
        return seconds
