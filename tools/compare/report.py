"""Writes the report of a comparison: report.md, report.html and their plots."""

import math
import sys
from itertools import chain
from pathlib import Path
from statistics import mean, median

from common import hardware
from tools.compare.page import Page
from tools.compare.plots import draw_caches, draw_curves
from tools.compare.runs import Groups, Run, differences, group_by_variant
from tools.compare.statistics import Estimate, Verdict, compare_to_baseline, estimate
from tools.latency import latencies

LOSS = """
Held-out loss at the end of training: the mean over seeds ± half of its 95 % confidence interval
(Student's t). The verdict is that of a paired t-test, with p corrected for all tests of the table
(Holm, 5 % together); the intervals are not corrected. Runs of one seed are a pair; where no seed
is shared, the order of the seeds pairs them. Not distinguishable is not equal: the interval of the
difference says how large it may be. One pair gives no verdict (n/a): train more seeds.
""".strip()
SIZE = """
FLOP are those of forward and backward at full context. KV bytes are those of a cache in bf16 that
holds one row with a full context; it has one slot more than tokens, for padding.
""".strip()
SPEED = """
Training: tokens/s are the median over the lines of the log, without the first, which compiles;
seconds and peak memory are those of the whole process; means over seeds, as are tokens. Decoding
with a cache: the first seed's model as generate.py loads it, for rows x tokens at the end;
milliseconds to the first token of all rows, and from each token to the next, medians.
""".strip()
EQUAL = """
Weights of the same name and shape start with the same values at a seed, and batches of the same
size and text are the same. These settings, which all runs have, differ:
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

    # Group by variant, the baseline first.
    groups = group_by_variant(runs)
    if baseline in groups:
        groups = {baseline: groups[baseline]} | groups
    losses = {}
    for name, group in groups.items():
        losses[name] = {run.seed: run.loss for run in group}
    first = next(iter(groups))
    verdicts = compare_to_baseline(losses.pop(first), losses)
    text = summary(groups, verdicts)
    if baseline not in (None, first):
        text = f"No run of {baseline} finished: {first} is the baseline instead. {text}"

    folder.mkdir(parents=True, exist_ok=True)
    # The page, top to bottom.
    page = Page(f"Comparison of {', '.join(groups)}")
    page.paragraph(text)
    page.code(command)
    page.figure(draw_caches(groups), folder / "caches.png")
    add_losses(page, groups, verdicts)
    if problems:
        page.paragraph("Not in the table:")
        page.table(["run", "why"], list(problems.items()))
    add_sizes(page, groups)
    add_training_speed(page, groups)
    add_decoding_speed(page, groups)
    page.heading("During training")
    page.figure(draw_curves(groups), folder / "curves.png")
    add_settings(page, list(chain.from_iterable(groups.values())))
    page.write(folder)
    return f"{text}\nwritten: {folder / 'report.html'}"


def short(problem: str) -> str:
    return problem.partition(". fix: ")[0]


def summary(groups: Groups, verdicts: dict[str, Verdict]) -> str:
    """Lists the variants by verdict, and names the smallest cache that is not worse."""
    baseline = next(iter(groups))
    clauses = [f"Beside {baseline} (seeds: {len(groups[baseline])})"]
    for text in ("better", "worse", "not distinguishable", "n/a"):
        names = [name for name, verdict in verdicts.items() if verdict.text == text]
        if names:
            label = "n/a (one pair of runs gives no verdict)" if text == "n/a" else text
            clauses.append(f"{label}: {', '.join(names)}")
    sentence = f"{'; '.join(clauses)}."

    # Users look for the smallest cache that costs nothing in loss, as far as the runs can tell.
    sizes = {}
    for name, runs in groups.items():
        if name == baseline or verdicts[name].text in ("better", "not distinguishable"):
            sizes[name] = runs[0].cache_bytes_per_token
    smallest = min(sizes, key=sizes.get)
    if smallest == baseline:
        return sentence
    difference = verdicts[smallest].difference
    size = f"{sizes[smallest]:,.0f} bytes a token"
    bound = f"{difference.mean + difference.ci95:+.4f} at most (95 %)"
    return f"{sentence} The smallest cache not shown to be worse: {smallest}, {size}, {bound}."


def add_losses(page: Page, groups: Groups, verdicts: dict[str, Verdict]) -> None:
    rows = []
    for name, runs in groups.items():
        losses = [run.loss for run in runs]
        row = [name, len(losses), with_interval(estimate(losses))]
        verdict = verdicts.get(name)
        if verdict is None:
            row += ["", "", "", "baseline"]
        else:
            p = f"{verdict.p:.3f}".replace("nan", "n/a")
            row += [with_interval(verdict.difference, "+"), verdict.pairs, p, verdict.text]
        rows.append(row)
    page.heading("Loss")
    metric = runs[0].metric_name
    page.table(["variant", "seeds", metric, "difference", "pairs", "p", "verdict"], rows)
    page.paragraph(LOSS)


def with_interval(value: Estimate, sign: str = "") -> str:
    return f"{value.mean:{sign}.4f} ± {value.ci95:.4f}".replace("nan", "n/a")


def add_sizes(page: Page, groups: Groups) -> None:
    rows = []
    for name, runs in groups.items():
        run = runs[0]
        parameters = sum(p.numel() for p in run.model.parameters())
        row = [name, f"{parameters:,}", run.settings["model"]["hidden"]]
        row += [f"{run.model.training_flops() / 1e6:.2f}"]
        row += [f"{run.cache_bytes:,}", f"{run.cache_bytes_per_token:,.0f}"]
        rows.append(row)
    page.heading("Size")
    header = ["variant", "parameters", "model.hidden", "MFLOP/token", "KV bytes", "per token"]
    page.table(header, rows)
    page.paragraph(SIZE)


def add_training_speed(page: Page, groups: Groups) -> None:
    rows = []
    for name, runs in groups.items():
        rates = []
        megabytes = []
        for run in runs:
            # The first line includes compilation; a short run has no other.
            lines = [line for line in run.lines if "train_loss" in line]
            rates += [line["tokens_per_second"] for line in lines[1:] or lines]
            megabytes.append(lines[-1].get("peak_memory_bytes", math.nan) / 1e6)
        tokens = mean(run.last["tokens"] for run in runs)
        seconds = mean(run.last["seconds"] for run in runs)
        figures = (tokens, median(rates), seconds, mean(megabytes))
        rows.append([name, *[f"{figure:,.0f}" for figure in figures]])
    page.heading("Speed")
    page.paragraph("Training:")
    page.table(["variant", "tokens", "tokens/s", "seconds", "peak memory, MB"], rows)


def add_decoding_speed(page: Page, groups: Groups) -> None:
    """Measures decoding with the first run of each variant."""
    first_runs = {name: runs[0] for name, runs in groups.items()}
    context = min(run.model.context for run in first_runs.values())
    # Decode on the CPU only where all runs were asked to use it.
    devices = {run.settings["device"] for run in first_runs.values()}
    device = hardware.pick_device("cpu" if devices == {"cpu"} else "auto")
    run_dirs = {name: run.folder for name, run in first_runs.items()}
    rows = []
    for name, cases in latencies(run_dirs, context, device).items():
        rows.append([name, *[f"{milliseconds:.2f}" for milliseconds in cases.values()]])
    page.paragraph("Decoding, in ms:")
    page.table(["variant", *cases], rows)
    page.paragraph(SPEED)


def add_settings(page: Page, runs: list[Run]) -> None:
    page.heading("What is equal, and what is not")
    page.paragraph(EQUAL)
    page.table(["setting", "values"], list(differences(runs).items()))
    machine = [f"{key}: {value}." for key, value in runs[0].settings["machine"].items()]
    page.paragraph(" ".join(machine))
    page.heading("Commands")
    page.code("\n".join(run.command for run in runs))
