"""The runs of one task and model size, sorted by variant, and the verdicts on them."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import fmean, median

from tools.compare.runs import Groups, Run, group_by_variant
from tools.compare.statistics import Verdict, judge, solves_more_often, spreads_differ
from tools.compare.tuning import Losses, find_optimum, rate_losses

SOLVED = 0.9  # minimum accuracy of a run that has solved a task
# Texts in place of a verdict that is withheld.
AT_EDGE = "best rate at the edge"
DIVERGED = "seeds diverged"
# Properties that the runs of a task must share, and the keys that change them. If a comparison
# varies such a key, only runs with the same value of this key must share the property.
SHARED = {
    "text": ("vocab_size", "tokenizer"),
    "context": ("context",),
    "evaluated tokens": ("context", "vocab_size", "tokenizer"),
    "metric": (),
    "held-out bytes": ("context",),
}


@dataclass
class Comparison:
    """The runs of one task and model size, with additional facts about the variants.

    `baseline` is the variant that all others are compared with. `groups` is empty if no run of the
    baseline can be judged.
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
    def is_task(self) -> bool:
        return self.first.task != "text"

    @property
    def dim(self) -> int:
        return self.first.settings["model"]["dim"]

    def is_at_edge(self, name: str) -> bool:
        """Whether the best learning rate of a variant may be outside the tried range."""
        return name in self.losses and not find_optimum(self.losses[name]).is_inside

    def num_solved(self, name: str) -> int:
        return sum(run.loss >= SOLVED for run in self.groups[name])

    def num_seeds(self, name: str) -> int:
        """Return the number of seeds of a variant, including diverged ones."""
        return len(self.groups[name]) + self.diverged[name]

    def tokens_until_solved(self, name: str) -> float:
        """Return the median tokens to solve the task, over seeds that ever do; NaN if none does."""
        tokens = []
        for run in self.groups[name]:
            solved = [line["tokens"] for line in run.lines if line.get(run.metric, 0.0) >= SOLVED]
            tokens += solved[:1]
        return median(tokens) if tokens else math.nan


def sort_runs(runs: list[Run]) -> Comparison:
    """Sort the runs of a comparison by variant. The first run determines the baseline."""
    searches = defaultdict(list)
    diverged = Counter()
    judged = []
    for run in runs:
        if run.factor is not None:
            searches[run.name].append(run)
        elif run.has_diverged:
            diverged[run.name] += 1
        else:
            judged.append(run)
    losses = {name: rate_losses(members) for name, members in searches.items()}
    groups = group_by_variant(judged)
    baseline = runs[0].baseline or runs[0].name
    if runs[0].baseline is None and judged and judged[0] is runs[0]:
        # The group of the first run may be named after its folder.
        first_group, *_ = groups
        baseline = first_group
    if baseline not in groups:
        return Comparison({}, baseline, losses, diverged)
    comparison = Comparison(groups, baseline, losses, diverged)

    # Sort by the loss; on a task, by the share of seeds that solve it, then by the tokens needed.
    def rank(name: str) -> tuple[float, float]:
        if not comparison.is_task:
            return fmean(run.loss for run in groups[name]), 0.0
        tokens = comparison.tokens_until_solved(name)
        share = comparison.num_solved(name) / comparison.num_seeds(name)
        return -share, math.inf if math.isnan(tokens) else tokens

    comparison.groups = {name: groups[name] for name in sorted(groups, key=rank)}
    return comparison


def require_shared(runs: list[Run]) -> None:
    """Raise ValueError if runs of a task differ in a SHARED property that no comparison varies."""
    for name, keys in SHARED.items():
        places = {}  # value and folder of the first run, by the values of the varied keys
        for run in runs:
            if run.has_diverged:
                continue
            options = run.settings | run.settings["data"]
            swept = [key.rpartition(".")[2] for key in run.swept]
            varied = [str(options.get(key)) for key in keys if key in swept]
            shared = {
                "text": run.settings["text"],
                "context": run.settings["context"],
                "evaluated tokens": run.last.get("eval_tokens"),
                "metric": run.metric,
                "held-out bytes": run.held_out_bytes,
            }
            value, folder = places.setdefault(tuple(varied), (shared[name], run.folder))
            if shared[name] != value:
                raise ValueError(
                    f"these runs cannot be compared, because they differ in {name} ({value} in "
                    f"{folder}, {shared[name]} in {run.folder}). fix: report on them separately"
                )


def judge_losses(comparison: Comparison, margin: float) -> tuple[dict[str, Verdict], bool]:
    """Judge the variants by their losses on text; also return whether their spreads differ."""
    samples = {name: [run.loss for run in runs] for name, runs in comparison.groups.items()}
    baseline = samples.pop(comparison.baseline)
    verdicts = judge(baseline, samples, margin)
    return withhold_verdicts(verdicts, comparison), spreads_differ(baseline, samples)


def withhold_verdicts(verdicts: dict[str, Verdict], comparison: Comparison) -> dict[str, Verdict]:
    """Withhold a variant's verdict if its losses, or the baseline's losses, are unreliable.

    Either the best learning rate may be outside the range tried, or some seeds diverged, so that
    the remaining seeds are a biased sample.
    """
    remaining = {}
    for name, verdict in verdicts.items():
        pair = (name, comparison.baseline)
        text = verdict.text
        if any(map(comparison.is_at_edge, pair)):
            text = AT_EDGE
        if any(comparison.diverged[each] for each in pair):
            text = DIVERGED
        remaining[name] = verdict._replace(text=text)
    return remaining


def judge_task(comparison: Comparison) -> dict[str, str]:
    """Judge the variants by the number of seeds that solve a task; diverged seeds do not."""
    num_others = len(comparison.others)
    texts = {}
    for name in comparison.others:
        ours = (comparison.num_solved(name), comparison.num_seeds(name))
        theirs = (
            comparison.num_solved(comparison.baseline),
            comparison.num_seeds(comparison.baseline),
        )
        texts[name] = "cannot tell"
        if solves_more_often(*ours, *theirs, num_others):
            texts[name] = "better"
        elif solves_more_often(*theirs, *ours, num_others):
            texts[name] = "worse"
        if comparison.is_at_edge(name) or comparison.is_at_edge(comparison.baseline):
            texts[name] = AT_EDGE
    return texts
