"""The runs of one task and model size, sorted by variant, and the verdicts on them."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from tools.compare.measures import Result, evaluate
from tools.compare.runs import Groups, Run, group_by_variant
from tools.compare.statistics import Verdict
from tools.compare.tuning import Losses, find_optimum, rate_losses

# Verdicts that are withheld.
AT_EDGE = "best rate at the edge"
DIVERGED = "seeds diverged"


@dataclass
class Comparison:
    """The runs of one task and model size, with additional facts about the variants.

    `baseline` is the name of the variant that all others are compared with. `groups` is empty if
    no run of the baseline can be judged.
    """

    groups: Groups  # the judged runs of each variant; the best variant first
    baseline: str
    losses: dict[str, Losses]  # for each variant whose learning rates were searched
    diverged: Counter  # number of diverged seeds by variant

    @property
    def first(self) -> Run:
        """The first run of the baseline."""
        return self.groups[self.baseline][0]

    @property
    def others(self) -> list[str]:
        """The variants except the baseline, best first."""
        return [name for name in self.groups if name != self.baseline]

    @property
    def at_edge(self) -> set[str]:
        """The variants whose best learning rate may be outside the tried range."""
        names = set()
        for name, losses in self.losses.items():
            if not find_optimum(losses).is_inside:
                names.add(name)
        return names

    def num_diverged(self, name: str) -> int:
        return self.diverged[stem(name)]


def stem(name: str) -> str:
    """Remove the settings that were appended to a variant's name to make it unique."""
    return name.partition(" ")[0]


def sort_runs(runs: list[Run]) -> Comparison:
    """Sort the runs of a comparison by variant. The first run determines the baseline."""
    searches = defaultdict(list)
    diverged = Counter()
    judged = []
    for run in runs:
        if run.factor is not None:
            searches[run.settings["name"]].append(run)
        elif run.has_diverged:
            diverged[run.settings["name"]] += 1
        else:
            judged.append(run)
    losses = {name: rate_losses(members) for name, members in searches.items()}

    # The first group is the baseline, whose name may be longer than the name of its runs.
    baseline = runs[0].baseline or runs[0].settings["name"]
    judged.sort(key=lambda run: run.settings["name"] != baseline)
    if not judged or judged[0].settings["name"] != baseline:
        return Comparison({}, baseline, losses, diverged)
    groups = group_by_variant(judged)
    baseline = next(iter(groups))  # groups are in the order of the runs
    means = {name: fmean(run.loss for run in members) for name, members in groups.items()}
    is_accuracy = judged[0].floor is not None
    best_first = sorted(means, key=means.get, reverse=is_accuracy)
    return Comparison({name: groups[name] for name in best_first}, baseline, losses, diverged)


def judge_measure(
    comparison: Comparison,
    title: str,
    measure: Callable[[Run], float | None],
    margin: float,
    num_measures: int = 1,
) -> Result:
    """Measure all runs, and judge the variants except those whose verdict is withheld."""
    result = evaluate(title, measure, comparison.groups, comparison.baseline, margin, num_measures)
    return result._replace(verdicts=withhold_verdicts(result.verdicts, comparison))


def withhold_verdicts(verdicts: dict[str, Verdict], comparison: Comparison) -> dict[str, Verdict]:
    """Withhold a variant's verdict if it or the baseline may not have been at its best.

    Either the best learning rate may be outside the range tried, or some seeds diverged, so that
    the remaining seeds are a biased sample.
    """
    outside = comparison.at_edge
    remaining = {}
    for name, verdict in verdicts.items():
        pair = {stem(name), stem(comparison.baseline)}
        text = verdict.text
        if pair & outside:
            text = AT_EDGE
        if pair & comparison.diverged.keys():
            text = DIVERGED
        remaining[name] = verdict._replace(text=text)
    return remaining
