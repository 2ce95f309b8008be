"""Writes the report of a comparison: report.md, report.html and their plots."""

import sys
from collections import ChainMap, Counter, defaultdict
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import mean

from run import hardware
from run.errors import without_fix
from tools.compare.measures import TEXT_MEASURES, Result, evaluate
from tools.compare.page import Cell, Page
from tools.compare.plots import draw_curves, draw_points, in_bytes
from tools.compare.runs import Groups, Run, differences, group_by_shape, group_by_variant
from tools.compare.scaling import fit_report
from tools.latency import Latencies, latencies

MIN_TOKENS = 10  # a parameter; with fewer, the report warns
VERDICTS = ("better", "worse", "not distinguishable", "n/a")
RESULT = """
Means over seeds at the end of training ± half of their 95 % confidence interval (Student's t), and
the difference to the baseline. The best mean is bold. The verdict is that of a t-test over n pairs
of runs, those of one seed or else in their order, with p corrected for all tests of the column
(Holm, 5 % together); intervals are not corrected. Grey: not distinguishable, which is not equal:
the interval says how large the difference may be. One pair gives no verdict: train more seeds.
Differences of accuracies are taken to have a standard deviation of half a point at least,
since counts tie by chance.
""".strip()
COSTS = """
Repeated tokens complete a bigram that occurred earlier in the same context; new tokens are all
others. "4 x the context" is by how much the loss of the last tokens of windows of four times the
training context exceeds that of the same tokens behind one training context, without more training
or scaled positions. The cache holds one row of a full context in bf16; "fixed size" means that a
longer text needs no larger one. Training speed is the median over the lines of a log; decoding is
measured with one row at full context.
""".strip()
SIZE = """
FLOPs are those of forward and backward at full context. KV bytes are those of a cache in bf16 for
one row of a full context, with one slot more than tokens, for padding. Seconds are those of the
whole run, a mean over seeds. The other columns are medians of decoding in ms, with the first seed's
model as generate.py loads it. "8 x 256" is 8 rows that end at 256 tokens each; "first" is the time
to the first token of all rows, "next" from each token to the next.
""".strip()
EQUAL = """
With the same seed, parameters of the same name and shape have the same initial values, and batches
of the same size and text are the same. The settings that differ, and the variants that have each
value:
""".strip()
UNDERTRAINED = """
the ranking of models that are trained so briefly may change with more training; 20 are optimal for
their compute (Hoffmann et al., 2203.15556).
""".strip()


def write_report(
    folder: Path, runs: list[Run], problems: dict[str, str], baseline: str | None, command: str
) -> str:
    """Writes report.md, report.html and the plots into `folder`, and returns the summary.

    `runs` are finished; `problems` says why others are not, by the name of their folder. `baseline`
    names a variant; by default it is that of the first run. Raises ValueError if there is no run.
    """
    if not runs:
        reasons = [f"{name}: {without_fix(text)}" for name, text in problems.items()]
        raise ValueError(f"no run finished ({'; '.join(reasons) or 'no run'}). fix: train one")

    # Say what is missing at once; the page lists it too.
    for name, text in problems.items():
        print(f"not in the report: {name} ({without_fix(text)})", file=sys.stderr)
    print("measuring longer contexts and decoding for the report", file=sys.stderr)

    # Group by task and by variant, the baseline first.
    if baseline is None:
        baseline = runs[0].settings["name"]
    tasks = defaultdict(list)
    runs = sorted(runs, key=lambda run: run.settings["name"] != baseline)
    for run in runs:
        tasks[run.task].append(run)
    tasks = {task: group_by_variant(members) for task, members in tasks.items()}
    # The first group of the first task has the baseline's runs, or the first runs that finished.
    first, *_ = next(iter(tasks.values()))
    # Sizes, speeds and settings of a variant are those of the first task that it has.
    variants = ChainMap(*tasks.values())

    # Judge each task by its metric, and text by its parts too.
    metrics = {}
    for task, groups in tasks.items():
        title = next(iter(groups.values()))[0].metric_name
        metrics[task] = evaluate(title, attrgetter("loss"), groups, first, task != "text")
    results = [*metrics.values()]
    if "text" in tasks:
        for title, measure in TEXT_MEASURES.items():
            results.append(evaluate(title, measure, tasks["text"], first))
    text = summary(variants, first, metrics)
    if runs[0].settings["name"] != baseline:
        text = f"No run of {baseline} finished: {first} is the baseline instead. {text}"

    # The page, top to bottom: what a reader looks for first, then what folds away.
    folder.mkdir(parents=True, exist_ok=True)
    page = Page(f"Comparison of {len(variants)} variants")
    page.paragraph(text)
    context = min(group[0].model.context for group in variants.values())
    decoding = decoding_speed(variants, context)
    add_results(page, variants, results, decoding, f"1 x {context}, next")
    if problems:
        page.paragraph("Not in the table:")
        page.table(["run", "why"], list(problems.items()))
    add_plots(page, tasks, variants, metrics, folder)
    add_scale(page, tasks, folder)
    add_differences(page, variants)
    add_sizes(page, variants, decoding)
    add_training(page, tasks, folder)
    with page.folded("Commands"):
        page.code("\n".join([command, *[run.command for run in runs]]))
    page.write(folder)
    return f"{text}\nwritten: {folder / 'report.html'}"


def summary(variants: Groups, baseline: str, metrics: dict[str, Result]) -> str:
    """Lists the variants by verdict on each task, and the smallest cache that is not worse."""
    clauses = [f"Beside {baseline} (seeds: {len(variants[baseline])})"]
    tasks_not_worse = Counter({baseline: len(metrics)})
    for result in metrics.values():
        for text in VERDICTS:
            names = [name for name, verdict in result.verdicts.items() if verdict.text == text]
            if names:
                clauses.append(f"{result.title} {text}: {', '.join(names)}")
            if text in ("better", "not distinguishable"):
                tasks_not_worse.update(names)
    sentence = f"{'; '.join(clauses)}."

    # Users look for the smallest cache that costs nothing, as far as the runs can tell.
    names = [name for name, count in tasks_not_worse.items() if count == len(metrics)]
    smallest = min(names, key=lambda name: variants[name][0].cache_bytes)
    if smallest == baseline:
        return sentence
    size = in_bytes(variants[smallest][0].cache_bytes)
    return f"{sentence} The smallest cache not shown to be worse: {smallest}, {size}."


def add_results(
    page: Page, variants: Groups, results: list[Result], decoding: Latencies, case: str
) -> None:
    """Adds the table of verdicts and costs, a row a variant; `case` of decoding is on top."""
    rows = []
    for name, runs in variants.items():
        cache_note = "fixed size" if runs[0].cache_is_fixed else ""
        rows.append(
            [
                Cell(name),
                *[result_cell(result, name) for result in results],
                Cell(in_bytes(runs[0].cache_bytes), cache_note),
                Cell(f"{mean(run.tokens_per_second for run in runs):,.0f}"),
                Cell(f"{decoding[name][case]:.2f}"),
            ]
        )
    page.heading("Result")
    header = [result.title for result in results]
    page.cells(["variant", *header, "cache", "training, tokens/s", "decoding, ms/token"], rows)
    page.paragraph(RESULT)
    page.paragraph(COSTS)


def result_cell(result: Result, name: str) -> Cell:
    """The mean of a variant, its difference to the baseline, and the verdict."""
    if name not in result.estimates:
        return Cell("n/a", result.reasons.get(name, "not trained"))
    value = result.estimates[name].text()
    is_best = name == result.best
    if name not in result.verdicts:
        return Cell(value, "baseline", "", is_best)
    difference, pairs, p, text = result.verdicts[name]
    reason = "(one pair)" if pairs == 1 else f"{text} (p {p:.3f}, n {pairs})"
    return Cell(value, f"{difference.text('+')} {reason}", text, is_best)


def add_plots(
    page: Page, tasks: dict[str, Groups], variants: Groups, metrics: dict[str, Result], folder: Path
) -> None:
    """Adds the metric of each task against cache bytes, and the loss on text by position."""
    sizes = {name: runs[0].cache_bytes for name, runs in variants.items()}
    for task, result in metrics.items():
        ylim = None if task == "text" else (-0.02, 1.02)  # accuracies, with room for a marker
        figure = draw_points(sizes, result.estimates, result.title, ylim)
        caption = f"{result.title} against cache bytes, with 95 % intervals over seeds"
        page.figure(figure, folder / f"{task}-caches.png", caption)
    if "text" in tasks:
        curve_of = Run.losses_by_position
        figure = draw_curves(tasks["text"], curve_of, "tokens of context", "nats per token")
        figure.axes[0].set_xscale("log", base=2)
        page.figure(figure, folder / "positions.png", "Loss by position in the context")


def add_scale(page: Page, tasks: dict[str, Groups], folder: Path) -> None:
    """Adds the laws of loss and size, where models of several sizes were trained."""
    try:
        report = fit_report(group_by_shape(tasks.get("text", {})))
    except ValueError as error:
        page.paragraph(str(error))
        return
    if report is not None:
        text, header, rows, figure = report
        page.heading("Scale")
        page.paragraph(text)
        page.figure(figure, folder / "scale.png", "Loss against size, and the fitted laws")
        page.table(header, rows)


def add_differences(page: Page, variants: Groups) -> None:
    """Adds what a reader must know to believe the result."""
    ratios = []
    for runs in variants.values():
        ratios += [run.last["tokens"] / run.model.num_parameters() for run in runs]
    text = f"Training took at least {min(ratios):.3g} tokens per parameter."
    if min(ratios) < MIN_TOKENS:
        text += f" Warning: below {MIN_TOKENS}, {UNDERTRAINED}"
    machine = runs[0].settings["machine"]
    page.heading("What is equal, and what is not")
    page.paragraph(text)
    page.paragraph(EQUAL)
    page.table(["setting", "values"], list(differences(variants).items()))
    page.paragraph(" ".join(f"{key}: {value}." for key, value in machine.items()))


def decoding_speed(variants: Groups, context: int) -> Latencies:
    """Measures decoding with the first run of each variant."""
    run_dirs = {name: runs[0].folder for name, runs in variants.items()}
    # Decode on the CPU only where all runs were asked to use it.
    devices = {runs[0].settings["device"] for runs in variants.values()}
    device = hardware.pick_device("cpu" if devices == {"cpu"} else "auto")
    return latencies(run_dirs, context, device)


def add_sizes(page: Page, variants: Groups, decoding: Latencies) -> None:
    rows = []
    for name, runs in variants.items():
        first = runs[0]
        rows.append(
            [
                name,
                f"{first.model.num_parameters():,}",
                first.settings["model"]["hidden"],
                f"{first.model.training_flops() / 1e6:.2f}",
                f"{first.cache_bytes:,}",
                f"{first.last['tokens']:,}",
                f"{mean(run.last['seconds'] for run in runs):,.0f}",
                *[f"{milliseconds:.2f}" for milliseconds in decoding[name].values()],
            ]
        )
    header = ["variant", "parameters", "model.hidden", "MFLOP/token", "KV bytes", "tokens"]
    with page.folded("Size and speed"):
        page.table([*header, "seconds", *decoding[name]], rows)
        page.paragraph(SIZE)


def add_training(page: Page, tasks: dict[str, Groups], folder: Path) -> None:
    """Adds curves of the training loss beside those of the evaluations."""
    with page.folded("During training"):
        for task, groups in tasks.items():
            metric = next(iter(groups.values()))[0].metric
            for key in ("train_loss", metric):
                figure = draw_curves(groups, partial(Run.logged, key=key), "tokens", key)
                page.figure(figure, folder / f"{task}-{key}.png", f"{task}: {key}")
