"""Writes the report of a comparison, report.html."""

import sys
from collections import defaultdict
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import mean

from run.errors import without_fix
from tools.compare.measures import TEXT_MEASURES, Result, evaluate
from tools.compare.page import Cell, Page
from tools.compare.plots import draw_curves, draw_points, in_bytes
from tools.compare.runs import Groups, Run, differences, group_by_variant
from tools.latency import latencies

MIN_TOKENS = 10  # a parameter; with fewer, the report warns
RESULT = """
Means over seeds at the end of training ± half of their 95 % confidence interval (Student's t), and
the difference to the baseline. The best mean is bold. The verdict is that of a t-test over n pairs
of runs, those of one seed or else in their order, with p corrected for all tests of the column
(Holm, 5 % together); intervals are not corrected. Grey: not distinguishable, which is not equal:
the interval says how large the difference may be. One pair gives no verdict: train more seeds.
Differences of accuracies are taken to have a standard deviation of half a point at least,
since counts tie by chance.
"""
COSTS = """
Repeated tokens complete a bigram that occurred earlier in the same context; new tokens are all
others. "4 x the context" is by how much the loss of the last tokens of windows of four times the
training context exceeds that of the same tokens behind one training context, without more training
or scaled positions. The cache holds one row of a full context in bf16; "fixed size" means that a
longer text needs no larger one. Training speed is the median over the lines of a log. Decoding is
measured at full context with the first seed's model
as generate.py loads it, the first token with one row. FLOPs are those of forward and backward.
"""
EQUAL = """
With the same seed, parameters of the same name and shape have the same initial values, and batches
of the same size and text are the same. The settings that differ, and the variants that have each
value:
"""
UNDERTRAINED = """
the ranking of models that are trained so briefly may change with more training; 20 are optimal for
their compute (Hoffmann et al., 2203.15556).
"""


def write_report(folder: Path, runs: list[Run], problems: dict[str, str], command: str) -> str:
    """Write report.html into `folder`, and return the summary.

    `runs` are finished, and the variant of the first is the baseline; `problems` says why others
    are not, by the name of their folder. Raises ValueError if there is no run.
    """
    missing = [f"{name} is not in the report: {why}" for name, why in problems.items()]
    if not runs:
        raise ValueError(f"no run finished ({without_fix('; '.join(missing))}). fix: train one")
    print("measuring longer contexts and decoding for the report", file=sys.stderr)

    # Models of one size are compared with each other.
    page = Page("Comparison")
    sizes = defaultdict(list)
    for run in runs:
        sizes[run.settings["model"]["dim"]].append(run)
    lines = []
    for dim, members in sizes.items():
        page.heading(f"Models of dim {dim}")
        lines.append(add_comparison(page, members))

    if problems:
        page.paragraph("Not in the tables:")
        page.texts(["run", "why"], list(problems.items()))
    page.paragraph(f"Made by {command}")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "report.html"
    file.write_text(page.html())
    return "\n".join([*lines, *missing, f"written: {file}"])


def add_comparison(page: Page, runs: list[Run]) -> str:
    """Add all about the runs of models of one size, the baseline first; return a summary."""
    # Group by task and by variant. Costs and settings of a variant are those of the first task that
    # it has.
    by_task = defaultdict(list)
    for run in runs:
        by_task[run.task].append(run)
    tasks = {task: group_by_variant(members) for task, members in by_task.items()}
    variants = {}
    for groups in tasks.values():
        for name, group in groups.items():
            variants.setdefault(name, group)
    baseline = next(iter(variants))

    # Judge each task by its metric, and text by its parts too.
    metrics = {}
    for task, groups in tasks.items():
        title = by_task[task][0].metric_name
        metrics[task] = evaluate(title, attrgetter("loss"), groups, baseline, task != "text")
    results = [*metrics.values()]
    if "text" in tasks:
        for title, measure in TEXT_MEASURES.items():
            results.append(evaluate(title, measure, tasks["text"], baseline))

    # The page, top to bottom: what a reader looks for first.
    text = summary(variants, baseline, metrics)
    page.paragraph(text)
    add_results(page, variants, results, baseline)
    add_plots(page, tasks, variants, metrics)
    add_differences(page, variants)
    add_training(page, tasks)
    return text


def summary(variants: Groups, baseline: str, metrics: dict[str, Result]) -> str:
    """List the variants by verdict on each task, and the smallest cache that is not worse."""
    clauses = [f"Beside {baseline} (seeds: {len(variants[baseline])})"]
    candidates = set(variants)  # for the smallest cache
    for result in metrics.values():
        by_verdict = defaultdict(list)
        for name, verdict in result.verdicts.items():
            by_verdict[verdict.text].append(name)
        for text, names in sorted(by_verdict.items()):
            clauses.append(f"{result.title} {text}: {', '.join(names)}")
        candidates &= {baseline, *by_verdict["better"], *by_verdict["not distinguishable"]}
    sentence = f"{'; '.join(clauses)}."

    # Users look for the smallest cache that costs nothing, as far as the runs can tell.
    smallest = min(candidates, key=lambda name: (variants[name][0].cache_bytes, name != baseline))
    if smallest == baseline:
        return sentence
    size = in_bytes(variants[smallest][0].cache_bytes)
    return f"{sentence} The smallest cache not shown to be worse: {smallest}, {size}."


def add_results(page: Page, variants: Groups, results: list[Result], baseline: str) -> None:
    """Add the table of verdicts and costs, a row a variant."""
    milliseconds = latencies({name: runs[0].folder for name, runs in variants.items()})
    rows = []
    for name, runs in variants.items():
        costs = cost_cells(runs, milliseconds[name])
        cells = [result_cell(result, name, baseline) for result in results]
        rows.append([Cell(name), *cells, *costs.values()])
    page.table(["variant", *[result.title for result in results], *costs], rows)
    page.paragraph(RESULT)
    page.paragraph(COSTS)


def cost_cells(runs: list[Run], milliseconds: dict[str, float]) -> dict[str, Cell]:
    """What a variant costs, by the titles of the columns."""
    first = runs[0]
    rate = mean(run.tokens_per_second for run in runs)
    cells = {
        "cache": Cell(in_bytes(first.cache_bytes), "fixed size" if first.cache_is_fixed else ""),
        "training, tokens/s": Cell(f"{rate:,.0f}"),
    }
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


def add_plots(
    page: Page, tasks: dict[str, Groups], variants: Groups, metrics: dict[str, Result]
) -> None:
    """Add the metric of each task against cache bytes, and the loss on text by position."""
    cache_bytes = {name: runs[0].cache_bytes for name, runs in variants.items()}
    for task, result in metrics.items():
        figure = draw_points(cache_bytes, result.estimates, result.title)
        if task != "text":
            figure.axes[0].set_ylim(-0.02, 1.02)  # accuracies, with room for a marker
        page.figure(figure, f"{result.title} against cache bytes, with 95 % intervals over seeds")
    if "text" in tasks:
        curve_of = Run.losses_by_position
        figure = draw_curves(tasks["text"], curve_of, "tokens of context", "nats per token")
        figure.axes[0].set_xscale("log", base=2)
        page.figure(figure, "Loss by position in the context")


def add_differences(page: Page, variants: Groups) -> None:
    """Add what a reader must know to believe the result."""
    firsts = [runs[0] for runs in variants.values()]
    ratio = min(run.last["tokens"] / run.model.num_parameters() for run in firsts)
    text = f"Training took at least {ratio:.3g} tokens per parameter."
    if ratio < MIN_TOKENS:
        text += f" Warning: below {MIN_TOKENS}, {UNDERTRAINED}"
    machine = firsts[0].settings["machine"]
    page.paragraph(text)
    page.paragraph(EQUAL)
    page.texts(["setting", "values"], list(differences(variants).items()))
    page.paragraph(" ".join(f"{key}: {value}." for key, value in machine.items()))


def add_training(page: Page, tasks: dict[str, Groups]) -> None:
    """Add curves of the training loss beside those of the evaluations."""
    for task, groups in tasks.items():
        metric = next(iter(groups.values()))[0].metric
        for key in ("train_loss", metric):
            figure = draw_curves(groups, partial(Run.logged, key=key), "tokens", key)
            page.figure(figure, f"{task}: {key} during training")
