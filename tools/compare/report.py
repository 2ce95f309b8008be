"""Writes the report of a comparison: report.md, report.html and their plots."""

import re
import sys
from collections import defaultdict
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import mean

from common import hardware
from tools.compare.measures import METRIC, Result, evaluate, measures_of
from tools.compare.options import option_rows
from tools.compare.page import Cell, Page
from tools.compare.plots import Curve, draw_curves, draw_points, in_bytes
from tools.compare.runs import Groups, Run, differences, group_by_shape, group_by_variant
from tools.compare.scaling import fit_report
from tools.latency import latencies

MIN_TOKENS = 10  # a parameter; with fewer, the report warns
RESULT = """
Small: the difference to the baseline, paired by seed, ± half of its 95 % interval. Best in bold;
grey: not distinguishable from the baseline, which is not the same as equal. Repeated tokens
complete two tokens that stood earlier in the same context, new tokens are all others. The cache is
that of one row in bf16; training speed is the median over the lines of a log, decoding that of one
row at full context.
""".strip()
TESTS = """
The mean over seeds at the end of training ± half of its 95 % confidence interval (Student's t). The
verdict is that of a paired t-test, with p corrected for all tests of the table (Holm, 5 %
together); the intervals are not corrected. Runs of one seed are a pair; where no seed is shared,
the order of the seeds pairs them. Not distinguishable is not equal: the interval of the difference
says how large it may be. One pair gives no verdict (n/a): train more seeds. Differences of
accuracies are taken to have a standard deviation of half a point at least, since counts tie by
chance.
""".strip()
SIZE = """
FLOP are those of forward and backward at full context. KV bytes are those of a cache in bf16 that
holds one row with a full context; it has one slot more than tokens, for padding. Where another
token adds nothing to the cache of a long text, these bytes are all that it ever holds. Seconds are
those of the whole process, a mean over seeds.
""".strip()
SPEED = """
With a cache: the first seed's model as generate.py loads it, for rows x tokens at the end; to the
first token of all rows, and from each token to the next, medians.
""".strip()
EQUAL = """
Weights of the same name and shape start with the same values at a seed, and batches of the same
size and text are the same. These settings, which all runs have, differ:
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
        reasons = [f"{name}: {short(text)}" for name, text in problems.items()]
        raise ValueError(f"no run finished ({'; '.join(reasons) or 'no run'}). fix: train one")

    # Say what is missing at once; the page lists it too.
    for name, text in problems.items():
        print(f"not in the report: {name} ({short(text)})", file=sys.stderr)

    # Group by task and by variant, the baseline first. Sizes and speeds are those of one task.
    tasks = {}
    for run in runs:
        tasks.setdefault(run.task, []).append(run)
    tasks = {task: group_by_variant(members) for task, members in tasks.items()}
    groups = next(iter(tasks.values()))
    first = baseline if baseline in groups else next(iter(groups))
    for task, others in tasks.items():
        if first in others:
            tasks[task] = {first: others[first]} | others
    groups = next(iter(tasks.values()))
    results = [evaluate(each, tasks[each.task], first) for each in measures_of(tasks)]
    text = summary(groups, results)
    if baseline not in (None, first):
        text = f"No run of {baseline} finished: {first} is the baseline instead. {text}"

    folder.mkdir(parents=True, exist_ok=True)
    # The page, top to bottom: what a reader looks for first, then what folds away.
    page = Page(f"Comparison of {', '.join(groups)}")
    page.paragraph(text)
    decoding = decoding_speed(groups)
    add_results(page, tasks, results, decoding)
    if problems:
        page.paragraph("Not in the table:")
        page.table(["run", "why"], list(problems.items()))
    add_plots(page, tasks, results, folder)
    add_scale(page, groups, folder)
    add_options(page, groups)
    for result in results:
        add_measure(page, result, tasks[result.measure.task])
    add_sizes(page, groups)
    add_decoding(page, decoding)
    add_training(page, tasks, folder)
    add_settings(page, [*chain(*groups.values())])
    with page.folded("Commands"):
        page.code("\n".join([command, *[run.command for run in runs]]))
    page.write(folder)
    return f"{text}\nwritten: {folder / 'report.html'}"


def short(problem: str) -> str:
    return problem.partition(". fix: ")[0]


def summary(groups: Groups, results: list[Result]) -> str:
    """Lists the variants by verdict on each task, and the smallest cache that is not worse."""
    baseline = next(iter(groups))
    clauses = [f"Beside {baseline} (seeds: {len(groups[baseline])})"]
    verdicts = defaultdict(set)
    judged = [result for result in results if result.measure.value is METRIC]
    for result in judged:
        names = defaultdict(list)
        for name, verdict in result.verdicts.items():
            names[verdict.text].append(name)
            verdicts[name].add(verdict.text)
        # The kind of measure needs no name where there is one.
        prefix = f"{result.measure.name.lower()} " * (len(judged) > 1)
        for text in sorted(names):
            label = "n/a (one pair of runs gives no verdict)" if text == "n/a" else text
            clauses.append(f"{prefix}{label}: {', '.join(names[text])}")
    sentence = f"{'; '.join(clauses)}."

    # Users look for the smallest cache that costs nothing, as far as the runs can tell.
    sizes = {}
    for name, runs in groups.items():
        if verdicts[name] <= {"better", "not distinguishable"}:
            sizes[name] = runs[0].cache_bytes
    smallest = min(sizes, key=sizes.get)
    if smallest == baseline:
        return sentence
    difference = judged[0].text(judged[0].verdicts[smallest].difference, "+")
    size = f"{smallest}, {in_bytes(sizes[smallest])}"
    return f"{sentence} The smallest cache not shown to be worse: {size}, {difference}."


def add_results(
    page: Page,
    tasks: dict[str, Groups],
    results: list[Result],
    decoding: dict[str, dict[str, float]],
) -> None:
    """Adds the table of verdicts, a row a variant."""
    rows = []
    for name in dict.fromkeys(chain(*tasks.values())):
        row = [Cell(name), *[result_cell(result, name) for result in results]]
        # Of one row, the longest case that was measured comes last.
        cases = decoding.get(name, {})
        times = [f"{cases[case]:.2f}" for case in cases if re.match("1 x .*next", case)]
        rows.append([*row, Cell(["n/a", *times][-1])])
    page.heading("Result")
    header = [result.measure.title for result in results]
    page.cells(["variant", *header, "Decoding, ms a token"], rows)
    page.paragraph(RESULT)


def result_cell(result: Result, name: str) -> Cell:
    """The mean of a variant, its difference to the baseline, and the verdict."""
    if name not in result.estimates:
        return Cell("n/a", result.reasons.get(name, "not trained"))
    value, _, _ = result.text(result.estimates[name]).partition(" ")
    if name not in result.verdicts:
        return Cell(value, "baseline", "", name == result.best)
    difference, _, _, text = result.verdicts[name]
    return Cell(value, f"{result.text(difference, '+')} {text}", text, name == result.best)


def add_plots(page: Page, tasks: dict[str, Groups], results: list[Result], folder: Path) -> None:
    """Adds what each task is judged by against cache bytes, then its last evaluation in parts."""
    figures = {}
    for measure, estimates, *_ in results:
        if measure.value is METRIC:
            points = {}
            for name, value in estimates.items():
                points[name] = (tasks[measure.task][name][0].cache_bytes, value)
            figure = draw_points(points, "cache bytes at full context, bf16", measure.title)
            caption = f"{measure.name} against cache bytes, with 95 % intervals over seeds"
            figures[folder / f"{measure.task}-caches.png"] = (figure, caption)
    for task, groups in tasks.items():
        if not last_in_parts(next(iter(groups.values()))[0]):
            continue  # an earlier version did not log it
        parts = "number of pairs"
        unit = "accuracy"
        if task == "text":
            parts = "position, in tokens of context"
            unit = "nats per token"
        figure = draw_curves(groups, last_in_parts, parts, unit)
        figure.axes[0].set_xscale("log", base=2)
        figures[folder / f"{task}-parts.png"] = (figure, f"{task}: {unit} by {parts}")
    page.figures(figures)


def last_in_parts(run: Run) -> Curve:
    """The last evaluation by position, or in a task by the number of pairs."""
    values = run.last
    if run.task == "text":
        slices = run.last.get("slices", {})
        values = {name: each["loss"] for name, each in slices.items()}
    parts = {}
    for name, value in values.items():
        if match := re.fullmatch(r"(?:position|.*_accuracy).*?(\d+)", name):
            parts[int(match[1])] = value
    return parts


def add_scale(page: Page, groups: Groups, folder: Path) -> None:
    """Adds the laws of loss and size, where models of several sizes were trained."""
    try:
        report = fit_report(group_by_shape(groups))
    except ValueError as error:
        page.paragraph(str(error))
        return
    if report is not None:
        text, header, rows, figure = report
        page.heading("Scale")
        page.paragraph(text)
        page.figures({folder / "scale.png": (figure, "Loss against size, and the fitted laws")})
        page.table(header, rows)


def add_options(page: Page, groups: Groups) -> None:
    """Adds what a reader must know to believe the result."""
    ratio = min(run.last["tokens"] / run.parameters for run in chain(*groups.values()))
    text = f"Training took {ratio:.3g} tokens a parameter or more."
    if ratio < MIN_TOKENS:
        text += f" Warning: below {MIN_TOKENS}, {UNDERTRAINED}"
    page.heading("What to know before believing it")
    page.paragraph(text)
    page.paragraph("The options of the baseline, and those of each variant that are others:")
    page.table(["variant", "options"], option_rows(groups))


def add_measure(page: Page, result: Result, groups: Groups) -> None:
    """Adds all figures of a measure, with the p-values."""
    rows = [[name, "n/a", reason] for name, reason in result.reasons.items()]
    for name, value in result.estimates.items():
        row = [name, len(groups[name]), result.text(value), "", "", "", "baseline"]
        if name in result.verdicts:
            difference, pairs, p, text = result.verdicts[name]
            p = f"{p:.3f}".replace("nan", "n/a")
            row[3:] = [result.text(difference, "+"), pairs, p, text]
        rows.append(row)
    with page.folded(result.measure.name):
        unit = result.measure.unit
        page.table(["variant", "seeds", unit, "difference", "pairs", "p", "verdict"], rows)
        page.paragraph(TESTS)


def add_sizes(page: Page, groups: Groups) -> None:
    rows = []
    for name, runs in groups.items():
        run = runs[0]
        row = [name, f"{run.parameters:,}", run.settings["model"]["hidden"]]
        row += [f"{run.model.training_flops() / 1e6:.2f}"]
        row += [f"{run.cache_bytes:,}", f"{run.cache_growth:,}" if run.cache_growth else "nothing"]
        row += [f"{run.last['tokens']:,}", f"{mean(run.last['seconds'] for run in runs):,.0f}"]
        rows.append(row)
    with page.folded("Size"):
        header = ["variant", "parameters", "model.hidden", "MFLOP/token", "KV bytes"]
        header += ["another token adds", "trained on tokens", "seconds"]
        page.table(header, rows)
        page.paragraph(SIZE)


def add_decoding(page: Page, decoding: dict[str, dict[str, float]]) -> None:
    rows = []
    for name, cases in decoding.items():
        rows.append([name, *[f"{milliseconds:.2f}" for milliseconds in cases.values()]])
    with page.folded("Decoding, in ms"):
        page.table(["variant", *cases], rows)
        page.paragraph(SPEED)


def decoding_speed(groups: Groups) -> dict[str, dict[str, float]]:
    """Measures decoding with the first run of each variant: ms by variant and case."""
    first_runs = {name: runs[0] for name, runs in groups.items()}
    context = min(run.model.context for run in first_runs.values())
    # Decode on the CPU only where all runs were asked to use it.
    devices = {run.settings["device"] for run in first_runs.values()}
    device = hardware.pick_device("cpu" if devices == {"cpu"} else "auto")
    run_dirs = {name: run.folder for name, run in first_runs.items()}
    return latencies(run_dirs, context, device)


def add_training(page: Page, tasks: dict[str, Groups], folder: Path) -> None:
    """Adds curves of the training loss beside those of the evaluations."""
    figures = {}
    for task, groups in tasks.items():
        for key in ("train_loss", next(iter(groups.values()))[0].metric):
            figure = draw_curves(groups, partial(curve, key=key), "tokens", key)
            figures[folder / f"{task}-{key}.png"] = (figure, f"{task}: {key} during training")
    with page.folded("During training"):
        page.figures(figures)


def curve(run: Run, key: str) -> Curve:
    """Maps tokens to the value of each line of the log that has this key."""
    return {line["tokens"]: line[key] for line in run.lines if key in line}


def add_settings(page: Page, runs: list[Run]) -> None:
    machine = [f"{key}: {value}." for key, value in runs[0].settings["machine"].items()]
    with page.folded("What is equal, and what is not"):
        page.paragraph(EQUAL)
        page.table(["setting", "values"], list(differences(runs).items()))
        page.paragraph(" ".join(machine))
