"""The measures by which variants are compared, and their verdicts."""

import math
from collections.abc import Callable
from functools import partial
from statistics import fmean, median
from typing import NamedTuple

from run import checkpoint
from run.errors import IntegrityError, without_fix
from run.progress import say
from tools.compare.runs import RECORDS, Groups, Run
from tools.compare.statistics import LEVEL, Samples, Verdict, judge, spreads_differ
from tools.latency import MIN_CONTEXT, latencies
from tools.lengths import measure_lengths

NEAR_FLOOR = 0.05  # an accuracy this close to the floor is no better than guessing
SOLVED = 0.9  # minimum accuracy of a run that has solved a task


class Result(NamedTuple):
    """The values of one measure, and verdicts on them, by variant name; lower is better.

    `is_unequal` is true if the variants' spreads differ.
    """

    title: str
    samples: Samples
    verdicts: dict[str, Verdict]
    is_unequal: bool

    def cells(self, name: str) -> tuple[str, str, str]:
        """Return a variant's mean, its difference from the baseline, and its verdict."""
        if name not in self.samples:
            return "n/a", "", ""
        text = "baseline"
        difference = ""
        if name in self.verdicts:
            verdict = self.verdicts[name]
            text = verdict.text
            difference = with_interval(verdict.difference, verdict.low, verdict.high)
        return f"{fmean(self.samples[name]):.4f}", difference, text


def with_interval(difference: float, low: float, high: float) -> str:
    """Format a difference, with its interval if there is one."""
    text = f"{difference:+z.4f}"
    if not math.isnan(low):
        text += f" [{low:+z.4f}, {high:+z.4f}]"
    return text


def slice_loss(run: Run, name: str) -> float | None:
    """Return a slice's loss on held-out text in nats per token; None if it was not logged."""
    return run.last.get("slices", {}).get(name, {}).get("loss")


def length_change(run: Run) -> float | None:
    """Return how much the loss on the same targets rises at 4 times the training context."""
    if not run.lengths:
        return None
    return run.lengths["4"] - run.lengths["1"]


TEXT_PARTS = {  # parts of the loss that show differences between variants
    "repeated tokens, nats": partial(slice_loss, name="repeated"),
    "new tokens, nats": partial(slice_loss, name="new"),
    "4 x the context, nats more": length_change,
}


def evaluate(
    title: str,
    measure: Callable[[Run], float | None],
    groups: Groups,
    baseline: str,
    margin: float,
    num_measures: int = 1,
) -> Result:
    """Measure all runs, and judge the variants against the baseline if it has values.

    The significance level is divided by `num_measures`, the number of measures in one table.
    """
    samples = {}
    for name, runs in groups.items():
        values = [measure(run) for run in runs]
        if None not in values:
            samples[name] = values
    theirs = samples.get(baseline, [])
    others = {name: values for name, values in samples.items() if name != baseline}
    verdicts = {}
    if theirs:
        verdicts = judge(theirs, others, margin, LEVEL / num_measures)
    return Result(title, samples, verdicts, spreads_differ(theirs, others))


def num_solved(runs: list[Run]) -> int:
    return sum(run.loss >= SOLVED for run in runs)


def tokens_until_solved(runs: list[Run]) -> float:
    """Return the median number of tokens that a run needs to solve its task; NaN if no run does."""
    tokens = []
    for run in runs:
        for line in run.lines:
            if line.get(run.metric, 0.0) >= SOLVED:
                tokens.append(line["tokens"])
                break
    return median(tokens) if tokens else math.nan


def is_intact(run: Run) -> bool:
    """Whether a checkpoint of the run passes verification; if none does, print a line."""
    try:
        checkpoint.newest_checkpoint(run.folder)
    except IntegrityError as error:
        say(f"{run.folder.name}: {without_fix(error)}")
        return False
    return True


def measure_checkpoints(runs: list[Run]) -> None:
    """Measure longer contexts and decoding for runs that have a checkpoint but no such results.

    The measurements are stored in the records of the comparison.
    """
    judged = [run for run in runs if run.factor is None and run.has_checkpoint and run.lines]
    firsts = {}  # the first run of each variant of a task whose decoding is or can be measured
    for run in judged:
        key = (run.task, run.settings["name"])
        can_decode = run.settings["context"] >= MIN_CONTEXT
        if key not in firsts and can_decode and (run.decoding or is_intact(run)):
            firsts[key] = run
    measured = {}
    if not all(run.decoding for run in firsts.values()):
        measured = latencies({key: run.folder for key, run in firsts.items() if is_intact(run)})
    for key, milliseconds in measured.items():
        firsts[key].decoding = milliseconds

    changed = [firsts[key] for key in measured]
    texts = [run for run in judged if run.task == "text" and not run.lengths]
    for run in texts:
        try:
            run.lengths = measure_lengths(run.folder)
            changed.append(run)
        except (ValueError, IntegrityError) as error:
            say(f"{run.folder.name}: {without_fix(error)}")
    for run in changed:
        if (run.folder.parent / RECORDS).exists():
            run.append_to_records()
