"""The report of a comparison: report.md, report.html, which needs no other file, and the plots in both."""

import os
import platform
import subprocess
from base64 import b64encode
from collections.abc import Callable
from html import escape
from pathlib import Path
from statistics import mean, median

import torch
from matplotlib.figure import Figure

from model.build import ROOT
from tools.latency import latencies
from tools.runs import Run, differences, variants
from tools.verdict import Estimate, Verdict, estimate, verdicts
from training import hardware

Block = tuple[str, object]  # h1, h2, p, pre, table or img, and what is in it
Groups = dict[str, list[Run]]  # the runs of each variant, the baseline first
BF16 = torch.bfloat16
AXES: dict[str, Callable[[Run, dict], float]] = {
    "tokens": lambda run, look: look["tokens"],
    "training FLOP": lambda run, look: look["tokens"] * run.model.training_flops(),
    "seconds": lambda run, look: look["seconds"],
}
LOSS = """Held-out bits per byte at the end of training, mean over seeds ± half of its 95 % interval (Student's t).
The verdict is a paired t-test's over seeds, its p corrected for all tests of the table (Holm, 5 % together).
Not distinguishable is not equal: the interval of the difference says how large it may be."""
SIZE = """FLOP of forward and backward at full context. The cache of one row in bf16: what a token adds, and at full
context what the formula says and what is allocated."""
SPEED = """Training: median of the log's lines, of which the first compiles; time and memory of a whole process, mean
over seeds. Decoding with a cache, of the first seed's model, rows x tokens at the end: ms to the first token of all
rows, and ms from each to the next. Medians of turns."""
EQUAL = """Runs of one seed have the same batches in the same order, and weights of the same name and shape begin alike.
These settings are not the same in all runs:"""
STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #8884; text-align: right }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
img { max-width: 100% } pre { overflow-x: auto; font-size: 12px } :root { color-scheme: light dark }"""


def write(where: Path, runs: list[Run], problems: dict[str, str]) -> Path:
    """`problems`: why a run has no end, by its folder's name. Raises ValueError where none has one."""
    ended = [run for run in runs if run.done and run.looks]
    problems = problems | {run.folder.name: f"at {run.tokens:,} tokens" for run in runs if run not in ended}
    if not ended:
        raise ValueError(f"no run has an end ({problems or 'none'}). fix: train one")
    where.mkdir(parents=True, exist_ok=True)
    blocks = page(variants(ended), problems, where)
    (where / "report.md").write_text("\n\n".join(markdown(*block) for block in blocks) + "\n")
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{blocks[0][1]}</title><style>{STYLE}</style>'
    body = "\n".join(hypertext(*block, where) for block in blocks)
    (where / "report.html").write_text(f"{head}\n{body}\n</html>\n")
    return where / "report.html"


def page(groups: Groups, problems: dict[str, str], where: Path) -> list[Block]:
    scores = {name: {run.seed: run.bpb for run in group} for name, group in groups.items()}
    baseline, *others = groups
    runs = [run for group in groups.values() for run in group]
    found = verdicts(scores[baseline], {name: scores[name] for name in others})
    device = hardware.pick_device("auto")
    return [
        ("h1", f"{', '.join(groups)} after {groups[baseline][0].tokens / 1e6:.1f} M tokens"),
        ("p", summary(groups, found)),
        ("img", draw_caches(groups, where / "caches.png")),
        ("h2", "Loss"),
        ("table", losses(scores, found)),
        ("p", LOSS),
        *([("p", "Without an end:"), ("table", [("run", "why"), *problems.items()])] if problems else []),
        ("h2", "Size"),
        ("table", sizes(groups, device)),
        ("p", SIZE),
        ("h2", "Speed"),
        ("table", training(groups)),
        *decoding(groups, device),
        ("p", SPEED),
        ("h2", "On the way"),
        *(("img", draw_curves(groups, axis, where / f"{axis.split()[-1].lower()}.png")) for axis in AXES),
        ("h2", "What is equal, and what is not"),
        ("p", EQUAL),
        ("table", [("setting", "values"), *((key, ", ".join(each)) for key, each in differences(runs).items())]),
        ("p", circumstances(groups[baseline][0])),
        ("h2", "Commands"),
        ("pre", "\n".join(run.command for run in runs)),
    ]


def summary(groups: Groups, found: dict[str, Verdict]) -> str:
    baseline, *_ = groups
    told = [f"Beside {baseline} ({len(groups[baseline])} seeds)"]
    for said in ("better", "worse", "not distinguishable", "n/a"):
        if names := [name for name, verdict in found.items() if verdict.said == said]:
            told.append(f"{said}: {', '.join(names)}")
    fit = [baseline, *(name for name, verdict in found.items() if verdict.said in ("better", "not distinguishable"))]
    least = min(fit, key=lambda name: cached(groups[name][0]))
    size = f"{cached(groups[least][0]):,.0f} bytes a token"
    return f"{'; '.join(told)}. Of what is not worse, {least} has the smallest cache, {size}."


def cached(run: Run) -> float:
    """Bytes of a full cache for each of its tokens."""
    return run.model.cache_bytes(run.model.context, BF16) / run.model.context


def losses(scores: dict[str, dict[int, float]], found: dict[str, Verdict]) -> list[tuple]:
    def around(value: Estimate, sign: str = "") -> str:
        return f"{value.mean:{sign}.4f} ± {value.half:.4f}".replace("nan", "n/a")

    rows = [("variant", "seeds", "bits per byte", "difference", "p", "verdict")]
    for name, each in scores.items():
        verdict, rest = found.get(name), ("", "", "baseline")
        if verdict is not None:
            rest = around(verdict.difference, "+"), f"{verdict.p:.3f}".replace("nan", "n/a"), verdict.said
        rows.append((name, len(each), around(estimate([*each.values()])), *rest))
    return rows


def sizes(groups: Groups, device: torch.device) -> list[tuple]:
    rows = [("variant", "parameters", "model.hidden", "MFLOP/token", "KV bytes/token", "at context", "allocated")]
    for name, (run, *_) in groups.items():
        context, hidden = run.model.context, run.settings["model"]["hidden"]
        weights, flops = sum(p.numel() for p in run.model.parameters()), run.model.training_flops() / 1e6
        one, two, full = (run.model.cache_bytes(tokens, BF16) for tokens in (1, 2, context))
        held = run.model.new_cache(1, context, BF16, device).nbytes
        rows.append((name, f"{weights:,}", hidden, f"{flops:.2f}", f"{two - one:,}", f"{full:,}", f"{held:,}"))
    return rows


def training(groups: Groups) -> list[tuple]:
    rows = [("variant", "tokens/s", "seconds", "peak memory, MB")]
    for name, group in groups.items():
        lines = [[line for line in run.lines if "train_loss" in line] for run in group]
        rate = median(line["tokens_per_second"] for each in lines for line in each[1:] or each)
        memory = mean(each[-1].get("peak_memory_bytes", float("nan")) for each in lines) / 1e6
        rows.append((name, f"{rate:,.0f}", f"{mean(run.seconds for run in group):,.0f}", f"{memory:,.0f}"))
    return rows


def decoding(groups: Groups, device: torch.device) -> list[Block]:
    try:
        taken = latencies({name: group[0].folder for name, group in groups.items()}, device)
    except torch.OutOfMemoryError:
        return [("p", "Decoding is not measured: the models do not fit into memory together.")]
    cases = [f"{case}, {what}" for case in next(iter(taken.values())) for what in ("first", "next")]
    rows = [(name, *(f"{ms:.2f}" for pair in times.values() for ms in pair)) for name, times in taken.items()]
    return [("table", [("variant", *cases), *rows])]


def draw_caches(groups: Groups, path: Path) -> Path:
    """Bits per byte against cache bytes: the one to share."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, group in groups.items():
        x, y = cached(group[0]), estimate([run.bpb for run in group])
        axes.errorbar(x, y.mean, yerr=y.half, fmt="o", capsize=3)
        axes.annotate(name, (x, y.mean), xytext=(7, 4), textcoords="offset points")
    axes.set(xlabel="cache bytes per token at full context, bf16", ylabel="bits per byte, 95 % interval over seeds")
    axes.margins(x=0.15)
    figure.savefig(path, dpi=140)
    return path


def draw_curves(groups: Groups, axis: str, path: Path) -> Path:
    """Means over seeds, at every look at the held-out text."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, (name, group) in enumerate(groups.items()):
        looks = zip(*([(AXES[axis](run, look), look["val_bpb"]) for look in run.looks] for run in group), strict=False)
        xs, ys = zip(*([mean(each) for each in zip(*look, strict=True)] for look in looks), strict=True)
        axes.plot(xs, ys, ("o-", "s--", "^:")[number // 10 % 3], label=name, markersize=4)
    axes.set(xlabel=axis, ylabel="bits per byte")
    axes.legend()
    figure.savefig(path, dpi=140)
    return path


def circumstances(run: Run) -> str:
    told = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    system = f"{platform.system()}, {os.cpu_count()} cores, {hardware.processor()}"
    facts = run.settings["machine"] | {
        "python": platform.python_version(),
        "system": system,
        "code": told.stdout.strip(),
    }
    return ". ".join(f"{key}: {value}" for key, value in facts.items()) + "."


def markdown(kind: str, what) -> str:
    if kind == "table":
        head, *rows = [f"| {' | '.join(map(str, row))} |" for row in what]
        return "\n".join([head, "|---" + "|---:" * (len(what[0]) - 1) + "|", *rows])
    form = {"h1": "# {}", "h2": "## {}", "p": "{}", "pre": "```\n{}\n```", "img": "![]({})"}[kind]
    return form.format(what.name if kind == "img" else what)


def hypertext(kind: str, what, where: Path) -> str:
    if kind == "img":
        return f'<img alt="{what.stem}" src="data:image/png;base64,{b64encode(what.read_bytes()).decode()}">'
    if kind == "table":
        rows = [[f"<td>{escape(str(cell))}</td>" for cell in row] for row in what]
        lines = [f"<tr>{''.join(row)}</tr>" for row in rows]
        return "\n".join(["<table>", lines[0].replace("td>", "th>"), *lines[1:], "</table>"])
    return f"<{kind}>{escape(what)}</{kind}>"
