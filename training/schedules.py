"""Learning-rate schedules: from a step to a multiple of the peak rate. `steps` may be infinite: not known yet."""

from math import cos, pi


def cosine(step: int, steps: float, *, warmup: int, floor: float) -> float:
    """Linear over `warmup` steps to 1, then half a cosine down to `floor` at `steps`. Loshchilov, 1608.03983."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + cos(pi * min(1.0, progress)))


def wsd(step: int, steps: float, *, warmup: int, cooldown: float, floor: float) -> float:
    """Warm up, stay, go down in a line to `floor` over the last `cooldown` of all steps. Hägele, 2405.18392."""
    if not 0 <= cooldown <= 1:
        raise ValueError(
            f"schedule.cooldown is a share of all steps, from 0 to 1 (got {cooldown}). fix: 0.6"
        )
    if step < warmup:
        return (step + 1) / warmup
    left = (1 - step / steps) / cooldown if cooldown else 1.0
    return floor + (1 - floor) * min(1.0, left)
