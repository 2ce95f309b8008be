"""Says before training how long a comparison takes, and how large a difference it can find."""

import math
from contextlib import suppress
from statistics import mean, variance

from scipy.optimize import brentq
from scipy.stats import nct
from scipy.stats import t as student_t

from common import hardware
from common.errors import IntegrityError
from common.progress import duration
from tools import bench
from tools.compare.jobs import Job, visible_gpus
from tools.compare.plan import meta_model
from tools.compare.runs import Run
from tools.compare.statistics import LEVEL, paired_differences

POWER = 0.8  # the chance of finding a difference of the size that is told
# Standard deviation of paired differences in bits per byte, where the runs have none: the root
# mean square over the eight variants of "Which attention, at a quarter of a million parameters"
# in docs/results.md.
PUBLISHED_SPREAD = 0.0106


def forecast(task: str, jobs: list[Job]) -> str:
    """Says in a line how long the jobs of a task will take, and what they can show."""
    runs = []
    for job in jobs:
        with suppress(IntegrityError):  # there is none yet
            runs.append(Run.read(job.run_dir))
    runs = [run for run in runs if run.done]
    seconds = seconds_left(jobs, runs)
    time = f"unknown time left until {jobs[0].run_dir.name} has trained"
    if seconds is not None:
        time = f"about {duration(seconds)} left"
    counts = f"{len(jobs)} runs, {len(runs)} finished"
    return f"{task}: {counts}, {time}; {difference_text(task, jobs, runs)}"


def seconds_left(jobs: list[Job], runs: list[Run]) -> float | None:
    """Predicts the seconds of the jobs without a finished run; None where that is unknown.

    All are expected to train on equally many tokens, in the time that their FLOPs take.
    """
    flops = {job.run_dir: meta_model(job.settings).training_flops() for job in jobs}
    total_flops = sum(flops.values())
    finished_flops = sum(flops[run.folder] for run in runs)
    if runs:
        seconds_per_flop = sum(run.last["seconds"] for run in runs) / finished_flops
    else:
        seconds = baseline_seconds(jobs[0].settings)
        if seconds is None:
            return None
        seconds_per_flop = seconds / flops[jobs[0].run_dir]
    num_parallel = len(visible_gpus(jobs[0].settings["device"]))
    return seconds_per_flop * (total_flops - finished_flops) / num_parallel


def baseline_seconds(settings: dict) -> float | None:
    """The time limit of a run, or what its steps take by the measured rates of this CPU if less.

    None without a limit on a GPU, for an attention of many kernels, and where epochs end the run.
    """
    bounds = []
    if settings["max_minutes"] is not None:
        bounds.append(60 * settings["max_minutes"])
    if settings["steps"] is not None and hardware.pick_device(settings["device"]).type == "cpu":
        with suppress(ValueError):  # not a fused kernel
            step_seconds = bench.predicted_seconds(settings, bench.matmul_flops(2048))
            bounds.append(settings["steps"] * step_seconds)
    return min(bounds, default=None)


def difference_text(task: str, jobs: list[Job], runs: list[Run]) -> str:
    """Says how large a true difference to the baseline the verdict of a variant finds."""
    num_variants = len({job.settings["name"] for job in jobs})
    num_seeds = len({job.settings["seed"] for job in jobs})
    if num_variants == 1 or num_seeds == 1:
        return "no verdicts, which need two variants and two seeds"
    difference = detectable_difference(num_seeds, num_variants - 1)
    size = f"{difference:.1f} standard deviations of paired differences"
    spread = paired_spread(task, jobs[0].settings["name"], runs)
    if spread is not None:
        size = f"{difference * spread:.4f} ({size} of finished runs)"
    elif task == "text":
        size = f"{difference * PUBLISHED_SPREAD:.4f} bits per byte ({size} in docs/results.md)"
    return f"difference that is found with a power of {POWER:.0%}: {size}"


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


def paired_spread(task: str, baseline: str, runs: list[Run]) -> float | None:
    """Returns the standard deviation of paired differences; None without a variant of 3 pairs."""
    values = {}
    for run in runs:
        value = run.loss if task == "text" else run.last[f"{task}_accuracy"]
        values.setdefault(run.settings["name"], {})[run.seed] = value
    base = values.pop(baseline, {})
    differences = [paired_differences(base, others) for others in values.values()]
    variances = [variance(each) for each in differences if len(each) >= 3]
    return math.sqrt(mean(variances)) if variances else None
