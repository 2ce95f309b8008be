"""How many optimizer steps fit into max_minutes."""

WARMUP_STEPS = 3  # steps that fill caches, and are not timed
TIMED_FRACTION = 0.1  # of the time left, during which steps are timed
RESERVED_SECONDS = 5.0  # for the last checkpoint, sample and plot
SAFETY_MARGIN = 0.03  # of the time left, for a machine that slows down


class TimeBudget:
    """Times the first steps of a process, then says how many more there is time for.

    `evaluation_steps` is the number of training steps that take as long as one evaluation of the
    whole text, and `evaluation_share` the largest share of a training step that is spent on
    evaluation for each step.
    """

    def __init__(
        self,
        max_minutes: float,
        *,
        eval_every: int,
        evaluation_steps: float,
        evaluation_share: float,
    ):
        self.limit = 60 * max_minutes  # seconds
        self.eval_every = eval_every
        self.evaluation_steps = evaluation_steps
        self.evaluation_share = evaluation_share
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

        # In steps: what is left, less the last evaluation, which comes on top of the regular ones.
        left = (1 - SAFETY_MARGIN) * left - RESERVED_SECONDS
        left /= timed / (steps - WARMUP_STEPS)
        evaluated = (left - self.evaluation_steps) / (1 + self.evaluation_steps / self.eval_every)
        # Evaluations of a part of the text take their share.
        return max(1, int(evaluated), int(left / (1 + self.evaluation_share)))
