"""Write the report of a comparison, report.html, from the records of its runs."""

import math
from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from run.errors import without_fix
from tools.compare.answer import Answer, answer_accuracies, answer_losses, describe_power
from tools.compare.comparison import Comparison, judge_measure, sort_runs
from tools.compare.ladder import add_ladder
from tools.compare.measures import SOLVED, TEXT_PARTS, num_solved, tokens_until_solved
from tools.compare.page import Page, Rows, plain_table
from tools.compare.plots import ForestRow, draw_forest, draw_searches
from tools.compare.runs import Groups, Run, changes, command
from tools.compare.tuning import Losses, find_optimum

# Machine settings that affect the speed.
SPEED_KEYS = ("device", "threads", "processes", "precision", "compiled")
MAX_SPREAD = 1.2  # largest ratio of speeds between a variant's seeds at which speeds are comparable
MAX_NAME = 16  # maximum number of characters of the baseline's name in a title
VERDICTS = """
Brackets contain the 95 % confidence interval of the difference from the baseline. The intervals are
simultaneous: in 95 of 100 comparisons like this one, all intervals contain the true difference.
Seeds are not paired.
"""
VERDICT_NAMES = """
Better: the whole interval is below zero. As good: it ends below the margin of {margin:g}, which
should be chosen before training. Worse: the whole interval is above zero, and it ends beyond the
margin. Cannot tell: none of these holds. This does not mean that the losses are equal: more seeds
may show a difference. A variant gets no verdict if its training or the baseline's training diverged
with some seeds, or if the best learning rate of either is the lowest or highest one tried.
"""
EQUAL = "The intervals are from Dunnett's test, with one variance pooled over all variants."
UNEQUAL = """
Some variants vary more between seeds than others (Bartlett's test), so the intervals are from
Welch's t-tests with Bonferroni's correction. With few seeds, these miss the true difference more
often than stated.
"""
ACCURACIES = """
A seed solves the task if its accuracy reaches {solved:.0f} %. Training either finds the solution or
does not, so successful seeds are counted: a mean accuracy would not be useful. A variant is called
better if the difference in counts is significant by Fisher's exact test at 5 %, corrected for the
number of variants. The floor of {floor:.3f} is the accuracy of always guessing the most frequent
answer.
"""
PARTS = """
Repeated tokens complete a pair of tokens that occurred earlier in the same context; all other
tokens are new. "4 x the context" measures length extrapolation: the loss on the last tokens of
windows four times as long as the training context, minus the loss on the same tokens at the end of
windows as long as the training context. The model is not trained further, and positions are not
rescaled. All intervals in this table are simultaneous.
"""
COSTS = """
The cache size is for one sequence at full context in bf16. FLOPs are for training: one forward and
one backward pass. A run's training speed is the median over the lines of its log. Decoding is
measured at full context without compilation, with the first seed's model as loaded by generate.py.
"""
SETTINGS = """
Only settings that differ from the baseline are listed; kinds.NAME applies to the layers of one
kind. If parameters or FLOPs are matched (--match), the feed-forward width, hidden, is adjusted. The
first line of configs/attention/NAME.yaml describes the attention variant NAME.
"""
TUNING = """
Each variant was first trained with all of its learning rates multiplied by several factors, with a
seed that is not used for the verdicts. A parabola was fitted to the loss over the logarithm of the
factor; the compared runs use the factor at its minimum. "Off by two" is the rise of the fitted loss
if the learning rate is half or twice the best one.
"""


def write_report(folder: Path, runs: list[Run], problems: dict[str, str], margin: float) -> str:
    """Write report.html and the figures of its verdicts into `folder`, and return the summary.

    `runs` are finished runs, and the variant of the first one is the baseline; `problems` maps the
    folder name of each other run to the reason for leaving it out. A variant is as good as the
    baseline if it is within `margin`. Raises ValueError if there are no runs.
    """
    missing = [f"{name} is not in the report: {why}" for name, why in problems.items()]
    if not runs:
        raise ValueError(f"no run finished ({without_fix('; '.join(missing))}). fix: finish a run")

    # Models of the same size are compared with each other, task by task.
    page = Page()
    parts = defaultdict(list)
    for run in runs:
        parts[run.task, run.settings["model"]["dim"]].append(run)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []

    # For text at several sizes, first show how the differences change with the size.
    comparisons = [sort_runs(members) for (task, _), members in parts.items() if task == "text"]
    comparisons = [comparison for comparison in comparisons if comparison.groups]
    if len(comparisons) > 1:
        figure, text = add_ladder(page, comparisons, margin)
        if figure:
            (folder / "text-ladder.svg").write_text(figure, encoding="utf-8")
            lines.append(text)

    for (task, dim), members in parts.items():
        context = members[0].model.context
        page.paragraph(f"Comparison on {task}: models of dim {dim}, context {context}", "h1")
        figure, text = add_comparison(page, members, margin)
        if figure:
            (folder / f"{task}-{dim}.svg").write_text(figure, encoding="utf-8")
        lines.append(text)

    if missing:
        with page.folded(f"Runs missing from this report: {len(missing)}"):
            for line in missing:
                page.paragraph(line)
    commits = sorted({str(run.commit) for run in runs})
    page.paragraph(
        f"Trained at commit {', '.join(commits)}. This page was generated by:", style="faint"
    )
    page.code([command()])
    file = folder / "report.html"
    file.write_text(page.html(), encoding="utf-8")
    return "\n".join([*lines, *missing, f"written: {file}. To view it: open it in a browser"])


@dataclass
class Findings:
    """How the variants of a comparison differ: the answer, a plot, cells by variant, notes."""

    answer: Answer
    figure: Figure
    caption: str
    cells: dict[str, dict[str, str]]
    sorted_by: str  # title of the column to sort by
    notes: list[str]


def add_comparison(page: Page, runs: list[Run], margin: float) -> tuple[str, str]:
    """Add the blocks for runs of one task and size; return the verdicts' SVG and a summary."""
    comparison = sort_runs(runs)
    groups = comparison.groups
    if not groups:
        text = (
            f"No answer yet: no run of {comparison.baseline}, the baseline, has finished. "
            f"Variants whose learning rates were searched: {len(comparison.losses)}."
        )
        page.paragraph(text, style="answer")
        if comparison.losses:
            add_searches(page, comparison.losses)
        return "", text

    # A task is either solved or not, so accuracies have no meaningful mean; losses have verdicts.
    first = comparison.first
    if first.floor is None:
        findings = compare_losses(comparison, margin)
    else:
        findings = compare_accuracies(comparison)

    # The answer first, then the figure and the table.
    answer = findings.answer
    page.paragraph(answer.headline, style="answer")
    for remark in answer.remarks:
        page.paragraph(remark)
    svg = page.figure(findings.figure, findings.caption)
    for clause in answer.verdicts:
        page.paragraph(clause)
    rows = []
    for name, members in groups.items():
        rows.append({"variant": name, **findings.cells[name], **size_cells(members[0])})
    page.table(rows, findings.sorted_by)

    # Everything else is in folded blocks.
    with page.folded("How to read the table"):
        for note in findings.notes:
            page.paragraph(note)
    speeds = add_costs(page, groups)
    if first.task == "text":
        add_parts(page, comparison)
    if comparison.losses:
        add_searches(page, comparison.losses)
    add_settings(page, comparison)

    for row in rows:
        row["training, tokens/s"] = mean_speed(groups[row["variant"]])
    return svg, "\n".join([str(answer), plain_table(rows), speeds])


def compare_losses(comparison: Comparison, margin: float) -> Findings:
    """Judge the losses on text."""
    groups = comparison.groups
    baseline = comparison.baseline
    unit = comparison.first.metric_name
    difference = "difference from " + (baseline if len(baseline) <= MAX_NAME else "the baseline")
    result = judge_measure(comparison, unit, attrgetter("loss"), margin)
    titles = (f"loss, {unit}", difference, "verdict")
    cells = {}
    for name in groups:
        cells[name] = dict(zip(titles, result.cells(name), strict=True))

    # A dot for each seed, and the interval, as differences from the baseline's mean.
    center = fmean(run.loss for run in groups[baseline])
    rows = []
    for name, runs in groups.items():
        points = [run.loss - center for run in runs]
        if name in result.verdicts:
            verdict = result.verdicts[name]
            rows.append(ForestRow(name, points, (verdict.low, verdict.high), verdict.text))
        else:
            rows.append(ForestRow(f"{name} (baseline)", points, None))
    figure = draw_forest(
        rows,
        f"{difference}, {unit}",
        {"mean of the baseline": 0.0, f"margin {margin:g}": margin},
        directions=("\N{LEFTWARDS ARROW} better", "worse \N{RIGHTWARDS ARROW}"),
    )
    return Findings(
        answer=answer_losses(comparison, result, margin),
        figure=figure,
        caption=(
            "Each dot is a seed, each diamond the mean difference, and each line its 95 % "
            "interval. Blue: better. Orange: worse. Gray: neither."
        ),
        cells=cells,
        sorted_by=titles[0],
        notes=[
            VERDICTS,
            VERDICT_NAMES.format(margin=margin),
            describe_power(result),
            UNEQUAL if result.is_unequal else EQUAL,
        ],
    )


def compare_accuracies(comparison: Comparison) -> Findings:
    """Count the seeds that solve a task."""
    groups = comparison.groups
    first = comparison.first
    cells = {}
    for name, runs in groups.items():
        cells[name] = accuracy_cells(runs, comparison.num_diverged(name))
    rows = [ForestRow(name, [run.loss for run in runs], None) for name, runs in groups.items()]
    figure = draw_forest(
        rows,
        first.metric_name,
        {f"floor {first.floor:.3f}": first.floor, f"solved {SOLVED:g}": SOLVED},
        limits=(-0.03, 1.03),
        directions=("", "better \N{RIGHTWARDS ARROW}"),
    )
    return Findings(
        answer=answer_accuracies(comparison),
        figure=figure,
        caption="Each dot is a seed.",
        cells=cells,
        sorted_by="",
        notes=[ACCURACIES.format(solved=100 * SOLVED, floor=first.floor)],
    )


def accuracy_cells(runs: list[Run], num_diverged: int) -> dict[str, str]:
    """Return the number of seeds that solve the task, the tokens needed, and the accuracies."""
    accuracies = [100 * run.loss for run in runs]
    tokens = tokens_until_solved(runs)
    return {
        "seeds that solve it": f"{num_solved(runs)} of {len(runs) + num_diverged}",
        "million tokens until then": "never" if math.isnan(tokens) else f"{tokens / 1e6:.2f}",
        "accuracy, %": f"{min(accuracies):.1f} to {max(accuracies):.1f}",
    }


def size_cells(run: Run) -> dict[str, str]:
    """Return the costs of a variant that do not depend on the machine."""
    return {
        "cache, kB": f"{run.cache_bytes / 1e3:,.1f}",
        "MFLOP/token": f"{run.model.training_flops() / 1e6:,.2f}",
    }


def mean_speed(runs: list[Run]) -> str:
    return cell(fmean(run.tokens_per_second for run in runs), ",.0f")


def cell(value: float, form: str) -> str:
    """Format a number for a table; "n/a" if it is unknown."""
    return format(value, form) if math.isfinite(value) else "n/a"


def add_costs(page: Page, groups: Groups) -> str:
    """Add each variant's speed and size; return a note on whether the speeds can be compared."""
    rows = []
    for name, runs in groups.items():
        row = {
            "variant": name,
            "training, tokens/s": mean_speed(runs),
            "parameters": f"{runs[0].model.num_parameters():,}",
        }
        rows.append(row | {title: f"{value:.2f}" for title, value in runs[0].decoding.items()})
    speeds = describe_speeds(groups)
    with page.folded("Speed and size"):
        page.paragraph(speeds)
        page.table(rows)
        page.paragraph(COSTS)
    return speeds


def describe_speeds(groups: Groups) -> str:
    """State whether training speeds can be compared, given the machines of the runs."""
    runs = [run for members in groups.values() for run in members]
    machines = [run.settings.get("machine", {}) for run in runs]
    differences = []
    for key in SPEED_KEYS:
        values = sorted({str(machine.get(key)) for machine in machines})
        if len(values) > 1:
            differences.append(f"{key} is {' or '.join(values)}")
    # Other programs, and other runs on the same GPU, slow down runs. All seeds of a variant perform
    # the same computation, so compare their speeds.
    spread = max(speed_spread(members) for members in groups.values())
    if spread >= MAX_SPREAD:
        differences.append(f"the seeds of one variant differ by a factor of {spread:.1f}")

    if differences:
        return f"Training speeds are not comparable: {'; '.join(differences)}."
    return "Training speeds are comparable: the machines are of the same kind."


def speed_spread(runs: list[Run]) -> float:
    """Return the ratio of the runs' highest and lowest training speeds; 1 if no speed is known."""
    speeds = [run.tokens_per_second for run in runs if math.isfinite(run.tokens_per_second)]
    return max(speeds) / min(speeds) if speeds else 1.0


def add_parts(page: Page, comparison: Comparison) -> None:
    """Add the table of the parts of the loss on text, which are judged without a margin."""
    rows = [{"variant": name} for name in comparison.groups]
    for title, measure in TEXT_PARTS.items():
        result = judge_measure(comparison, title, measure, 0.0, num_measures=len(TEXT_PARTS))
        titles = (title, f"difference in {title}", f"verdict on {title}")
        for row in rows:
            row |= dict(zip(titles, result.cells(row["variant"]), strict=True))
    with page.folded("Parts of the loss, and longer texts"):
        page.table(rows)
        page.paragraph(PARTS)


def add_searches(page: Page, losses: dict[str, Losses]) -> None:
    """Add the results of the search for learning rates."""
    rows = []
    for name, each in losses.items():
        optimum = find_optimum(each)
        rows.append(
            {
                "variant": name,
                "best factor": f"{optimum.factor:.3g}",
                "off by two, nats": cell(optimum.sensitivity, "+.4f"),
                "factors tried": ", ".join(f"{factor:g}" for factor in sorted(each)),
                "diverged": str(list(each.values()).count(math.inf)),
                "nats at factor 1": cell(each.get(1.0, math.nan), ".4f"),
                "nats at the best tried": cell(min(each.values()), ".4f"),
            }
        )
    with page.folded("Learning rates"):
        page.paragraph(TUNING)
        caption = "Held-out loss against the learning-rate factor, without runs that diverged."
        page.figure(draw_searches(losses), caption)
        page.table(rows)


def add_settings(page: Page, comparison: Comparison) -> None:
    """Add the settings that distinguish the variants, and all settings of the baseline."""
    baseline = comparison.baseline
    first = comparison.first
    rows: Rows = []
    for name, runs in comparison.groups.items():
        text = "baseline" if name == baseline else changes(runs[0], first)
        rows.append({"variant": name, f"differs from {baseline} in": text})
    with page.folded("Settings and command"):
        page.table(rows)
        page.paragraph(SETTINGS)
        page.paragraph(
            f"{baseline} was trained by this command, with the settings listed below it:"
        )
        settings = [f"{key}={value}" for key, value in first.settings_except(()).items()]
        page.code([first.command or "train.py", "", *settings])
