"""Writes the report of a comparison, report.html, from the records of its runs."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from run.errors import without_fix
from run.progress import duration
from tools.compare.measures import (
    NEAR_FLOOR,
    SOLVED,
    TEXT_PARTS,
    Result,
    evaluate,
    num_solved,
    tokens_until_solved,
)
from tools.compare.page import Page, plain_table
from tools.compare.plots import ForestRow, draw_forest, draw_searches, in_bytes
from tools.compare.runs import Groups, Run, changes, command, group_by_variant
from tools.compare.statistics import Verdict
from tools.compare.tuning import Losses, find_optimum, rate_losses

# What a choice takes at least. With fewer seeds, only large differences show. With fewer tokens,
# the ranking may change with more training; 20 are optimal for their compute (Hoffmann et al.,
# 2203.15556).
MIN_SEEDS = 3
MIN_TOKENS = 10  # a parameter
VERDICTS = """
Verdict: of the 95 % intervals of all variants together (seeds not paired), "better" and "worse"
ones leave out zero, and "as good" ones end within the margin, on the bad side. "Cannot tell" is not
equal: it says which difference these seeds would have found with a chance of 80 %. Variants whose
best learning rate lies at the edge of what was tried have no verdict.
"""
EQUAL = """
Intervals are those of Dunnett's test, with the variance pooled over the variants.
"""
UNEQUAL = """
The spreads of the variants differ (Bartlett's test): intervals are those of Welch's t-tests with
Bonferroni's correction, of which more err with few seeds.
"""
PARTS = """
Repeated tokens complete a bigram that occurred earlier in the same context; new tokens are all
others. "4 x the context" is by how much the loss of the last tokens of windows of four times the
training context exceeds that of the same tokens behind one training context, without more training
or scaled positions. The intervals of all these columns hold together.
"""
COSTS = """
The first line of configs/attention/NAME.yaml says what an attention is. The cache holds one row of
a full context in bf16. Training speed is the median over the lines of a log. Decoding is measured
at full context with the first seed's model as generate.py loads it, and not compiled. FLOPs are
those of forward and backward. Of all settings, the last column has those that differ from the
baseline's (kinds.NAME: of the layers of one kind); where sizes are matched, the width of the
feed-forward does that.
"""
TUNING = """
Each variant was trained at several factors of all learning rates, with a seed that judges nothing.
The runs above have the factor at which a parabola in its logarithm is lowest. Off by two: by how
much a rate of half or twice the optimum raises the loss.
"""


def write_report(folder: Path, runs: list[Run], problems: dict[str, str], margin: float) -> str:
    """Write report.html and the figures of its verdicts into `folder`, and return the summary.

    `runs` are finished, and the variant of the first is the baseline; `problems` says why others
    are not, by the name of their folder. A variant is as good if it is within `margin` of the
    baseline. Raises ValueError if there is no run.
    """
    missing = [f"{name} is not in the report: {why}" for name, why in problems.items()]
    if not runs:
        raise ValueError(f"no run finished ({without_fix('; '.join(missing))}). fix: train one")

    # Models of one size are compared with each other, task by task.
    page = Page()
    parts = defaultdict(list)
    for run in runs:
        parts[run.task, run.settings["model"]["dim"]].append(run)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for (task, dim), members in parts.items():
        page.paragraph(f"{task}, models of dim {dim}, context {members[0].model.context}", "h2")
        figure, text = add_comparison(page, members, margin)
        if figure:
            (folder / f"{task}-{dim}.svg").write_text(figure, encoding="utf-8")
        lines.append(text)

    for line in missing:
        page.paragraph(line)
    commits = sorted({str(run.commit) for run in runs})
    page.paragraph(f"Made by {command()}; trained at commit {', '.join(commits)}.")
    file = folder / "report.html"
    file.write_text(page.html(), encoding="utf-8")
    return "\n".join([*lines, *missing, f"written: {file}, which any browser opens"])


@dataclass
class Comparison:
    """The runs of one task and model size, and what is known of the variants besides.

    `baseline` is the name of the variant that all are compared with. It has no group where none of
    its runs judges.
    """

    groups: Groups  # the runs that judge, of each variant; the best first
    baseline: str
    losses: dict[str, Losses]  # of each variant that has searched for learning rates
    diverged: Counter  # seeds of each variant

    @property
    def first(self) -> Run:
        """The first run of the baseline."""
        return self.groups[self.baseline][0]


@dataclass
class Findings:
    """How the variants of a comparison differ: clauses, a plot, cells of each variant, notes."""

    text: str
    figure: Figure
    caption: str
    cells: dict[str, dict[str, str]]
    notes: list[str]


def add_comparison(page: Page, runs: list[Run], margin: float) -> tuple[str, str]:
    """Add all about the runs of one task and size -> the SVG of their verdicts, and a summary."""
    comparison = sort_runs(runs)
    groups = comparison.groups
    baseline = comparison.baseline
    if baseline not in groups:
        if comparison.losses:
            add_searches(page, comparison.losses)
        return "", (
            f"{baseline}, the baseline, has no run that judges; "
            f"variants that have searched for learning rates: {len(comparison.losses)}."
        )
    # A task is solved or not, which has no mean; a loss has a difference, and a verdict.
    first = comparison.first
    if first.floor is None:
        findings = compare_losses(comparison, margin)
    else:
        findings = compare_accuracies(comparison)
    summary = (
        f"{doubts(comparison)}Beside {baseline} ({len(groups[baseline])} seeds), {findings.text}"
    )

    # What a reader looks for comes first.
    page.paragraph(summary)
    svg = page.figure(findings.figure, findings.caption)
    rows = []
    for name, members in groups.items():
        row = {"variant": name, **findings.cells[name]}
        search = comparison.losses.get(members[0].settings["name"])
        if search:
            row["rates x"] = f"{find_optimum(search).factor:.3g}"
        rows.append(row | cost_cells(members))
    with_settings = []
    for row in rows:
        members = groups[row["variant"]]
        with_settings.append(row | {"settings": changes(members[0], first)})
    page.table(with_settings)
    for note in findings.notes:
        page.paragraph(note)

    if first.task == "text":
        add_parts(page, comparison)
    if comparison.losses:
        add_searches(page, comparison.losses)
    settings = ", ".join(f"{key}={value}" for key, value in first.settings_except(()).items())
    page.paragraph(
        f"{baseline} was trained by {first.command or 'train.py'}, with these settings and on this "
        f"machine: {settings}"
    )
    return svg, f"{summary}\n{plain_table(rows)}"


def sort_runs(runs: list[Run]) -> Comparison:
    """Sort the runs of a comparison, of which the first tells the baseline."""
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

    # The first group is that of the baseline, which may have a longer name than its runs.
    baseline = runs[0].baseline or runs[0].settings["name"]
    judged.sort(key=lambda run: run.settings["name"] != baseline)
    if not judged or judged[0].settings["name"] != baseline:
        return Comparison({}, baseline, losses, diverged)
    groups = group_by_variant(judged)
    baseline = next(iter(groups))  # groups keep the order of the runs
    means = {name: fmean(run.loss for run in members) for name, members in groups.items()}
    is_accuracy = judged[0].floor is not None
    best_first = sorted(means, key=means.get, reverse=is_accuracy)
    return Comparison({name: groups[name] for name in best_first}, baseline, losses, diverged)


def compare_losses(comparison: Comparison, margin: float) -> Findings:
    """Judge the losses on text."""
    groups = comparison.groups
    baseline = comparison.baseline
    title = comparison.first.metric_name
    result = judge_measure(comparison, title, attrgetter("loss"), margin)
    marks = {"equal": 0.0, f"margin {margin:g}": margin}
    center = fmean(run.loss for run in groups[baseline])
    return Findings(
        text=verdict_clauses(result, margin),
        figure=draw_losses(
            groups,
            f"{title}: difference to {baseline}, less is better",
            marks,
            center,
            result.verdicts,
        ),
        caption="a dot for each seed, and 95 % intervals of all variants together",
        cells={name: result.cells(name) for name in groups},
        notes=[VERDICTS, UNEQUAL if result.is_unequal else EQUAL, COSTS],
    )


def compare_accuracies(comparison: Comparison) -> Findings:
    """Count the seeds that solve a task."""
    groups = comparison.groups
    first = comparison.first
    diverged = comparison.diverged
    marks = {f"floor {first.floor:.3f}": first.floor, f"solved {SOLVED:g}": SOLVED}
    return Findings(
        text=accuracy_clauses(groups, first, diverged),
        figure=draw_losses(groups, first.metric_name, marks, 0.0, {}),
        caption="a dot for each seed",
        cells={name: accuracy_cells(runs, diverged[name]) for name, runs in groups.items()},
        notes=[COSTS],
    )


def judge_measure(
    comparison: Comparison,
    title: str,
    measure: Callable[[Run], float | None],
    margin: float,
    num_measures: int = 1,
) -> Result:
    """Measure all runs and judge the variants, except those whose verdict is withheld."""
    result = evaluate(title, measure, comparison.groups, comparison.baseline, margin, num_measures)
    return result._replace(verdicts=withhold_verdicts(result.verdicts, comparison))


def withhold_verdicts(verdicts: dict[str, Verdict], comparison: Comparison) -> dict[str, Verdict]:
    """Take back verdicts where the best rate of the variant or of the baseline may be missing.

    Also where some of its seeds diverged: what the others have in common is that they did not.
    """
    outside = set()
    for name, losses in comparison.losses.items():
        if not find_optimum(losses).is_inside:
            outside.add(name)
    remaining = {}
    for name, verdict in verdicts.items():
        # Namesakes are told apart by what follows a blank; searches and seeds have the name alone.
        pair = {name.partition(" ")[0], comparison.baseline.partition(" ")[0]}
        text = verdict.text
        if pair & outside:
            text = "best rate at the edge"
        if pair & comparison.diverged.keys():
            text = "seeds diverged"
        remaining[name] = verdict._replace(text=text)
    return remaining


def doubts(comparison: Comparison) -> str:
    """What the runs cannot bear, of all variants the one with the least; "" without any."""
    groups = comparison.groups
    found = []
    seeds = min(map(len, groups.values()))
    if seeds < MIN_SEEDS:
        found.append(f"{seeds} of {MIN_SEEDS} seeds")
    firsts = [runs[0] for runs in groups.values()]
    tokens = []
    for runs in groups.values():
        tokens += [run.last["tokens"] for run in runs]
    if min(tokens) < max(tokens):
        found.append(f"{min(tokens):,} of {max(tokens):,} tokens")
    ratio = min(run.last["tokens"] / run.model.num_parameters() for run in firsts)
    # Rounded, since parameters are matched to a few in a thousand.
    if round(ratio, 1) < MIN_TOKENS and firsts[0].task == "text":
        found.append(f"{ratio:.2g} of {MIN_TOKENS} tokens a parameter ({enough_tokens(firsts)})")
    text = f"Too little to choose: {', '.join(found)}. " if found else ""

    # The rates of the config are scaled to a model and a run, but not tuned for a variant.
    untuned = []
    for name, runs in groups.items():
        if runs[0].settings["name"] not in comparison.losses:
            untuned.append(name)
    if untuned and firsts[0].task == "text":
        names = "any variant" if len(untuned) == len(groups) else ", ".join(untuned)
        text += f"No learning rate was tuned for {names} (--tune does). "
    return text


def enough_tokens(runs: list[Run]) -> str:
    """The overrides with which all these models would see MIN_TOKENS a parameter."""
    tokens = MIN_TOKENS * max(run.model.num_parameters() for run in runs)
    steps = math.ceil(tokens / runs[0].settings["batch_tokens"])
    text = f"enough: steps={steps} max_minutes=null"
    seconds = tokens / min(run.tokens_per_second for run in runs)
    if math.isfinite(seconds):
        text += f", {duration(seconds)} a run at the speed of these"
    return text


def verdict_clauses(result: Result, margin: float) -> str:
    """The variants by their verdict, and which difference would have been found."""
    names = defaultdict(list)
    detectable = []
    for name, verdict in result.verdicts.items():
        names[verdict.text].append(name)
        if not math.isnan(verdict.detectable):
            detectable.append(verdict.detectable)
    clauses = [f"{text}: {', '.join(each)}" for text, each in names.items()]
    text = f"{result.title} with a margin of {margin:g}: {'; '.join(clauses) or 'no variant'}."
    if detectable:
        text += (
            " Found with a chance of 80 %, by variant: differences of "
            f"{min(detectable):.4f} to {max(detectable):.4f}."
        )
    return text


def accuracy_clauses(groups: Groups, first: Run, diverged: Counter) -> str:
    """Which variants solve the task of `first`, and with how many of their seeds."""
    texts = []
    for name, runs in groups.items():
        text = f"{name} {num_solved(runs)} of {len(runs) + diverged[name]}"
        if max(run.loss for run in runs) < first.floor + NEAR_FLOOR:
            text += " (at the floor)"
        texts.append(text)
    return (
        f"{first.metric_name} (floor {first.floor:.3f}), seeds that reach {SOLVED:.0%}: "
        f"{', '.join(texts)}."
    )


def accuracy_cells(runs: list[Run], num_diverged: int) -> dict[str, str]:
    """How many seeds of a variant solve the task, after how many tokens, and their accuracies."""
    accuracies = [100 * run.loss for run in runs]
    tokens = tokens_until_solved(runs)
    until = "never" if math.isnan(tokens) else f"{tokens / 1e6:.2f}"
    return {
        "seeds that solve it": f"{num_solved(runs)} of {len(runs) + num_diverged}",
        "million tokens until then": until,
        "accuracy, %": f"{min(accuracies):.1f} to {max(accuracies):.1f}",
    }


def cost_cells(runs: list[Run]) -> dict[str, str]:
    """What a variant costs, by the titles of the columns."""
    first = runs[0]
    return {
        "cache": in_bytes(first.cache_bytes),
        "training, tokens/s": f"{fmean(run.tokens_per_second for run in runs):,.0f}",
        **{title: f"{value:.2f}" for title, value in first.decoding.items()},
        "parameters": f"{first.model.num_parameters():,}",
        "MFLOP/token": f"{first.model.training_flops() / 1e6:.2f}",
    }


def draw_losses(
    groups: Groups, title: str, marks: dict[str, float], center: float, verdicts: dict[str, Verdict]
) -> Figure:
    """The forest plot of the metric less `center`, with the values of `marks` by their labels."""
    rows = []
    for name, runs in groups.items():
        interval = None
        if name in verdicts:
            interval = (verdicts[name].low, verdicts[name].high)
        rows.append(
            ForestRow(
                label=f"{name}, {in_bytes(runs[0].cache_bytes)}",
                points=[run.loss - center for run in runs],
                interval=interval,
            )
        )
    return draw_forest(rows, title, marks)


def add_parts(page: Page, comparison: Comparison) -> None:
    """Add the table of the parts of the loss on text, which have no margin."""
    rows = [{"variant": name} for name in comparison.groups]
    for title, measure in TEXT_PARTS.items():
        result = judge_measure(comparison, title, measure, 0.0, num_measures=len(TEXT_PARTS))
        for row in rows:
            row |= result.cells(row["variant"])
    page.table(rows)
    page.paragraph(PARTS)


def add_searches(page: Page, losses: dict[str, Losses]) -> None:
    """Add what the search for learning rates found."""
    page.paragraph(TUNING)
    page.figure(
        draw_searches(losses), "held-out loss by the factor of the rates; what diverged is left out"
    )
    rows = []
    for name, each in losses.items():
        optimum = find_optimum(each)
        rows.append(
            {
                "variant": name,
                "optimum x": f"{optimum.factor:.3g}",
                "off by two, nats": f"{optimum.sensitivity:+.4f}",
                "tried": ", ".join(f"{factor:g}" for factor in sorted(each)),
                "diverged": str(list(each.values()).count(math.inf)),
                "nats at the common rates": f"{each.get(1.0, math.nan):.4f}",
                "nats at the best tried": f"{min(each.values()):.4f}",
            }
        )
    page.table(rows)
