"""What variants are compared by, and the verdict on each of them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from run.errors import without_fix
from run.progress import waiting
from tools.compare.runs import Groups, Run
from tools.compare.statistics import Estimate, Verdict, compare_to_baseline, estimate
from tools.lengths import measure_lengths

# Answers that are right or wrong tie by chance, so that few seeds seem to agree exactly.
LEAST_SPREAD = 0.005  # of differences of accuracies
NEAR_CHANCE = 0.05  # above the accuracy of guessing; in bf16, close logits tie


class Result(NamedTuple):
    """A measure of all variants by their names; `reasons` says why a variant has no value.

    An accuracy has a `chance`, that of guessing.
    """

    title: str
    estimates: dict[str, Estimate]
    best: str
    verdicts: dict[str, Verdict]
    reasons: dict[str, str]
    chance: float | None


def slice_loss(run: Run, name: str) -> float:
    """The loss of a slice of the held-out text in nats per token."""
    if "slices" not in run.last:
        raise ValueError("not logged")
    return run.last["slices"][name]["loss"]


def length_change(run: Run) -> float:
    """The loss of the same targets with 4 times the training context, less that with one."""
    lengths = measure_lengths(run.folder)
    return lengths["4"] - lengths["1"]


# Parts of the loss on text that tell variants apart. They raise ValueError, the reason, where a run
# has none.
TEXT_MEASURES = {
    "repeated tokens, nats": partial(slice_loss, name="repeated"),
    "new tokens, nats": partial(slice_loss, name="new"),
    "4 x the context, nats more": length_change,
}


def evaluate(
    title: str,
    measure: Callable[[Run], float],
    groups: Groups,
    baseline: str,
    chance: float | None = None,
) -> Result:
    """Measures all runs and tests the variants against the baseline, if that has a value.

    Of accuracies, none is the best where all are near `chance`.
    """
    values = {}
    reasons = {}
    with waiting(f"measuring {title}", len(groups)) as bar:
        for name, runs in groups.items():
            try:
                values[name] = {run.seed: measure(run) for run in runs}
            except ValueError as error:
                reasons[name] = without_fix(error)
            bar.update()
    estimates = {name: estimate([*by_seed.values()]) for name, by_seed in values.items()}
    is_accuracy = chance is not None
    pick = max if is_accuracy else min
    best = pick(estimates, key=estimates.get, default="")
    if is_accuracy:
        title = f"{title} (chance {chance:.3f})"
        if estimates[best].mean < chance + NEAR_CHANCE:
            best = ""

    verdicts = {}
    if baseline in values:
        verdicts = compare_to_baseline(
            values.pop(baseline),
            values,
            higher_is_better=is_accuracy,
            least_spread=LEAST_SPREAD if is_accuracy else 0.0,
        )
    return Result(title, estimates, best, verdicts, reasons, chance)
