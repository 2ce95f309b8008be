"""Write the report of a comparison, report.html, from the records of its runs."""

import math
from collections import defaultdict
from collections.abc import Callable
from html import escape
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.figure import Figure
from pandas import DataFrame

from run.errors import without_fix
from tools.compare.comparison import (
    AT_EDGE,
    DIVERGED,
    SOLVED,
    Comparison,
    judge_losses,
    judge_task,
    require_shared,
    sort_runs,
)
from tools.compare.ladder import make_ladder
from tools.compare.plots import draw_forest, to_svg
from tools.compare.runs import Run, command
from tools.compare.statistics import Samples, Verdict, seeds_to_decide, with_interval
from tools.compare.tuning import find_optimum

# The minimum for a decision. With fewer seeds, only large differences are found. With fewer tokens,
# the ranking may change with more training; 20 tokens per parameter are compute-optimal (Hoffmann
# et al., 2203.15556).
MIN_SEEDS = 3
MIN_TOKENS = 10  # per parameter
# Machine settings that affect the speed.
SPEED_KEYS = ("device", "threads", "processes", "precision", "compiled")
MAX_SPREAD = 1.2  # if the fastest and slowest seeds differ by a higher factor, show the range
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Comparison</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 1rem auto; padding: 0 1rem }}
h1 {{ font-size: 1rem; font-weight: normal; margin-top: 3rem }}
.answer {{ font-size: 1.35rem; font-weight: 600 }}
svg {{ width: 40rem; max-width: 100%; height: auto; fill: currentColor }}
.scroll {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: .9rem; white-space: nowrap }}
th, td {{ padding: .3rem .6rem; text-align: right; border: 0; border-bottom: 1px solid #8885 }}
th:first-child, td:first-child {{ text-align: left }}
pre {{ overflow-x: auto }}
</style>
{sections}
<p>{missing}</p>
<p>Trained at commit {commits}. Commands that wrote this page or trained its runs:</p>
<pre>{command}</pre>
</html>
"""
SECTION = """<h1>{title}</h1>
<p class="answer">{answer}</p>
<p>{gaps}</p>
{figure}
<div class="scroll">{table}</div>
<p>{caption}</p>
"""
LOSSES = """
Differences are from {baseline}, with simultaneous 95 % intervals (docs/compare.md). Better (blue):
the interval ends below zero. As good: it ends below {margin:g}, the dotted line. Worse (orange): it
begins above zero, and ends above {margin:g}. Which of several better variants is best was not
tested. Each dot in the figure is a seed.
"""
SEEDS = """
A seed solves the task if its last accuracy is at least {solved:.0f} %. Better or worse:
significantly more or fewer seeds solve it than with {baseline} (Fisher's exact test). Guessing the
most frequent answer of each row gives {floor:.1f} %. Each dot in the figure is a seed; equal dots
hide each other.
"""


Cells = dict[str, dict[str, str]]  # by variant and column title
Judgment = tuple[str, list[str], Cells, Figure, str]  # answer, remedies, cells, figure, caption


class Section(NamedTuple):
    """The part of a report about one task and model size, or about all sizes."""

    title: str
    answer: str  # a few sentences
    gaps: str  # a sentence with the unmet conditions of a verdict; "" if there are none
    figure: Figure | None
    table: DataFrame
    caption: str

    def __str__(self) -> str:
        parts = [self.answer, self.gaps]
        if len(self.table):
            parts.append(self.table.to_string(index=False))
        return "\n".join(part for part in parts if part)

    def html(self) -> str:
        texts = {name: escape(getattr(self, name)) for name in ("title", "answer", "gaps")}
        return SECTION.format(
            **texts,
            figure="" if self.figure is None else to_svg(self.figure, self.title),
            table=self.table.to_html(index=False, border=0),
            caption=escape(self.caption.strip()),
        )


def write_report(folder: Path, runs: list[Run], problems: dict[str, str], margin: float) -> str:
    """Write report.html and the figures into `folder`, and return the summary.

    `runs` are finished or diverged runs, and the first one determines the baseline; `problems` maps
    folder names of runs that are left out to the reasons. A variant is as good as the baseline if
    the interval of its difference ends below `margin`. Raises ValueError if there are no runs, or
    if runs cannot be compared.
    """
    missing = [f"{name} is not in the report: {why}" for name, why in problems.items()]
    if not runs:
        raise ValueError(f"no finished runs to report on ({without_fix('; '.join(missing))})")

    # Models of the same size are compared with each other, task by task.
    members = defaultdict(list)
    for run in runs:
        members[run.task, run.settings["model"]["dim"]].append(run)
    for task in {run.task for run in runs}:
        require_shared([run for run in runs if run.task == task])
    comparisons = {key: sort_runs(each) for key, each in members.items()}
    sections = {}
    for (task, dim), comparison in comparisons.items():
        context = members[task, dim][0].settings["context"]
        title = f"{task}, dim {dim}, context {context}"
        sections[f"{task}-{dim}"] = make_section(comparison, title, margin)
    judged = [each for (task, _), each in comparisons.items() if task == "text" and each.groups]
    if len(judged) > 1:
        answers = {each.dim: sections[f"text-{each.dim}"].answer for each in judged}
        ladder = make_ladder(judged, answers, margin)
        if ladder is not None:
            sections = {"text-ladder": Section(*ladder)} | sections

    folder.mkdir(parents=True, exist_ok=True)
    for name, section in sections.items():
        if section.figure is not None:
            file = folder / f"{name}.svg"
            file.write_text(to_svg(section.figure, section.title), encoding="utf-8")
    page = PAGE.format(
        sections="\n".join(section.html() for section in sections.values()),
        missing="<br>".join(map(escape, missing)),
        commits=escape(", ".join(sorted({str(run.commit) for run in runs}))),
        command=escape("\n".join(dict.fromkeys([command(), *(run.command or "" for run in runs)]))),
    )
    file = folder / "report.html"
    file.write_text(page, encoding="utf-8")
    return "\n\n".join([*map(str, sections.values()), *missing, f"written: {file}"])


def make_section(comparison: Comparison, title: str, margin: float) -> Section:
    """Judge the runs of one task and size."""
    if not comparison.groups:
        answer = f"No answer yet: no run of {comparison.baseline}, the baseline, can be judged."
        return Section(title, answer, "", None, DataFrame(), "")
    judge = judge_seeds if comparison.is_task else judge_texts
    answer, remedies, cells, figure, caption = judge(comparison, margin)
    rows = []
    for name in comparison.groups:
        rows.append({"variant": name, **cells[name], **cost_cells(comparison, name)})
    gaps = f"A verdict needs {'; '.join(remedies)}." if remedies else ""
    return Section(title, answer, gaps, figure, DataFrame(rows).fillna(""), caption)


def judge_texts(comparison: Comparison, margin: float) -> Judgment:
    """Judge the variants by their losses on text."""
    baseline = comparison.baseline
    unit = comparison.first.metric_name
    verdicts, is_unequal = judge_losses(comparison, margin)
    texts = {name: verdict.text for name, verdict in verdicts.items()}
    data, remedies = find_gaps(comparison, MIN_SEEDS)
    answer, best = choose(comparison, texts, data, remedies)
    if best is not None:
        answer += f" {describe_gain(comparison, best, verdicts[best])}"

    cells = {}
    for name, runs in comparison.groups.items():
        difference = with_interval(*verdicts[name][:3]) if name in verdicts else ""
        cells[name] = {
            unit: f"{fmean(run.loss for run in runs):.4f}",
            "difference": difference,
            "verdict": texts.get(name, "baseline"),
        }
    figure = draw_forest(
        losses_of(comparison),
        baseline,
        f"difference from {baseline}, {unit} (left is better)",
        verdicts,
        margin,
    )
    caption = LOSSES.format(baseline=baseline, margin=margin)
    detectable = [each.detectable for each in verdicts.values() if math.isfinite(each.detectable)]
    if detectable:
        caption += f"A difference of {max(detectable):.2g} would have been found (80 % power). "
    if is_unequal:
        caption += "Spreads over seeds differ, so intervals are from Welch's tests (Bonferroni)."
    return answer, remedies, cells, figure, caption


def judge_seeds(comparison: Comparison, _: float) -> Judgment:
    """Judge the variants by the number of seeds that solve a task; mean accuracies say little."""
    baseline = comparison.baseline
    task = comparison.first.task
    texts = judge_task(comparison)
    solved = {}
    for name in comparison.groups:
        solved[name] = f"{comparison.num_solved(name)} of {comparison.num_seeds(name)}"
    min_seeds = max(MIN_SEEDS, seeds_to_decide(max(1, len(comparison.others))))
    data, remedies = find_gaps(comparison, min_seeds)
    answer, best = choose(comparison, texts, data, remedies)
    if best is not None:
        answer += f" {solved[best]} seeds solve {task}, and {solved[baseline]} seeds of {baseline}."
    elif not any(map(comparison.num_solved, comparison.groups)):
        answer = f"No variant solves {task}."
    elif comparison.num_solved(baseline) == comparison.num_seeds(baseline) >= MIN_SEEDS:
        answer = f"Keep {baseline}: {solved[baseline]} seeds solve {task}; no variant beats it."
        remedies = []

    cells = {}
    for name, runs in comparison.groups.items():
        accuracies = [100 * run.loss for run in runs]
        tokens = comparison.tokens_until_solved(name)
        cells[name] = {
            "seeds that solve it": solved[name],
            "verdict": texts.get(name, "baseline"),
            "million tokens to solve it (median)": (
                "never" if math.isnan(tokens) else f"{tokens / 1e6:.2f}"
            ),
            "accuracy, %": f"{min(accuracies):.1f} to {max(accuracies):.1f}",
        }
    figure = draw_forest(
        losses_of(comparison), baseline, f"{comparison.first.metric_name} (right is better)"
    )
    floor = 100 * comparison.first.floor
    caption = SEEDS.format(solved=100 * SOLVED, baseline=baseline, floor=floor)
    return answer, remedies, cells, figure, caption


def losses_of(comparison: Comparison) -> Samples:
    return {name: [run.loss for run in runs] for name, runs in comparison.groups.items()}


def choose(
    comparison: Comparison, texts: dict[str, str], data: list[str], remedies: list[str]
) -> tuple[str, str | None]:
    """Return the answer, and the variant to take if one is better than the baseline.

    `texts` has the verdict on each variant, and `data` and `remedies` are from find_gaps().
    """
    baseline = comparison.baseline
    better = [name for name in comparison.others if texts[name] == "better"]
    withheld = {text for text in texts.values() if text in (AT_EDGE, DIVERGED)}
    if better and remedies:
        reasons = ", ".join(data) or "learning rates"
        return f"Only a hint ({reasons}): {better[0]} looks better.", better[0]
    if better:
        also = f" (also better: {', '.join(better[1:])})" if better[1:] else ""
        return f"Take {better[0]}{also}.", better[0]

    answer = f"No variant is better than {baseline} for certain."
    if not texts:
        answer = f"{baseline} is the only variant: there is nothing to compare it with."
    elif data:
        answer = f"Too little data to choose: {', '.join(data)}."
    elif withheld == {*texts.values()}:
        answer = f"No verdict on any variant: {', '.join(sorted(withheld))}."
    return answer, None


def describe_gain(comparison: Comparison, name: str, verdict: Verdict) -> str:
    """Describe how much lower a variant's loss is, how certain that is, and what it costs."""
    # Keep at least one significant digit of the bound nearest to zero.
    digits = min(8, max(3, math.ceil(-math.log10(-verdict.high))))
    runs = comparison.groups[name]
    first = comparison.first
    costs = f"{runs[0].cache_bytes / first.cache_bytes:.0%} of the cache"
    theirs = comparison.groups[comparison.baseline]
    if have_same_machine(comparison) and has_one_speed(runs) and has_one_speed(theirs):
        speed = fmean(map(speed_of, runs)) / fmean(map(speed_of, theirs))
        costs += f" and {speed:.0%} of the training speed"
    return (
        f"Its loss is {-verdict.difference:.{digits}f} {first.metric_name} lower than "
        f"{comparison.baseline}'s (95 % interval {-verdict.high:.{digits}f} to "
        f"{-verdict.low:.{digits}f}, {len(runs)} seeds), with {costs}."
    )


def find_gaps(comparison: Comparison, min_seeds: int) -> tuple[list[str], list[str]]:
    """Return descriptions of missing data, such as seeds, and the remedies for all gaps."""
    groups = comparison.groups
    data = []
    remedies = []
    seeds = min(map(len, groups.values()))
    if seeds < min_seeds:
        data.append(f"{seeds} of {min_seeds} needed seeds per variant")
        remedies.append(f"{min_seeds} seeds (seed={','.join(map(str, range(min_seeds)))})")

    runs = [run for members in groups.values() for run in members]
    tokens = [run.last["tokens"] for run in runs]
    if min(tokens) < max(tokens):
        data.append(f"some runs saw {min(tokens):,} tokens and others {max(tokens):,}")
        remedies.append("the same number of tokens for all runs")

    precisions = sorted({run.settings["machine"]["precision"] for run in runs})
    if len(precisions) > 1 and "precision" not in comparison.first.swept:
        data.append(f"runs in {' and '.join(precisions)}")
        remedies.append("the same precision for all runs")

    # Rounded, because parameter counts are matched only to within 0.5%.
    most = max(runs[0].model.num_parameters() for runs in groups.values())
    ratio = round(min(tokens) / most, 1)
    if ratio < MIN_TOKENS and not comparison.is_task:
        steps = math.ceil(MIN_TOKENS * most / comparison.first.settings["batch_tokens"])
        data.append(f"{ratio:g} of {MIN_TOKENS} needed tokens per parameter")
        remedies.append(f"{MIN_TOKENS} tokens per parameter (steps={steps} max_minutes=null)")

    # Default learning rates are scaled to the model and the run, but not tuned for the variant.
    untuned = [name for name, runs in groups.items() if runs[0].name not in comparison.losses]
    if untuned:
        remedies.append("learning rates tuned for each variant (--tune)")
    at_edge = [name for name in groups if comparison.is_at_edge(name)]
    if at_edge:
        remedies.append(f"a wider range of learning rates for {', '.join(at_edge)}")
    return data, remedies


def cost_cells(comparison: Comparison, name: str) -> dict[str, str]:
    """Return a variant's costs, parts of its loss, and its best learning-rate factor, by column."""
    runs = comparison.groups[name]
    first = runs[0]
    cells = {
        "cache, kB": f"{first.cache_bytes / 1e3:,.1f}",
        "MFLOP/token": f"{first.model.training_flops() / 1e6:,.2f}",
    }
    if have_same_machine(comparison):
        cells["tokens/s"] = speed_range(runs)
    cells |= {title: f"{value:.2f}" for title, value in first.decoding.items()}
    if not comparison.is_task:
        cells["new tokens, nats"] = mean(runs, lambda run: slice_loss(run, "new"), ".4f")
        cells["repeated"] = mean(runs, lambda run: slice_loss(run, "repeated"), ".4f")
        cells["rise at 4 x context"] = mean(runs, length_change, "+.4f")
    if first.name in comparison.losses:
        cells["best rate"] = f"x {find_optimum(comparison.losses[first.name]).factor:.2f}"
    return cells


def mean(runs: list[Run], measure: Callable[[Run], float], form: str) -> str:
    """Format the mean of a measure over the runs; "" if a run lacks it."""
    value = fmean(measure(run) for run in runs)
    return format(value, form) if math.isfinite(value) else ""


def have_same_machine(comparison: Comparison) -> bool:
    """Whether all runs agree in SPEED_KEYS, so that their training speeds are comparable."""
    machines = set()
    for runs in comparison.groups.values():
        for run in runs:
            machine = run.settings.get("machine", {})
            machines.add(tuple(str(machine.get(key)) for key in SPEED_KEYS))
    return len(machines) == 1


def speed_range(runs: list[Run]) -> str:
    """Return the mean training speed, or its range if seeds differ by more than MAX_SPREAD."""
    if has_one_speed(runs):
        return mean(runs, speed_of, ",.0f")
    slowest, fastest = (end(map(speed_of, runs)) for end in (min, max))
    return f"{slowest:,.0f} to {fastest:,.0f}" if math.isfinite(fastest) else ""


def has_one_speed(runs: list[Run]) -> bool:
    """Whether the seeds of a variant are known to have trained at about the same speed."""
    return max(map(speed_of, runs)) <= MAX_SPREAD * min(map(speed_of, runs))


def speed_of(run: Run) -> float:
    return run.tokens_per_second


def slice_loss(run: Run, name: str) -> float:
    """Return a slice's loss on held-out text in nats per token; NaN if it was not logged."""
    return run.last.get("slices", {}).get(name, {}).get("loss", math.nan)


def length_change(run: Run) -> float:
    """Return the loss rise on the same tokens at 4 x the training context; NaN if unknown."""
    if not run.lengths:
        return math.nan
    return run.lengths["4"] - run.lengths["1"]
