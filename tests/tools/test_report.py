"""The report says what the runs show, in every measure, and no more."""

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from matplotlib.text import Text
from scipy import stats

from tests.conftest import TINY, settings_of
from tools.compare import measures, report
from tools.compare.plots import LABEL_GAP, draw_points, mean_curve
from tools.compare.runs import Run, differences, group_by_shape, group_by_variant
from tools.compare.statistics import Estimate, compare_to_baseline

SEEDS = (0, 1, 2)
POSITIONS = {"position 1": 6.0, "position 2": 5.0, "position 3-4": 4.0, "position 5-8": 3.0}
ACCURACY = {"gqa": 0.9, "mqa": 0.95, "retention": 0.3}  # of recall


def text_run(variant: str, seed: int, loss: float, tokens: int = 1000, **changes) -> Run:
    """A run on text that ended at this loss in bits per byte."""
    settings = settings_of(*TINY, f"attention={variant}", f"seed={seed}")
    settings |= {"name": variant, "machine": {"device": "cpu"}}
    slices = {"repeated": 2 * loss, "new": 4 * loss} | POSITIONS
    first = {"step": 1, "tokens": tokens // 2, "seconds": 1.0, "train_loss": 6.0}
    first["tokens_per_second"] = 100.0 + seed
    last = first | {"step": 2, "tokens": tokens, "val_loss": 3 * loss, "val_bpb": loss}
    last["slices"] = {name: {"loss": value, "tokens": 7} for name, value in slices.items()}
    return Run(Path(f"{variant}-{seed}"), settings | changes, [first, last], True)


def recall_run(variant: str, seed: int) -> Run:
    run = text_run(variant, seed, 1.0)
    run.folder = Path(f"recall-{variant}-{seed}")
    run.settings["data"] = {"_target_": "data.tasks.Recall", "pairs": [4, 8]}
    accuracy = ACCURACY[variant] + 0.01 * seed**2
    run.lines[-1] |= {"val_bpb": None, "slices": {}, "recall_accuracy": accuracy}
    run.lines[-1] |= {"recall_accuracy_4": accuracy + 0.02, "recall_accuracy_8": accuracy - 0.02}
    return run


LOSSES = {"gqa": 1.0, "mqa": 0.98, "retention": 1.2}
RUNS = [
    *(text_run(name, seed, LOSSES[name] + 0.001 * seed**2) for name in LOSSES for seed in SEEDS),
    *(recall_run(name, seed) for name in ACCURACY for seed in SEEDS),
]


def lengths(folder: Path) -> dict:
    """Each seed loses 0.5 nats at 4 times the context; mqa cannot have the positions."""
    seed = int(folder.name[-1])
    if "mqa" in folder.name:
        return {"step": 2, "1": 3.0, "2": "no positions", "4": "no positions"}
    return {"step": 2, "1": 3.0, "2": 3.2, "4": 3.5 + 0.01 * seed}


@pytest.fixture
def write(tmp_path, monkeypatch):
    return writer(tmp_path, monkeypatch)


def writer(folder: Path, monkeypatch):
    """Writes the report of runs -> the text of report.md and of report.html, and the summary."""

    def latencies(run_dirs: dict[str, Path], *_) -> dict[str, dict[str, float]]:
        return {name: {"1 x 16, next": 9.0, "1 x 64, next": 1.25} for name in run_dirs}

    monkeypatch.setattr(report, "latencies", latencies)
    monkeypatch.setattr(measures, "measure_lengths", lengths)

    def written(runs: list[Run], problems: dict[str, str] | None = None) -> tuple[str, str, str]:
        summary = report.write_report(folder, runs, problems or {}, "gqa", "the command")
        texts = [(folder / name).read_text() for name in ("report.md", "report.html")]
        return *texts, summary

    return written


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[str, str, str]:
    """The report of RUNS: report.md, report.html and the summary."""
    with pytest.MonkeyPatch.context() as patch:
        return writer(tmp_path_factory.mktemp("report"), patch)(RUNS)


def table(markdown: str, heading: str) -> dict[str, dict[str, str]]:
    """The first table below a heading: cells by the first column and by the name of theirs."""
    (block,) = re.findall(rf"## {heading}\n\n(\|.*?)\n\n", markdown, re.DOTALL)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def paired(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """The mean difference and half of its 95 % interval, by the formula of the paired t-test."""
    values = [a - b for a, b in zip(ours, theirs, strict=True)]
    error = stdev(values) / len(values) ** 0.5
    return fmean(values), stats.t.ppf(0.975, len(values) - 1) * error


def test_each_variant_has_a_row_with_every_measure(whole):
    rows = table(whole[0], "Result")
    assert list(rows) == ["gqa", "mqa", "retention"]
    accuracies = [0.9 + 0.01 * seed**2 for seed in SEEDS]
    mean, ci95 = paired(accuracies, [0, 0, 0])
    assert rows["gqa"]["recall accuracy"] == f"{mean:.4f} ± {ci95:.4f}, baseline"
    # The differences of all pairs are equal: certain in a loss, and half a point wide in a count.
    cell = rows["retention"]["bits per byte"]
    assert cell.endswith("+0.2000 ± 0.0000 worse (p 0.000, n 3)")
    ci95 = stats.t.ppf(0.975, 2) * 0.005 / 3**0.5
    cell = rows["retention"]["recall accuracy"]
    assert f"-0.6000 ± {ci95:.4f} worse" in cell
    cell = rows["mqa"]["bits per byte"]
    assert re.match(r"\*\*0.9817 ± .*\*\*, -0.0200 ± 0.0000 better", cell)
    assert rows["mqa"]["repeated tokens, nats"].startswith("**1.9633 ±")
    assert rows["mqa"]["4 x the context, nats more"] == "n/a, no positions"
    assert rows["gqa"]["4 x the context, nats more"].startswith("**0.5100 ±")
    assert rows["gqa"]["training, tokens/s"] == "101"
    assert rows["gqa"]["decoding, ms/token"] == "1.25"


def test_intervals_are_those_of_the_paired_test(write):
    draw = np.random.default_rng(0)
    ours, theirs = draw.normal(1, 0.01, (2, 3))
    runs = [text_run("gqa", seed, ours[seed]) for seed in SEEDS]
    runs += [text_run("mha", seed, theirs[seed]) for seed in SEEDS]
    cell = table(write(runs)[0], "Result")["mha"]["new tokens, nats"]
    mean, ci95 = paired(4 * theirs, 4 * ours)
    p = stats.ttest_rel(theirs, ours).pvalue
    assert cell.endswith(f"{mean:+.4f} ± {ci95:.4f} not distinguishable (p {p:.3f}, n 3)")


def test_what_was_not_trained_or_logged_has_no_column(write):
    old = [text_run("gqa", 0, 1.0), text_run("gqa", 1, 1.1)]
    del old[0].lines[-1]["slices"]
    row = table(write(old)[0], "Result")["gqa"]
    assert not any("ecall" in key for key in row)
    assert row["new tokens, nats"] == "n/a, not logged"
    # A variant without runs of a task has n/a there, and one that failed is named.
    runs = [run for run in RUNS if run.folder.name != "recall-mqa-0"]
    runs = [run for run in runs if not (run.task == "recall" and "mqa" in run.folder.name)]
    markdown = write(runs, {"recall-mqa-0": "exit 4: training diverged"})[0]
    assert table(markdown, "Result")["mqa"]["recall accuracy"] == "n/a, not trained"
    assert "| recall-mqa-0 | exit 4: training diverged |" in markdown


def test_the_page_stands_alone_in_any_color_scheme(whole):
    _, page, summary = whole
    assert "<script" not in page and "http" not in re.sub(r'xmlns(:\w+)?="\S+"', "", page)
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert page.count("<svg") == 7 and "#000000" not in page and "currentColor" in page
    ids = re.findall(r'clipPath id="(.*?)"', page)
    assert len(set(ids)) == len(ids) > 0
    opened = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, _) -> None:
            opened.extend([tag] if tag != "meta" else [])

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Reader().feed(page)
    assert opened == [] and page.count("<details>") == page.count("</details>") == 3
    # What a reader looks for comes first, and only the rest is folded.
    parts = ["<h2>Result", "accuracy against cache", "Loss by position", "<h2>What", "<details>"]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    assert summary.startswith("Beside gqa (seeds: 3); bits per byte better: mqa; ")
    assert "recall accuracy worse: retention" in summary


def test_the_smallest_cache_is_not_worse_in_any_task(write, whole):
    assert "The smallest cache not shown to be worse: mqa, 8.3 kB." in whole[2]
    worse = [text_run("mqa", seed, 1.5 + 0.001 * seed) for seed in SEEDS]
    runs = [run for run in RUNS if run.task == "recall" or "mqa" not in run.folder.name]
    assert "smallest cache" not in write([*runs[:3], *worse, *runs[3:]])[2]


@pytest.mark.parametrize("ratio, warns", [(9.9, True), (10.1, False)])
def test_few_tokens_a_parameter_are_a_warning(write, ratio, warns):
    parameters = sum(p.numel() for p in RUNS[0].model.parameters())
    runs = [text_run("gqa", seed, 1.0, tokens=round(ratio * parameters)) for seed in SEEDS]
    markdown = write(runs)[0]
    assert f"Training took at least {ratio} tokens per parameter" in markdown
    assert ("Warning" in markdown) == warns


def test_settings_that_differ_are_listed_with_who_has_them():
    names = ("gqa", "mha", "llama", "nope", "delta", "retention")
    groups = {name: [text_run(name, seed, 1.0) for seed in (0, 1)] for name in names}
    found = differences(groups)
    prefix = "model.attention."
    assert found[f"{prefix}kv_heads"] == (
        "2 (gqa, llama, nope, delta); 4 (mha); not an option (retention)"
    )
    assert found[f"{prefix}qk_norm"] == (
        "before_rope (gqa, mha, delta); None (llama, nope); not an option (retention)"
    )
    assert found[f"{prefix}rope_base"].endswith("; 10000.0, None (nope)")
    assert "False (gqa, mha, llama, nope); True (delta)" in found[f"{prefix}gated"]
    assert "seed" not in found and "model.dim" not in found


def test_a_cache_is_fixed_where_a_longer_text_needs_no_more(whole):
    rows = table(whole[0], "Result")
    assert (
        rows["retention"]["cache"].endswith(" kB, fixed size") and rows["gqa"]["cache"] == "16.6 kB"
    )
    assert not text_run("delta", 0, 1.0).cache_is_fixed
    window = text_run("gqa", 0, 1.0)
    for tokens, is_fixed in ((window.model.context - 1, True), (2 * window.model.context, False)):
        run = text_run("gqa", 0, 1.0)
        run.settings["model"]["attention"]["window"] = tokens
        assert run.cache_is_fixed == is_fixed


@pytest.mark.parametrize("count", [3, 17, 40])
def test_names_in_a_plot_stand_apart_in_the_order_of_their_points(count):
    """Most variants have almost the same value, and all but three the same cache."""
    draw = np.random.default_rng(0)
    values = {f"v{number}": Estimate(draw.normal(1, 0.01), 0.004, 0.5) for number in range(count)}
    sizes = dict.fromkeys(values, 33_000) | {"v0": 8_000, "v2": 66_000}
    figure = draw_points(sizes, values, "loss")
    axes = figure.axes[0]
    heights = {text.get_text(): text.xyann[1] for text in axes.texts}
    assert sorted(heights, key=heights.get) == sorted(values, key=values.get)
    spaces = np.diff(sorted(heights.values()))
    assert min(spaces) >= min(LABEL_GAP, 1 / count) - 1e-9
    assert min(heights.values()) >= 0 and max(heights.values()) <= 1
    # Names stand beside the plot and inside the figure; up to 17 do not touch.
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without their lines
    assert min(box.x0 for box in boxes) > axes.get_window_extent().x1
    assert max(box.x1 for box in boxes) <= figure.bbox.x1
    boxes.sort(key=lambda box: box.y0)
    assert count > 17 or all(low.y1 < high.y0 for low, high in pairwise(boxes))


def test_curves_average_what_all_seeds_have():
    assert mean_curve([{1: 2.0, 4: 3.0, 2: 3.0}, {2: 5.0, 3: 1.0, 4: 1.0}]) == {2: 4.0, 4: 2.0}


def test_more_is_better_or_worse_as_the_measure_says():
    low, high = {0: 0.5, 1: 0.51, 2: 0.52}, {0: 0.9, 1: 0.92, 2: 0.91}
    assert compare_to_baseline(low, {"x": high})["x"].text == "worse"
    assert compare_to_baseline(low, {"x": high}, higher_is_better=True)["x"].text == "better"
    assert compare_to_baseline(high, {"x": low}, higher_is_better=True)["x"].text == "worse"


def test_counts_that_tie_by_chance_are_no_difference():
    one, other = {0: 0.990, 1: 0.988}, {0: 0.992, 1: 0.990}
    assert compare_to_baseline(one, {"x": other})["x"].text == "worse"
    found = compare_to_baseline(one, {"x": other}, higher_is_better=True, least_spread=0.005)
    assert found["x"].text == "not distinguishable"


def test_chance_is_rarely_called_a_difference_in_any_measure():
    """1,000 comparisons of 8 variants that are equal: losses of two noises, and accuracies."""
    draw = np.random.default_rng(0)
    targets = 2048
    called = {"loss": 0, "slice": 0, "accuracy": 0}
    for _ in range(1000):
        shared = draw.normal(1, 0.01, 5)  # what a seed does to all
        losses = shared + draw.normal(0, 0.005, (9, 5))
        slices = 2 * losses + draw.standard_t(4, (9, 5)) * 0.02
        accuracies = draw.binomial(targets, np.clip(1.85 - losses, 0, 1)) / targets
        for name, values in {"loss": losses, "slice": slices, "accuracy": accuracies}.items():
            groups = [dict(enumerate(row)) for row in values.tolist()]
            found = compare_to_baseline(
                groups[0],
                {str(number): each for number, each in enumerate(groups[1:])},
                higher_is_better=name == "accuracy",
                least_spread=0.005 if name == "accuracy" else 0.0,
            )
            called[name] += any(each.text in ("better", "worse") for each in found.values())
    assert max(called.values()) < 70, called


@pytest.mark.parametrize(
    "run_name, names",
    [
        ("{variant}-dim-{size}", ["gqa", "mha", "llama"]),
        # The sizes share no word, so the first names the curve.
        (
            "{size}",
            [
                "32 kv_heads=2 qk_norm=before_rope",
                "32 kv_heads=4 qk_norm=before_rope",
                "32 kv_heads=2 qk_norm=None",
            ],
        ),
    ],
)
def test_sizes_of_one_variant_are_joined(run_name, names):
    runs = []
    for variant in ("gqa", "mha", "llama"):
        for size, heads in ((32, 4), (64, 8)):
            run = text_run(variant, 0, 1.0)
            overrides = (f"model.dim={size}", f"model.heads={heads}", f"model.hidden={size}")
            run.settings |= settings_of(*TINY, f"attention={variant}", *overrides)
            run.settings["name"] = run_name.format(variant=variant, size=size)
            runs.append(run)
    joined = group_by_shape(group_by_variant(runs))
    assert [len(group) for group in joined.values()] == [2, 2, 2]
    assert [*joined] == names
