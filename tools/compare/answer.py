"""Say in plain sentences which variant to choose, and how certain this choice is."""

import math
from collections import defaultdict
from typing import NamedTuple

from run.progress import duration
from tools.compare.comparison import AT_EDGE, DIVERGED, Comparison, stem
from tools.compare.measures import NEAR_FLOOR, SOLVED, Result, num_solved, tokens_until_solved
from tools.compare.runs import Run
from tools.compare.statistics import seeds_to_decide, solves_more_often

# The minimum for a decision. With fewer seeds, only large differences are found. With fewer tokens,
# the ranking may change with more training; 20 tokens per parameter are compute-optimal (Hoffmann
# et al., 2203.15556).
MIN_SEEDS = 3
MIN_TOKENS = 10  # per parameter
MAX_EPOCHS = 4  # passes over a text
# The sentence for the variants with each verdict; {margin} includes its unit.
CLAUSES = {
    "better": "Also better than {baseline}: {names}; which of them is best was not tested.",
    "as good": "As good (at most {margin} worse): {names}.",
    "worse": "Worse: {names}.",
    "cannot tell": "Undecided, which does not mean equal: {names}.",
    "cannot tell: one seed": "Undecided, because one seed has no spread: {names}.",
    "cannot tell: no spread": "Undecided, because all seeds gave the same value: {names}.",
    AT_EDGE: "No verdict, because the best learning rate may lie outside the range tried: {names}.",
    DIVERGED: "No verdict, because training diverged with some seeds: {names}.",
}


class Answer(NamedTuple):
    """The answer at the beginning of a report."""

    headline: str  # one sentence
    remarks: list[str]  # requirements for a reliable answer, and the costs of the variant
    verdicts: list[str]  # sentences about the other variants

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.remarks, *self.verdicts])


class Gaps(NamedTuple):
    """The data that are missing for a decision."""

    data: list[str]  # each shortage as text, such as "1 of 3 seeds"
    remedies: list[str]  # actions that would close all gaps
    has_untuned: bool  # whether learning rates are untuned


def answer_losses(comparison: Comparison, result: Result, margin: float) -> Answer:
    """Return the answer that follows from the verdicts on the variants' losses."""
    baseline = comparison.baseline
    verdicts = result.verdicts
    gaps = find_gaps(comparison, MIN_SEEDS)
    better = [name for name in comparison.others if verdicts[name].text == "better"]
    remarks = describe_missing(gaps)
    if not verdicts:
        headline = f"{baseline} is the only variant: there is nothing to compare it with."
    elif better:
        best = better[0]
        claim = f"loss is lower than {baseline}'s by {describe_gain(comparison, best, result)}."
        headline = f"Take {best}: its {claim}"
        if gaps.remedies:
            headline = f"Only a hint: {best}'s {claim}"
        remarks.append(describe_cost(comparison, best))
    elif gaps.data:
        lowest = next(iter(comparison.groups))
        headline = (
            f"Too little data to choose: {', '.join(gaps.data)}; "
            f"{lowest} has the lowest loss so far, which may be chance."
        )
    elif all(verdict.text in (AT_EDGE, DIVERGED) for verdict in verdicts.values()):
        headline = f"No verdict on any variant compared with {baseline}."
        if stem(baseline) in comparison.at_edge:
            headline = (
                f"No verdict: the best learning rate of {baseline}, the baseline, may lie outside "
                "the range that was tried."
            )
        if comparison.num_diverged(baseline):
            headline = (
                f"No verdict: training of {baseline}, the baseline, diverged with "
                f"{count(comparison.num_diverged(baseline), 'seed')}."
            )
    else:
        headline = f"No variant is better than {baseline} for certain."
        if gaps.has_untuned:
            headline = (
                f"No variant is better than {baseline} for certain, at learning rates that were "
                "not tuned."
            )
    clauses = verdict_clauses(comparison, result, margin, without=better[:1])
    return Answer(headline, remarks, clauses)


def answer_accuracies(comparison: Comparison) -> Answer:
    """Base the answer on how many seeds solve a task, because a mean accuracy is not meaningful."""
    groups = comparison.groups
    baseline = comparison.baseline
    task = comparison.first.task
    totals = {name: len(runs) + comparison.num_diverged(name) for name, runs in groups.items()}
    solved = {name: num_solved(runs) for name, runs in groups.items()}

    # Sort by the share of seeds that solve the task, then by the tokens that they need.
    def rank(name: str) -> tuple[float, float]:
        tokens = tokens_until_solved(groups[name])
        return -solved[name] / totals[name], math.inf if math.isnan(tokens) else tokens

    ranking = sorted(groups, key=rank)
    top = ranking[0]
    better = []
    for name in ranking:
        counts = (solved[name], totals[name], solved[baseline], totals[baseline])
        if name != baseline and solves_more_often(*counts, len(comparison.others)):
            better.append(name)

    def of_seeds(name: str) -> str:
        return f"{solved[name]} of {totals[name]}"

    can_be_better = solved[baseline] < totals[baseline] or totals[baseline] < MIN_SEEDS
    gaps = find_gaps(comparison, max(MIN_SEEDS, seeds_to_decide(len(comparison.others))))
    at_edge = [name for name in groups if stem(name) in comparison.at_edge]
    if at_edge:  # in a comparison of losses, these verdicts are withheld
        names = ", ".join(at_edge)
        gaps.remedies.append(
            f"a wider range of learning rates for {names} (the best one is at the edge)"
        )
    ours = f"{of_seeds(baseline)} seeds of {baseline}"
    if not comparison.others:
        headline = f"{baseline} is the only variant: there is nothing to compare it with."
    elif better:
        claim = (
            f"{of_seeds(top)} seeds solve {task} (at least {percent(SOLVED)} accuracy), "
            f"compared with {ours}; this difference is significant (Fisher's exact test at 5 %)."
        )
        headline = f"Take {top}: {claim}"
        if gaps.remedies:
            headline = f"Only a hint, for {top}: {claim}"
    elif solved[top] == 0:
        headline = f"No variant solves {task}: no seed reaches {percent(SOLVED)} accuracy."
    elif not can_be_better:
        headline = (
            f"Keep {baseline}: {of_seeds(baseline)} seeds solve {task} (at least {percent(SOLVED)} "
            "accuracy), and no variant can do better."
        )
        # The variant with the smallest cache among those that also solve the task with all seeds.
        equal = [name for name in ranking if solved[name] == totals[name]]
        smallest = min(equal, key=lambda name: cache_share(comparison, name))
        share = cache_share(comparison, smallest)
        if share < 1:
            headline = (
                f"{baseline} solves {task} with all seeds ({of_seeds(baseline)}, at least "
                f"{percent(SOLVED)} accuracy), and so does {smallest} ({of_seeds(smallest)}), with "
                f"{percent(share)} of the cache size."
            )
    elif gaps.data:
        headline = f"Too little data to choose: {', '.join(gaps.data)}."
    else:
        headline = f"No variant solves {task} more often than {baseline} for certain."

    texts = []
    for name in ranking:
        text = f"{name} {of_seeds(name)}"
        if solved[name] == totals[name]:
            text += describe_smaller_cache(comparison, name)
        if max(run.loss for run in groups[name]) < comparison.first.floor + NEAR_FLOOR:
            text += " (no better than guessing)"
        texts.append(text)
    clauses = [f"Seeds that solve {task}: {', '.join(texts)}."]
    if len(better) > 1:
        clauses.insert(0, CLAUSES["better"].format(baseline=baseline, names=", ".join(better[1:])))
    return Answer(headline, describe_missing(gaps) if can_be_better else [], clauses)


def find_gaps(comparison: Comparison, min_seeds: int) -> Gaps:
    """Find the data that the runs lack, judged by the variant that has the least."""
    groups = comparison.groups
    firsts = [runs[0] for runs in groups.values()]
    data = []
    remedies = []

    seeds = min(map(len, groups.values()))
    if seeds < min_seeds:
        numbers = ",".join(map(str, range(min_seeds)))
        data.append(f"{seeds} of {min_seeds} seeds")
        remedies.append(f"{min_seeds} seeds per variant (seed={numbers})")

    tokens = []
    for runs in groups.values():
        tokens += [run.last["tokens"] for run in runs]
    if min(tokens) < max(tokens):
        data.append(f"some runs saw {min(tokens):,} tokens and others {max(tokens):,}")
        remedies.append("the same number of tokens for all runs")

    ratio = min(run.last["tokens"] / run.model.num_parameters() for run in firsts)
    # Rounded, because parameter counts are matched only to within 0.5%.
    if round(ratio, 1) < MIN_TOKENS and firsts[0].task == "text":
        data.append(f"{ratio:.2g} of {MIN_TOKENS} tokens per parameter")
        remedies.append(f"{MIN_TOKENS} tokens per parameter ({enough_tokens(firsts)})")

    # The default rates are scaled to the model and the run, but not tuned for the variant.
    untuned = []
    for name, runs in groups.items():
        if runs[0].settings["name"] not in comparison.losses:
            untuned.append(name)
    if untuned:
        names = "each variant" if len(untuned) == len(groups) else ", ".join(untuned)
        remedies.append(f"learning rates tuned for {names} (--tune)")
    return Gaps(data, remedies, bool(untuned))


def enough_tokens(runs: list[Run]) -> str:
    """Return overrides to train all models on MIN_TOKENS per parameter, and the time needed."""
    tokens = MIN_TOKENS * max(run.model.num_parameters() for run in runs)
    steps = math.ceil(tokens / runs[0].settings["batch_tokens"])
    text = f"steps={steps} max_minutes=null"
    seconds = tokens / min(run.tokens_per_second for run in runs)
    if math.isfinite(seconds):
        text += f", about {duration(seconds)} per run at this speed"
    # Up to four epochs on a text are nearly as good as training on new text (2305.16264).
    passes = max(tokens / run.last["tokens"] * run.last.get("epoch", 0.0) for run in runs)
    if passes > MAX_EPOCHS:
        text += f", but {passes:.0f} passes over this text: use a longer text or a smaller model"
    return text


def describe_missing(gaps: Gaps) -> list[str]:
    if not gaps.remedies:
        return []
    return [f"A reliable answer needs {'; '.join(gaps.remedies)}."]


def describe_gain(comparison: Comparison, name: str, result: Result) -> str:
    """Describe how much lower a variant's loss is, with the interval and the number of seeds."""
    verdict = result.verdicts[name]
    # Keep one significant digit of the bound nearest to zero, so that it is not rounded to zero.
    digits = min(8, max(3, math.ceil(-math.log10(-verdict.high))))
    seeds = count(len(comparison.groups[name]), "seed")
    theirs = len(comparison.groups[comparison.baseline])
    if theirs != len(comparison.groups[name]):
        seeds += f", {comparison.baseline} {theirs}"
    return (
        f"{-verdict.difference:.{digits}f} {result.title} (95 % interval "
        f"{-verdict.high:.{digits}f} to {-verdict.low:.{digits}f}; {seeds})"
    )


def describe_cost(comparison: Comparison, name: str) -> str:
    """Describe a variant's memory and compute, relative to the baseline."""
    ours = comparison.groups[name][0].model
    theirs = comparison.first.model
    flops = percent(ours.training_flops() / theirs.training_flops())
    cache = percent(cache_share(comparison, name))
    return (
        f"{name} needs {cache} of {comparison.baseline}'s cache and {flops} of its training FLOPs."
    )


def cache_share(comparison: Comparison, name: str) -> float:
    """Return a variant's cache size as a fraction of the baseline's cache size."""
    return comparison.groups[name][0].cache_bytes / comparison.first.cache_bytes


def describe_smaller_cache(comparison: Comparison, name: str) -> str:
    share = cache_share(comparison, name)
    return f" ({percent(share)} of the cache)" if share < 1 else ""


def verdict_clauses(
    comparison: Comparison, result: Result, margin: float, without: list[str]
) -> list[str]:
    """List the variants not in `without` by verdict, and note which caches are smaller."""
    by_text = defaultdict(list)
    for name in comparison.others:
        if name in without:
            continue
        text = result.verdicts[name].text
        words = name
        if text in ("better", "as good"):
            words += describe_smaller_cache(comparison, name)
        elif text == DIVERGED and comparison.num_diverged(name):
            words += f" ({count(comparison.num_diverged(name), 'seed')})"
        by_text[text].append(words)

    clauses = []
    for text, clause in CLAUSES.items():
        if text in by_text:
            names = ", ".join(by_text[text])
            size = f"{margin:g} {result.title}"
            clauses.append(clause.format(baseline=comparison.baseline, names=names, margin=size))
    judged = {stem(name) for name in comparison.groups}
    lost = [name for name in comparison.diverged if name not in judged]
    if lost:
        clauses.append(f"Training diverged with every seed: {', '.join(lost)}.")
    return clauses


def describe_power(result: Result) -> str:
    """Describe the difference that this number of seeds could detect; "" if nothing was tested."""
    detectable = []
    for verdict in result.verdicts.values():
        if not math.isnan(verdict.detectable):
            detectable.append(verdict.detectable)
    if not detectable:
        return ""
    smallest = f"{min(detectable):.2g}"
    largest = f"{max(detectable):.2g}"
    if smallest == largest:
        difference = f"a difference of at least {smallest} {result.title}"
    else:
        difference = (
            f"a difference of at least {smallest} to {largest} {result.title}, depending on the "
            "variant,"
        )
    return f"With these seeds, {difference} would have been detected (80 % power)."


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
