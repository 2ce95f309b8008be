"""Says before training how long a comparison takes, and how large a difference it can find."""

import math
from contextlib import suppress

from scipy.optimize import brentq
from scipy.stats import nct
from scipy.stats import t as student_t

from run.errors import IntegrityError
from run.progress import duration
from tools.compare.jobs import Job, visible_gpus
from tools.compare.plan import meta_model
from tools.compare.runs import Run
from tools.compare.statistics import LEVEL

POWER = 0.8  # the chance of finding a difference of the size that is told
# Standard deviation of paired differences in bits per byte: the root mean square over the eight
# variants of "Nine of them, trained for twice as long" in docs/results.md.
PUBLISHED_SPREAD = 0.0106


def forecast(task: str, jobs: list[Job]) -> str:
    """Says in a line how long the jobs of a task will take, and what they can show."""
    seconds = seconds_left(jobs)
    time = f"time unknown until {jobs[0].run_dir.name} has trained"
    if seconds is not None:
        time = f"about {duration(seconds)} left"

    num_variants = len({job.settings["name"] for job in jobs})
    num_seeds = len({job.settings["seed"] for job in jobs})
    difference = "no verdicts, which need two variants and two seeds"
    if num_variants > 1 and num_seeds > 1:
        size = detectable_difference(num_seeds, num_variants - 1)
        difference = f"{POWER:.0%} power for a difference of {size:.1f} standard deviations"
        if task == "text":
            difference += f" ({size * PUBLISHED_SPREAD:.4f} bits per byte in docs/results.md)"
    return f"{task}: {len(jobs)} runs, {time}; {difference}"


def seconds_left(jobs: list[Job]) -> float | None:
    """Predicts the seconds of the jobs without a finished run; None where that is unknown.

    The first job takes the time that it took, or else its limit; the others train on as many
    tokens, in the time that their FLOPs take.
    """
    finished = {}
    for job in jobs:
        with suppress(IntegrityError):  # there is none yet
            run = Run.read(job.run_dir)
            if run.done:
                finished[job.run_dir] = run

    # Scale the time of the baseline by the FLOPs of all that is left.
    baseline = jobs[0]
    if baseline.run_dir in finished:
        seconds = finished[baseline.run_dir].last["seconds"]
    elif baseline.settings["max_minutes"] is not None:
        seconds = 60 * baseline.settings["max_minutes"]
    else:
        return None
    flops = {job.run_dir: meta_model(job.settings).training_flops() for job in jobs}
    flops_left = sum(flops[run_dir] for run_dir in flops.keys() - finished.keys())
    num_parallel = len(visible_gpus(baseline.settings["device"]))
    return seconds * flops_left / flops[baseline.run_dir] / num_parallel


def detectable_difference(num_pairs: int, num_tests: int) -> float:
    """Returns the smallest true mean of paired differences that a t-test finds with POWER.

    It is in standard deviations of a paired difference. The test is the first of Holm's: that of
    a variant which alone differs. A mean of d makes the statistic follow the noncentral t
    distribution of noncentrality d sqrt(pairs) (Johnson and Welch, Biometrika 31, 1940).
    """
    degrees = num_pairs - 1
    critical = student_t.isf(LEVEL / num_tests / 2, degrees)
    noncentrality = brentq(lambda nc: nct.sf(critical, degrees, nc) - POWER, 0, 10 * critical)
    return noncentrality / math.sqrt(num_pairs)
