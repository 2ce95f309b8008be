"""Learning-rate schedules, which map a step to a multiple of the peak rate.

`steps` is the length of the run; while this is unknown, it is an upper limit, which may be
infinite. In a short run, the warm-up takes at most a fifth of the steps.
"""

from math import cos, inf, pi

from run.ranges import Fraction, NonNegativeFloat, NonNegativeInt

MAX_WARMUP = 0.2  # of all steps


def limit_warmup(warmup: int, steps: float) -> int:
    """Return the length of the warm-up in a run of `steps` steps."""
    if steps == inf:
        return warmup
    return min(warmup, int(MAX_WARMUP * steps))


def cosine(step: int, steps: float, *, warmup: NonNegativeInt, floor: NonNegativeFloat) -> float:
    """Warm up linearly, then fall along half a cosine to `floor`. Loshchilov, 1608.03983."""
    warmup = limit_warmup(warmup, steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    decay = 0.5 * (1 + cos(pi * min(1.0, progress)))
    return floor + (1 - floor) * decay


def wsd(
    step: int, steps: float, *, warmup: NonNegativeInt, cooldown: Fraction, floor: NonNegativeFloat
) -> float:
    """Warm up, stay at the peak, then fall linearly to `floor`. WSD: Hägele, 2405.18392.

    `cooldown` is the fraction of all steps during which the rate falls.
    """
    warmup = limit_warmup(warmup, steps)
    if step < warmup:
        return (step + 1) / warmup
    if cooldown == 0:
        return 1.0
    remaining = 1 - step / steps
    decay = min(1.0, remaining / cooldown)
    return floor + (1 - floor) * decay
