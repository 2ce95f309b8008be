"""What variants are compared by, and the verdict on each of them."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from tools.compare.runs import Groups, Run
from tools.compare.statistics import Estimate, Verdict, compare_to_baseline, estimate
from tools.lengths import measure_lengths

METRIC = attrgetter("loss")


class Measure(NamedTuple):
    """A number of each run of a task. `value` raises ValueError, the reason, where there is none."""

    name: str
    unit: str
    task: str
    value: Callable[[Run], float]
    higher_is_better: bool = False
    decimals: int = 4
    least_spread: float = 0.0  # of differences: answers that are right or wrong tie by chance

    @property
    def title(self) -> str:
        return f"{self.name}, {self.unit}"


class Result(NamedTuple):
    """A measure of all variants by their names; `reasons` says why a variant has no value."""

    measure: Measure
    estimates: dict[str, Estimate]
    verdicts: dict[str, Verdict]
    reasons: dict[str, str]

    @property
    def best(self) -> str:
        """The variant with the best mean."""
        pick = max if self.measure.higher_is_better else min
        return pick(self.estimates, key=self.estimates.get, default="")

    def text(self, value: Estimate, sign: str = "") -> str:
        """An estimate with half of its interval, in as many digits as are meant to be read."""
        spec = f",.{self.measure.decimals}f"
        return f"{value.mean:{sign}{spec}} ± {value.ci95:{spec}}".replace("nan", "n/a")


def measures_of(tasks: dict[str, Groups]) -> list[Measure]:
    """Lists the measures of the tasks: what each is judged by, its parts, then the costs of one."""
    measures = []
    for task, groups in tasks.items():
        name = next(iter(groups.values()))[0].metric_name
        if task == "text":
            measures.append(Measure("Loss", name, task, METRIC))
        else:
            measures.append(Measure(name.capitalize(), "from 0 to 1", task, METRIC, True, 3, 0.005))
    if "text" in tasks:
        for name in ("repeated", "new"):
            loss = partial(slice_loss, name=name)
            measures.append(Measure(f"Loss of {name} tokens", "nats", "text", loss))
        measures.append(Measure("Length", "nats, 4 x - 1 x context", "text", length_change))
    cache = attrgetter("cache_bytes")
    speed = attrgetter("tokens_per_second")
    task = next(iter(tasks))
    measures.append(Measure("Cache", "bytes at full context", task, cache, False, 0))
    measures.append(Measure("Training speed", "tokens/s", task, speed, True, 0))
    return measures


def slice_loss(run: Run, name: str) -> float:
    """The loss of a slice of the held-out text in nats per token."""
    if "slices" not in run.last:
        raise ValueError("not logged")
    return run.last["slices"][name]["loss"]


def length_change(run: Run) -> float:
    """The loss of the same targets with 4 times the training context, less that with one."""
    lengths = measure_lengths(run.folder)
    for loss in (lengths["1"], lengths["4"]):
        if isinstance(loss, str):
            raise ValueError(loss)
    return lengths["4"] - lengths["1"]


def evaluate(measure: Measure, groups: Groups, baseline: str) -> Result:
    """Measures all runs and tests the variants against the baseline, if that has a value."""
    values = {}
    reasons = {}
    for name, runs in groups.items():
        try:
            values[name] = {run.seed: measure.value(run) for run in runs}
        except ValueError as error:
            reasons[name] = str(error).partition(". fix: ")[0]
    estimates = {name: estimate([*by_seed.values()]) for name, by_seed in values.items()}
    verdicts = {}
    if baseline in values:
        verdicts = compare_to_baseline(
            values.pop(baseline),
            values,
            higher_is_better=measure.higher_is_better,
            least_spread=measure.least_spread,
        )
    return Result(measure, estimates, verdicts, reasons)
