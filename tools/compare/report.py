"""Writes the report of a comparison, report.html."""

from collections import defaultdict
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import mean

from run.errors import without_fix
from tools.compare.measures import TEXT_MEASURES, Result, evaluate, length_change
from tools.compare.page import Cell, Page
from tools.compare.plots import draw_curves, draw_points, in_bytes
from tools.compare.runs import Groups, Run, differences, group_by_variant
from tools.latency import Latencies, latencies

# What a choice takes at least. With fewer seeds, only large differences show. With fewer tokens,
# the ranking may change with more training; 20 are optimal for their compute (Hoffmann et al.,
# 2203.15556).
MIN_SEEDS = 3
MIN_TOKENS = 10  # a parameter
RESULT = """
Means over seeds at the end of training ± half of their 95 % confidence interval (Student's t), and
the difference to the baseline. The best mean is bold, unless all are near chance. The verdict is
that of a t-test over n pairs of runs, those of one seed or else in their order, with p corrected
for all tests of the column (Holm, 5 % together); intervals are not corrected. Grey: not
distinguishable, which is not equal: the interval says how large the difference may be. One pair
gives no verdict: train more seeds. Differences of accuracies are taken to have a standard deviation
of half a point at least, since counts tie by chance.
"""
COSTS = """
Repeated tokens complete a bigram that occurred earlier in the same context; new tokens are all
others. "4 x the context" is by how much the loss of the last tokens of windows of four times the
training context exceeds that of the same tokens behind one training context, without more training
or scaled positions. The cache holds one row of a full context in bf16. Training speed is the median
over the lines of a log. Decoding is measured at full context with the first seed's model as
generate.py loads it, and not compiled. FLOPs are those of forward and backward.
"""
EQUAL = """
With the same seed, parameters of the same name and shape have the same initial values, and batches
of the same size and text are the same. The settings that differ, and the variants that have each
value:
"""


def write_report(
    folder: Path, runs: list[Run], problems: dict[str, str], command: str, is_quick: bool
) -> str:
    """Write report.html into `folder`, and return the summary.

    `runs` are finished, and the variant of the first is the baseline; `problems` says why others
    are not, by the name of their folder. If `is_quick`, longer contexts and decoding, which would
    have to be measured, are left out. Raises ValueError if there is no run.
    """
    missing = [f"{name} is not in the report: {why}" for name, why in problems.items()]
    if not runs:
        raise ValueError(f"no run finished ({without_fix('; '.join(missing))}). fix: train one")

    # Models of one size are compared with each other.
    page = Page("Comparison")
    sizes = defaultdict(list)
    for run in runs:
        sizes[run.settings["model"]["dim"]].append(run)
    lines = []
    for dim, members in sizes.items():
        page.paragraph(f"Models of dim {dim}", "h2")
        lines.append(add_comparison(page, members, is_quick))

    if problems:
        page.paragraph("Not in the tables:")
        page.texts(["run", "why"], list(problems.items()))
    page.paragraph(f"Made by {command}")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "report.html"
    file.write_text(page.html())
    return "\n".join([*lines, *missing, f"written: {file}, which any browser opens"])


def add_comparison(page: Page, runs: list[Run], is_quick: bool) -> str:
    """Add all about the runs of models of one size, the baseline first; return a summary."""
    # Group by task and by variant. Costs and settings of a variant are those of the first task that
    # it has.
    by_task = defaultdict(list)
    for run in runs:
        by_task[run.task].append(run)
    tasks = {task: group_by_variant(members) for task, members in by_task.items()}
    variants = {}
    for groups in tasks.values():
        variants = variants | groups | variants
    baseline = next(iter(variants))

    # Judge each task by its metric, and text by its parts too.
    metrics = {}
    for task, groups in tasks.items():
        first = by_task[task][0]
        metrics[task] = evaluate(
            first.metric_name, attrgetter("loss"), groups, baseline, first.chance
        )
    results = [*metrics.values()]
    milliseconds = {}
    if "text" in tasks:
        for title, measure in TEXT_MEASURES.items():
            if measure is not length_change or not is_quick:
                results.append(evaluate(title, measure, tasks["text"], baseline))
    if not is_quick:
        milliseconds = latencies({name: runs[0].folder for name, runs in variants.items()})

    # The page, top to bottom: what a reader looks for first.
    text = summary(variants, baseline, metrics)
    page.paragraph(text)
    add_results(page, variants, results, baseline, milliseconds)
    add_plots(page, variants, [*metrics.values()])
    add_details(page, tasks, variants)
    return text


def summary(variants: Groups, baseline: str, metrics: dict[str, Result]) -> str:
    """What the runs can bear, and the variants by their verdict in each task."""
    # Of all variants, the fewest seeds and the fewest tokens count.
    doubts = []
    seeds = min(map(len, variants.values()))
    if seeds < MIN_SEEDS:
        doubts.append(f"{seeds} of {MIN_SEEDS} seeds")
    firsts = [runs[0] for runs in variants.values()]
    ratio = min(run.last["tokens"] / run.model.num_parameters() for run in firsts)
    if ratio < MIN_TOKENS:
        doubts.append(f"{ratio:.2g} of {MIN_TOKENS} tokens a parameter")

    clauses = [f"Beside {baseline} (seeds: {len(variants[baseline])})"]
    for task, result in metrics.items():
        if not result.best:
            doubts.append(f"{task} at chance")
        words = [f"{name} {verdict.text}" for name, verdict in result.verdicts.items()]
        clauses.append(f"{result.title}: {', '.join(words) or 'nothing to compare with'}")
    sentence = f"{'; '.join(clauses)}."
    if doubts:
        return f"Too little to choose: {', '.join(doubts)}.\n{sentence}"
    return sentence


def add_results(
    page: Page, variants: Groups, results: list[Result], baseline: str, milliseconds: Latencies
) -> None:
    """Add the table of verdicts and costs, a row a variant."""
    rows = []
    for name, runs in variants.items():
        costs = cost_cells(runs, milliseconds.get(name, {}))
        cells = [result_cell(result, name, baseline) for result in results]
        rows.append([Cell(name), *cells, *costs.values()])
    page.table(["variant", *[result.title for result in results], *costs], rows)
    page.paragraph(RESULT)
    page.paragraph(COSTS)


def cost_cells(runs: list[Run], milliseconds: dict[str, float]) -> dict[str, Cell]:
    """What a variant costs, by the titles of the columns."""
    first = runs[0]
    rate = mean(run.tokens_per_second for run in runs)
    cells = {"cache": Cell(in_bytes(first.cache_bytes)), "training, tokens/s": Cell(f"{rate:,.0f}")}
    for title, value in milliseconds.items():
        cells[title] = Cell(f"{value:.2f}")
    cells["parameters"] = Cell(f"{first.model.num_parameters():,}")
    cells["MFLOP/token"] = Cell(f"{first.model.training_flops() / 1e6:.2f}")
    return cells


def result_cell(result: Result, name: str, baseline: str) -> Cell:
    """The mean of a variant, its difference to the baseline, and the verdict."""
    if name not in result.estimates:
        return Cell("n/a", result.reasons.get(name, "not trained"))
    value = result.estimates[name].text()
    is_best = name == result.best
    if name not in result.verdicts:
        return Cell(value, "baseline" if name == baseline else "", "", is_best)
    difference, pairs, p, text = result.verdicts[name]
    reason = "(one pair)" if pairs == 1 else f"{text} (p {p:.3f}, n {pairs})"
    return Cell(value, f"{difference.text('+')} {reason}", text, is_best)


def add_plots(page: Page, variants: Groups, metrics: list[Result]) -> None:
    """Add the metric of each task against cache bytes."""
    cache_bytes = {name: runs[0].cache_bytes for name, runs in variants.items()}
    for result in metrics:
        figure = draw_points(cache_bytes, result.estimates, result.title)
        caption = f"{result.title} against cache bytes, with 95 % intervals over seeds"
        if result.chance is not None:
            axes = figure.axes[0]
            axes.set_ylim(-0.02, 1.02)  # accuracies, with room for a marker
            axes.axhline(result.chance, color="gray", linestyle=":")
            caption += "; dotted: chance"
        page.figure(figure, caption)


def add_details(page: Page, tasks: dict[str, Groups], variants: Groups) -> None:
    """Add what a reader must know to believe the result, and the curves of training."""
    machine = next(iter(variants.values()))[0].settings["machine"]
    page.paragraph(EQUAL)
    page.texts(["setting", "values"], list(differences(variants).items()))
    page.paragraph(" ".join(f"{key}: {value}." for key, value in machine.items()))

    # Curves of the training loss beside those of the evaluations.
    for task, groups in tasks.items():
        metric = next(iter(groups.values()))[0].metric
        for key in ("train_loss", metric):
            figure = draw_curves(groups, partial(Run.logged, key=key), "tokens", key)
            page.figure(figure, f"{task}: {key} during training")
