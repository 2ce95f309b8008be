"""Writes the report of a comparison, report.html, from the records of its runs."""

import math
from collections import Counter, defaultdict
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from run.errors import without_fix
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
from tools.compare.plots import draw_forest, draw_searches, in_bytes
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
            (folder / f"{task}-{dim}.svg").write_text(figure)
        lines.append(text)

    for line in missing:
        page.paragraph(line)
    commits = sorted({str(run.commit) for run in runs})
    page.paragraph(f"Made by {command()}; trained at commit {', '.join(commits)}.")
    file = folder / "report.html"
    file.write_text(page.html())
    return "\n".join([*lines, *missing, f"written: {file}, which any browser opens"])


def add_comparison(page: Page, runs: list[Run], margin: float) -> tuple[str, str]:
    """Add all about the runs of one task and size -> the SVG of their verdicts, and a summary."""
    searches = defaultdict(list)
    diverged = Counter()  # seeds of each variant
    judged = []
    for run in runs:
        if run.factor is not None:
            searches[run.settings["name"]].append(run)
        elif run.has_diverged:
            diverged[run.settings["name"]] += 1
        else:
            judged.append(run)
    losses = {name: rate_losses(members) for name, members in searches.items()}
    wanted = runs[0].baseline or runs[0].settings["name"]
    judged.sort(key=lambda run: run.settings["name"] != wanted)
    if not judged or judged[0].settings["name"] != wanted:
        if losses:
            add_searches(page, losses)
        return "", (
            f"{wanted}, the baseline, has no run that judges; "
            f"variants that have searched for learning rates: {len(losses)}."
        )
    groups = group_by_variant(judged)
    baseline = next(iter(groups))
    first = groups[baseline][0]
    means = {name: fmean(run.loss for run in runs) for name, runs in groups.items()}
    best_first = sorted(means, key=means.get, reverse=first.floor is not None)
    groups = {name: groups[name] for name in best_first}

    # A task is solved or not, which has no mean; a loss has a difference, and a verdict.
    notes = [COSTS]
    if first.floor is None:
        result = evaluate(first.metric_name, attrgetter("loss"), groups, baseline, margin)
        withhold_verdicts(result, losses, baseline, diverged)
        caption = "a dot for each seed, and 95 % intervals of all variants together"
        title = f"{result.title}: difference to {baseline}, less is better"
        lines = {"equal": 0.0, f"margin {margin:g}": margin}
        figure = draw_losses(groups, title, lines, means[baseline], result.verdicts)
        cells = result.cells
        clauses = verdict_clauses(result, margin)
        notes = [VERDICTS, UNEQUAL if result.is_unequal else EQUAL, COSTS]
    else:
        caption = "a dot for each seed"
        lines = {f"floor {first.floor:.3f}": first.floor, f"solved {SOLVED:g}": SOLVED}
        figure = draw_losses(groups, first.metric_name, lines, 0.0, {})
        cells = partial(accuracy_cells, groups, diverged)
        clauses = accuracy_clauses(groups, first, diverged)
    summary = f"{doubts(groups)}Beside {baseline} ({len(groups[baseline])} seeds), {clauses}"

    # What a reader looks for comes first.
    page.paragraph(summary)
    svg = page.figure(figure, caption)
    rows = []
    for name, members in groups.items():
        row = {"variant": name, **cells(name)}
        search = losses.get(members[0].settings["name"])
        if search:
            row["rates x"] = f"{find_optimum(search).factor:.3g}"
        rows.append(row | cost_cells(members))
    page.table([row | {"settings": changes(groups[row["variant"]][0], first)} for row in rows])
    for note in notes:
        page.paragraph(note)

    if first.task == "text":
        add_parts(page, groups, baseline, losses, diverged)
    if losses:
        add_searches(page, losses)
    settings = ", ".join(f"{key}={value}" for key, value in first.settings_except(()).items())
    page.paragraph(
        f"{baseline} was trained by {first.command or 'train.py'}, with these settings and on this "
        f"machine: {settings}"
    )
    return svg, f"{summary}\n{plain_table(rows)}"


def doubts(groups: Groups) -> str:
    """What the runs cannot bear, of all variants the one with the least; "" without any."""
    found = []
    seeds = min(map(len, groups.values()))
    if seeds < MIN_SEEDS:
        found.append(f"{seeds} of {MIN_SEEDS} seeds")
    firsts = [runs[0] for runs in groups.values()]
    tokens = [run.last["tokens"] for runs in groups.values() for run in runs]
    if min(tokens) < max(tokens):
        found.append(f"{min(tokens):,} of {max(tokens):,} tokens")
    ratio = min(run.last["tokens"] / run.model.num_parameters() for run in firsts)
    # Rounded, since parameters are matched to a few in a thousand.
    if round(ratio, 1) < MIN_TOKENS and firsts[0].task == "text":
        found.append(f"{ratio:.2g} of {MIN_TOKENS} tokens a parameter")
    return f"Too little to choose: {', '.join(found)}. " if found else ""


def withhold_verdicts(
    result: Result, losses: dict[str, Losses], baseline: str, diverged: Counter
) -> None:
    """Take back verdicts where the best rate of the variant or of the baseline may be missing.

    Also where some of its seeds diverged: what the others have in common is that they did not.
    """
    outside = {name for name, each in losses.items() if not find_optimum(each).is_inside}
    for name, verdict in result.verdicts.items():
        pair = {name.partition(" ")[0], baseline.partition(" ")[0]}  # without what tells namesakes
        text = verdict.text
        if pair & outside:
            text = "best rate at the edge"
        if pair & diverged.keys():
            text = "seeds diverged"
        result.verdicts[name] = verdict._replace(text=text)


def verdict_clauses(result: Result, margin: float) -> str:
    """The variants by their verdict, and which difference would have been found."""
    names = defaultdict(list)
    for name, verdict in result.verdicts.items():
        names[verdict.text].append(name)
    clauses = [f"{text}: {', '.join(each)}" for text, each in names.items()]
    detectable = [each.detectable for each in result.verdicts.values() if each.detectable > 0]
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


def accuracy_cells(groups: Groups, diverged: Counter, name: str) -> dict[str, str]:
    """How many seeds of a variant solve the task, after how many tokens, and their accuracies."""
    runs = groups[name]
    accuracies = sorted(100 * run.loss for run in runs)
    tokens = tokens_until_solved(runs)
    until = "never" if math.isnan(tokens) else f"{tokens / 1e6:.2f}"
    return {
        "seeds that solve it": f"{num_solved(runs)} of {len(runs) + diverged[name]}",
        "million tokens until then": until,
        "accuracy, %": f"{accuracies[0]:.1f} to {accuracies[-1]:.1f}",
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
    groups: Groups, title: str, lines: dict[str, float], center: float, verdicts: dict[str, Verdict]
) -> Figure:
    """The forest plot of the metric less `center`, with the values that `lines` mark."""
    rows = []
    for name, runs in groups.items():
        label = f"{name}, {in_bytes(runs[0].cache_bytes)}"
        verdict = verdicts.get(name)
        rows.append((label, [run.loss - center for run in runs], verdict and verdict[1:3]))
    return draw_forest(rows, title, lines)


def add_parts(
    page: Page, groups: Groups, baseline: str, losses: dict[str, Losses], diverged: Counter
) -> None:
    """Add the table of the parts of the loss on text, which have no margin."""
    rows = [{"variant": name} for name in groups]
    for title, measure in TEXT_PARTS.items():
        result = evaluate(title, measure, groups, baseline, 0.0, len(TEXT_PARTS))
        withhold_verdicts(result, losses, baseline, diverged)
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
                "diverged": str([*each.values()].count(math.inf)),
                "nats at the common rates": f"{each.get(1.0, math.nan):.4f}",
                "nats at the best tried": f"{min(each.values()):.4f}",
            }
        )
    page.table(rows)
