"""The report of a comparison: report.md, report.html, which needs no other file, and the plots in both."""

import sys
from base64 import b64encode
from collections.abc import Callable
from html import escape
from pathlib import Path
from statistics import mean, median

import torch
from matplotlib.figure import Figure

from common import hardware
from tools.compare.runs import Run, differences, variants
from tools.compare.statistics import Estimate, Verdict, estimate, verdicts
from tools.latency import latencies

Block = tuple[str, object]  # h1, h2, p, pre, table or img, and what is in it
Groups = dict[str, list[Run]]  # the runs of each variant, the baseline first
BF16 = torch.bfloat16
AXES: dict[str, Callable[[Run, dict], float]] = {
    "tokens": lambda run, look: look["tokens"],
    "training FLOP": lambda run, look: look["tokens"] * run.model.training_flops(),
    "seconds": lambda run, look: look["seconds"],
}
LOSS = """Held-out loss at the end of training, mean over seeds ± half of its 95 % interval (Student's t). The
verdict is a paired t-test's, its p corrected for all tests of the table (Holm, 5 % together); intervals are each for
itself. Runs of one seed are a pair; where no seed is shared, the order of the seeds pairs them. Not distinguishable is
not equal: the interval of the difference says how large it may be. One pair gives no verdict (n/a): more seeds do."""
SIZE = """FLOP of forward and backward at full context. The cache of one row with a full context, in bf16: by the
formula, as allocated, and the formula's for each token. It has one slot more than tokens, for padding."""
SPEED = """Training: median of the log's lines, of which the first compiles; time and memory of a whole process, mean
over seeds. Decoding with a cache, of the first seed's model, as generate.py loads it, rows x tokens at the end: ms to
the first token of all rows, and ms from each to the next, medians."""
EQUAL = "Weights of the same name and shape begin alike at a seed, and batches of the same size and text are the same."
STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #8884; text-align: right }
th:first-child, td:first-child, :nth-child(2):last-child { text-align: left }
img { max-width: 100% } pre { white-space: pre-wrap; font-size: 12px } :root { color-scheme: light dark }"""


def write_report(
    where: Path, runs: list[Run], problems: dict[str, str], baseline: str | None, call: str
) -> str:
    """`problems`: why a run has no end, by its folder's name; `baseline`: the name of that variant, if not the first.

    Raises ValueError where no run has an end.
    """
    ended = [run for run in runs if run.done]
    problems = problems | {
        run.folder.name: f"at {run.last['tokens']:,} tokens" for run in runs if not run.done
    }
    if not ended:
        why = "; ".join(
            f"{name}: {told.partition('. fix: ')[0]}" for name, told in problems.items()
        )
        raise ValueError(f"no run came to its end ({why or 'no run'}). fix: train one")
    for name, told in problems.items():
        print(f"not in the report: {name} ({told.partition('. fix: ')[0]})", file=sys.stderr)
    groups = variants(ended)
    groups = {name: groups[name] for name in sorted(groups, key=lambda name: name != baseline)}
    where.mkdir(parents=True, exist_ok=True)
    note = ""
    if baseline not in (None, *groups):
        note = (
            f"No run of {baseline} came to its end: {next(iter(groups))} is the baseline instead. "
        )
    blocks = page(groups, problems, where, call, note)
    (where / "report.md").write_text("\n\n".join(markdown(*block) for block in blocks) + "\n")
    title = hypertext("title", blocks[0][1], where)
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8">{title}<style>{STYLE}</style>'
    body = "\n".join(hypertext(*block, where) for block in blocks)
    (where / "report.html").write_text(f"{head}\n{body}\n</html>\n")
    return f"{blocks[1][1]}\nwritten: {where / 'report.html'}"


def page(
    groups: Groups, problems: dict[str, str], where: Path, call: str, note: str
) -> list[Block]:
    scores = {name: {run.seed: run.loss for run in group} for name, group in groups.items()}
    baseline, *others = groups
    runs = [run for group in groups.values() for run in group]
    found = verdicts(scores[baseline], {name: scores[name] for name in others})
    on_cpu = all(run.settings["device"] == "cpu" for run in runs)  # as was asked for
    device = hardware.pick_device("cpu" if on_cpu else "auto")
    tokens = sorted({run.last["tokens"] for run in runs})
    seen = " to ".join(f"{count / 1e6:.1f} M" for count in dict.fromkeys((tokens[0], tokens[-1])))
    other = [
        ("setting", "values"),
        *((key, ", ".join(each)) for key, each in differences(runs).items()),
    ]
    return [
        ("h1", f"{', '.join(groups)} after {seen} tokens"),
        ("p", note + summary(groups, found)),
        ("pre", call),
        ("img", draw_caches(groups, where / "caches.png", runs[0].unit)),
        ("h2", "Loss"),
        ("table", losses(scores, found, runs[0].unit)),
        ("p", LOSS),
        *(
            [("p", "Not in it:"), ("table", [("run", "why"), *problems.items()])]
            if problems
            else []
        ),
        ("h2", "Size"),
        ("table", sizes(groups, device)),
        ("p", SIZE),
        ("h2", "Speed"),
        ("p", "Training:"),
        ("table", training(groups)),
        ("p", "Decoding, in ms:"),
        ("table", decoding(groups, device)),
        ("p", SPEED),
        ("h2", "On the way"),
        ("img", draw_curves(groups, where / "curves.png", runs[0].unit)),
        ("h2", "What is equal, and what is not"),
        ("p", f"{EQUAL} Settings that all runs have, and not the same:"),
        ("table", other),
        (
            "p",
            ". ".join(f"{key}: {value}" for key, value in runs[0].settings["machine"].items())
            + ".",
        ),
        ("h2", "Commands"),
        ("pre", "\n".join(run.command for run in runs)),
    ]


def summary(groups: Groups, found: dict[str, Verdict]) -> str:
    baseline, *_ = groups
    told = [f"Beside {baseline} (seeds: {len(groups[baseline])})"]
    for said in ("better", "worse", "not distinguishable", "n/a"):
        if names := [name for name, verdict in found.items() if verdict.said == said]:
            told.append(f"{said}: {', '.join(names)}")
    fit = [
        baseline,
        *(
            name
            for name, verdict in found.items()
            if verdict.said in ("better", "not distinguishable")
        ),
    ]
    least = min(fit, key=lambda name: cached(groups[name][0]))
    if least == baseline:
        return "; ".join(told) + "."
    difference = found[least].difference
    size, most = (
        f"{cached(groups[least][0]):,.0f} bytes a token",
        f"{difference.mean + difference.half:+.4f}",
    )
    return f"{'; '.join(told)}. The smallest cache not shown to be worse: {least}, {size}, {most} at most (95 %)."


def cached(run: Run) -> float:
    """Bytes of a full cache for each of its tokens."""
    return run.model.cache_bytes(run.model.context, BF16) / run.model.context


def losses(
    scores: dict[str, dict[int, float]], found: dict[str, Verdict], unit: str
) -> list[tuple]:
    def around(value: Estimate, sign: str = "") -> str:
        return f"{value.mean:{sign}.4f} ± {value.half:.4f}".replace("nan", "n/a")

    rows = [("variant", "seeds", unit, "difference", "pairs", "p", "verdict")]
    for name, each in scores.items():
        verdict, rest = found.get(name), ("", "", "", "baseline")
        if verdict is not None:
            p = f"{verdict.p:.3f}".replace("nan", "n/a")
            rest = around(verdict.difference, "+"), verdict.pairs, p, verdict.said
        rows.append((name, len(each), around(estimate([*each.values()])), *rest))
    return rows


def sizes(groups: Groups, device: torch.device) -> list[tuple]:
    rows = [
        (
            "variant",
            "parameters",
            "model.hidden",
            "MFLOP/token",
            "KV bytes",
            "allocated",
            "per token",
        )
    ]
    for name, (run, *_) in groups.items():
        context, hidden = run.model.context, run.settings["model"]["hidden"]
        weights, flops = (
            sum(p.numel() for p in run.model.parameters()),
            run.model.training_flops() / 1e6,
        )
        full, held = (
            run.model.cache_bytes(context, BF16),
            run.model.new_cache(1, context, BF16, device).nbytes,
        )
        rows.append(
            (
                name,
                f"{weights:,}",
                hidden,
                f"{flops:.2f}",
                f"{full:,}",
                f"{held:,}",
                f"{cached(run):,.0f}",
            )
        )
    return rows


def training(groups: Groups) -> list[tuple]:
    rows = [("variant", "tokens/s", "seconds", "peak memory, MB")]
    for name, group in groups.items():
        lines = [[line for line in run.lines if "train_loss" in line] for run in group]
        rate = median(line["tokens_per_second"] for each in lines for line in each[1:] or each)
        memory = mean(each[-1].get("peak_memory_bytes", float("nan")) for each in lines) / 1e6
        rows.append(
            (
                name,
                f"{rate:,.0f}",
                f"{mean(run.last['seconds'] for run in group):,.0f}",
                f"{memory:,.0f}",
            )
        )
    return rows


def decoding(groups: Groups, device: torch.device) -> list[tuple]:
    context = min(group[0].model.context for group in groups.values())
    taken = latencies({name: group[0].folder for name, group in groups.items()}, context, device)
    cases = [f"{case}, {what}" for case in next(iter(taken.values())) for what in ("first", "next")]
    rows = [
        (name, *(f"{ms:.2f}" for pair in times.values() for ms in pair))
        for name, times in taken.items()
    ]
    return [("variant", *cases), *rows]


def draw_caches(groups: Groups, path: Path, unit: str) -> Path:
    """Loss against cache bytes: the one to share."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    points = [
        (cached(runs[0]), estimate([run.loss for run in runs]), name)
        for name, runs in groups.items()
    ]
    colors = {name: f"C{number % 10}" for number, name in enumerate(groups)}  # those of the curves
    for number, (x, y, name) in enumerate(sorted(points)):
        axes.errorbar(x, y.mean, yerr=y.half, fmt="o", capsize=3, color=colors[name])
        side, shift = (
            ("left", 7) if number % 2 else ("right", -7)
        )  # neighbours keep out of each other's way
        axes.annotate(name, (x, y.mean), xytext=(shift, 4), textcoords="offset points", ha=side)
    axes.set(
        xlabel="cache bytes per token at full context, bf16",
        ylabel=f"{unit}, 95 % interval over seeds",
    )
    axes.margins(x=0.15)
    figure.savefig(path, dpi=120)
    return path


def draw_curves(groups: Groups, path: Path, unit: str) -> Path:
    """Means over seeds, wherever all of them looked at the held-out text."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    for axes, (axis, value) in zip(
        figure.subplots(1, len(AXES), sharey=True), AXES.items(), strict=True
    ):
        for number, (name, group) in enumerate(groups.items()):
            looks = [
                {look["tokens"]: (value(run, look), look["loss"]) for look in run.looks}
                for run in group
            ]
            shared = sorted(set.intersection(*map(set, looks)))
            points = [
                [mean(each) for each in zip(*(look[at] for look in looks), strict=True)]
                for at in shared
            ]
            style = ("o-", "s--", "^:")[number // 10 % 3]
            axes.plot(
                [x for x, _ in points], [y for _, y in points], style, label=name, markersize=4
            )
        axes.set(xlabel=axis)
    figure.axes[0].set(ylabel=unit)
    figure.axes[-1].legend()
    figure.savefig(path, dpi=120)
    return path


def markdown(kind: str, what) -> str:
    if kind == "table":
        head, *rows = [
            f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in what
        ]
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
