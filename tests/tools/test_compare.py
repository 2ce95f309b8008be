"""A comparison trains what is missing, is fair, and reports what it found."""

import json
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from run.config import flatten
from run.instantiate import instantiate
from tests.conftest import LONG, ROOT, TINY, VARIANTS, settings_of
from tests.faults.harness import wait_for
from tests.run.forks import Forked
from tools.compare import jobs, plan
from tools.compare.runs import Run, group_by_variant

SMALL = (
    *TINY,
    "context=16",
    "batch_tokens=64",
    "model.depth=1",
    "steps=4",
    "eval_every=2",
    "save_every=1",
)


@pytest.fixture
def words(story) -> list[str]:
    return [*SMALL, "data=text", f"data.path={story}", "data.vocab_size=400"]


def table(report: Path, head: str) -> list[list[str]]:
    """Rows of the first table of report.md below this heading."""
    (block,) = re.findall(rf"## {head}\n\n(\|.*?)\n\n", report.read_text(), re.DOTALL)
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()[2:]
    ]


def result(report: Path) -> dict[str, list[str]]:
    """What each variant is judged by: all but its name, cache and speeds, which come last."""
    return {row[0]: row[1:-3] for row in table(report, "Result")}


def curves(where: Path) -> dict[str, list]:
    keys = ("step", "train_loss", "val_bpb", "grad_norm")
    return {
        path.parent.name: [
            [json.loads(line).get(key) for key in keys] for line in path.read_text().splitlines()
        ]
        for path in where.glob("*/metrics.jsonl")
    }


def test_runs_are_trained_once_and_reported(command, words, forked_jobs):
    asked = ("attention=gqa,mqa", "seed=0,1", *words, "--dir", "out")
    first = command("tools/compare/__main__.py", *asked)
    assert (
        first.code == 0
        and "3/3, 0:00:00 left. mqa-1: " in first.err
        and "mqa: model.hidden=" in first.err
    ), first.err
    runs = {name: Run.read(Path("out", name)) for name in ("gqa-0", "gqa-1", "mqa-0", "mqa-1")}
    losses = result(Path("out/report.md"))
    assert list(losses) == ["gqa", "mqa"]
    for name, cells in losses.items():
        mean = (runs[f"{name}-0"].loss + runs[f"{name}-1"].loss) / 2
        assert float(cells[0].strip("*").split()[0]) == pytest.approx(mean, abs=1e-4)
    assert losses["gqa"][0].endswith(", baseline")
    assert re.search(r" (worse|better|not distinguishable) \(p .*, n 2\)$", losses["mqa"][0])
    sizes = {row[0]: row for row in table(Path("out/report.md"), "Size and speed")}
    for name in ("gqa", "mqa"):
        model = instantiate(runs[f"{name}-0"].settings["model"])
        held = model.new_cache(1, 16, torch.bfloat16, "cpu").nbytes
        assert sizes[name][1] == f"{sum(p.numel() for p in model.parameters()):,}"
        assert sizes[name][4] == f"{held:,}"
    assert "attention=mqa" in Path("out/report.md").read_text() and first.out.startswith(
        "Beside gqa (seeds: 2); "
    )

    before = {path: path.stat().st_mtime_ns for path in Path("out").glob("*/*")}
    again = command("tools/compare/__main__.py", *asked)
    assert (
        again.code == 0
        and again.err.count("finished before") == 4
        and result(Path("out/report.md")) == losses
    )
    assert {path: path.stat().st_mtime_ns for path in Path("out").glob("*/*")} == before
    other = command("tools/compare/__main__.py", *asked, "optimizer.lr=0.01")
    assert other.code == 2 and "optimizer.lr (then 0.02, now 0.01). fix: another --dir" in other.err
    assert {path: path.stat().st_mtime_ns for path in Path("out").glob("*/*")} == before


def test_the_page_needs_nothing_else(command, words, forked_jobs):
    assert (
        command("tools/compare/__main__.py", "attention=gqa,mla", *words, "--dir", "out").code == 0
    )
    page = Path("out/report.html").read_text()
    assert "<svg" in page and "<script" not in page
    # Figures refer to their own parts, and name the standard that they are written in.
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert not re.findall(r"(?<!\")http", page.replace('xmlns="http', "").replace('"http', ""))
    opened = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, _) -> None:
            opened.extend([tag] if tag not in ("meta", "img") else [])

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Reader().feed(page)
    assert opened == []
    # One seed has neither an interval nor a verdict.
    cell = result(Path("out/report.md"))["mla"][0]
    assert re.fullmatch(r"[\d.*]+, [+-][\d.]+ \(one pair\)", cell)
    assert "nan" not in Path("out/report.md").read_text()


def test_a_run_that_fails_is_a_row(command, words, forked_jobs):
    asked = ("optimizer.lr=0.02,1e30", "seed=0,1", *words, "precision=fp32", "--dir", "out")
    assert command("tools/compare/__main__.py", *asked).code == 0
    report = Path("out/report.md")
    assert "| lr-1e30-0 | exit 4: training diverged" in report.read_text()
    assert list(result(report)) == ["lr-0.02"] and "lr-0.02 (seeds: 2)" in report.read_text()
    Path("out/lr-0.02-0/metrics.jsonl").write_text("{")
    runs = sorted(str(path.parent) for path in Path("out").glob("*/metrics.jsonl"))
    assert command("tools/compare/__main__.py", "--report", *runs, "--dir", "out").code == 0
    assert "| lr-0.02-0 | metrics cannot be read" in report.read_text()
    assert list(result(report)) == ["lr-0.02"] and "lr-0.02 (seeds: 1)" in report.read_text()


def test_the_baseline_stays_where_its_first_seed_fails(command, words, forked_jobs, tmp_path):
    Path("out/gqa-0").mkdir(parents=True)
    Path("out/gqa-0/mine").touch()  # where no run may be
    assert (
        command(
            "tools/compare/__main__.py", "attention=gqa,mla", "seed=0,1", *words, "--dir", "out"
        ).code
        == 0
    )
    rows = result(Path("out/report.md"))
    assert list(rows) == ["gqa", "mla"]
    assert rows["gqa"][0].endswith(", baseline") and rows["mla"][0].endswith(" (one pair)")


def begun(said: Path, *words: str) -> Forked:
    """The command in a process of its own, which tells `said`."""
    with said.open("w") as file:
        return Forked(
            [sys.executable, ROOT / "tools" / "compare" / "__main__.py", *words], file, file, {}
        )


def test_a_comparison_that_is_killed_goes_on(command, words, forked_jobs, tmp_path):
    asked = ["attention=gqa,mqa,mha", *words, "steps=40", "save_every=4"]
    assert command("tools/compare/__main__.py", *asked, "--dir", "whole").code == 0
    cut = begun(tmp_path / "said", *asked, "--dir", "cut")
    wait_for(lambda: [*tmp_path.glob("cut/mqa-0/checkpoints/step-*")])
    os.kill(cut.pid, signal.SIGKILL)  # and what it was training, in the middle
    lock = (tmp_path / "cut/mqa-0/.lock").read_text()
    os.kill(int(re.search(r"process (\d+)", lock)[1]), signal.SIGKILL)
    assert cut.wait() == -signal.SIGKILL
    assert not Run.read(tmp_path / "cut/mqa-0").done and Run.read(tmp_path / "cut/gqa-0").done
    finished = (tmp_path / "cut/gqa-0/metrics.jsonl").stat().st_mtime_ns
    assert command("tools/compare/__main__.py", *asked, "--dir", "cut").code == 0
    assert (tmp_path / "cut/gqa-0/metrics.jsonl").stat().st_mtime_ns == finished
    assert curves(tmp_path / "cut") == curves(tmp_path / "whole")
    assert result(tmp_path / "cut/report.md") == result(tmp_path / "whole/report.md")


def test_two_calls_at_a_time_share_the_runs(command, words, forked_jobs, tmp_path):
    asked = ("attention=gqa,mqa", "seed=0,1", *words, "--dir", "out")
    both = [begun(tmp_path / name, *asked) for name in ("one", "other")]
    assert [call.wait() for call in both] == [0, 0]
    said = "".join((tmp_path / name).read_text() for name in ("one", "other"))
    assert "not in the report" not in said
    trained = re.findall(r"(\w+-\d): [\d.]+ bits per byte", said)
    assert sorted(trained) == ["gqa-0", "gqa-1", "mqa-0", "mqa-1"]


@pytest.mark.long
def test_other_seeds_are_no_difference_and_a_window_of_two_is(command):
    words = (
        "tasks=text,recall",
        "model=tiny",
        "context=128",
        "batch_tokens=2048",
        "max_minutes=null",
        "steps=150",
        "compile=false",
        "recall.data.pairs=[2,4]",
        "recall.steps=400",
    )
    seeds = {"early": range(3), "late": range(3, 6), "cut": range(3)}
    for name, each in seeds.items():
        chosen = [f"name={name}", f"seed={','.join(map(str, each))}"]
        chosen += ["attention.window=2"] if name == "cut" else []
        assert command("tools/compare/__main__.py", *words, *chosen, "--dir", "out").code == 0
    runs = [
        f"out/{task}{name}-{seed}"
        for task in ("", "recall-")
        for name, each in seeds.items()
        for seed in each
    ]
    assert command("tools/compare/__main__.py", "--report", *runs, "--dir", "out").code == 0
    # Loss, recall, repeated and new tokens, length.
    rows = result(Path("out/report.md"))
    assert len(rows["late"]) == 5
    # Each column has a verdict by chance in 5 % of such tables; of five, the least p decides (Holm).
    chances = [float(re.search(r"\(p ([\d.]+)", cell)[1]) for cell in rows["late"]]
    assert len(chances) * min(chances) > 0.05, rows["late"]
    assert " worse " in rows["cut"][0]


def test_minutes_are_the_baselines(command, words, forked_jobs):
    timed = [word for word in words if not word.startswith(("steps", "max_minutes"))]
    result = command(
        "tools/compare/__main__.py", "attention=gqa,mha", *timed, "max_minutes=0.01", "--dir", "out"
    )
    assert result.code == 0, result.err
    one, other = Run.read(Path("out/gqa-0")), Run.read(Path("out/mha-0"))
    assert one.last["tokens"] == other.last["tokens"] and other.settings["max_minutes"] is None


def test_a_signal_saves_and_ends(words, tmp_path):
    start = [sys.executable, "-m", "tools.compare", *words, "steps=1000000", "--dir", "out"]
    there = os.environ | {"PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(start, cwd=tmp_path, env=there, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: [*tmp_path.glob("out/run-0/checkpoints/step-*")])
    running.terminate()
    assert (
        "the same call goes on" in running.communicate(timeout=LONG)[1] and running.returncode == 75
    )
    assert (
        "SIGTERM" in (tmp_path / "out/run-0.log").read_text()
        and not Run.read(tmp_path / "out/run-0").done
    )


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["attention=gqa,magic"], 1, "magic"),
        (["attention=gqa,mha", "model.heads=3"], 2, "heads=3"),
        (["run_dir=x,y"], 2, "run_dir"),
        (["model.hidden=64,128"], 2, "--match none"),
        (["optimizer.lr=interval(0,1)"], 2, "interval"),
        (["model=tiny", "data.vocab_size=400,400000"], 2, "--match none"),
        (["tasks=text,recal"], 2, "tasks=recal"),
        (["tasks="], 2, "tasks="),
        (["tasks=copy,copy"], 2, "one value"),
        (["model.dim=choice(64)"], 2, "one value"),
        (["model=tiny,tiny"], 2, "one value"),
        (["model.dim=64,"], 1, "mismatched input"),
        (["recall.model=tiny"], 2, "tasks=text,recall"),
        (["tasks=recall", "data.path=x"], 2, "text is not among the tasks (data.path=x)"),
        (["data=stdlib,recall"], 2, "tasks=text,recall"),
        (["tasks=recall", "recall.data.pairs=[64,65]", "context=256"], 2, "context=261"),
        (["tasks=copy", "copy.data.tokenizer=x"], 2, "a task is made of ids and has no tokenizer"),
        (["init_from=absent"], 2, "absent"),
        (["precision=fp16", "device=cpu"], 2, "fp16 needs a GPU"),
        (["--report", "absent"], 2, "absent"),
        ([], 2, "fix: python -m tools.compare --help"),
        (["--attention=gqa"], 2, "without dashes"),
    ],
)
def test_what_cannot_be_compared_is_a_line(command, words, code, said):
    result = command("tools/compare/__main__.py", *words)
    assert result.code == code and said in result.err and result.err.startswith("error: "), result
    assert result.err.count("\n") == 1 and not [*Path().iterdir()]


def test_a_sweep_of_hydras_is_reported_too(command, words):
    assert (
        command(
            "train.py", "-m", *words, "attention=gqa", "attention.kv_heads=2,1", "seed=0,1"
        ).code
        == 0
    )
    runs = sorted(str(path.parent) for path in Path("runs").glob("*/metrics.jsonl"))
    assert command("tools/compare/__main__.py", "--report", *runs, "--dir", "out").code == 0
    rows = result(Path("out/report.md"))
    assert list(rows) == ["text-tiny-gqa kv_heads=2", "text-tiny-gqa kv_heads=1"]
    assert "n 2)" in rows["text-tiny-gqa kv_heads=1"][0]
    assert (
        command("tools/compare/__main__.py", "--report", *runs, runs[0]).code == 2
    )  # the same twice


def test_variants_are_told_apart_by_what_they_are():
    settings = [
        settings_of(*TINY, f"seed={seed}", f"steps={steps}") for seed, steps in ((0, 5), (1, 9))
    ]
    other = settings_of(*TINY, "attention.window=5")
    runs = [Run(Path(), each, [{"tokens": 1}], True) for each in (*settings, other)]
    found = {
        name: [run.settings for run in group] for name, group in group_by_variant(runs).items()
    }
    assert found == {"test window=None": settings, "test window=5": [other]}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["params", "flops"])
def test_every_preset_is_made_as_large_as_the_baseline(kind, variant):
    for size in ("tiny", "15m", "350m"):
        base = plan.SIZES[kind](plan.meta_model(settings_of(f"model={size}")))
        settings = settings_of(f"model={size}", f"attention={variant}")
        hidden = plan.match_hidden(settings, plan.SIZES[kind], base)
        matched = plan.meta_model(settings, hidden=hidden)
        size_of = (
            sum(p.numel() for p in matched.parameters())
            if kind == "params"
            else matched.training_flops()
        )
        assert abs(size_of / base - 1) <= 0.01, size


def test_matching_changes_the_feed_forward_alone():
    words = ["attention=gqa,mha", "model=tiny", "seed=3"]
    both = plan.plan_jobs(words, "params", Path("out"))["text"]
    one, other = (dict(flatten(job.settings)) for job in both)
    kept = ("name", "run_dir", "attention.kv_heads", "model.attention.kv_heads")
    assert {key for key in one if one[key] != other[key]} == {"model.hidden", *kept}
    assert [job.run_dir for job in both] == [Path("out/gqa-3"), Path("out/mha-3")]


def test_each_task_has_jobs_of_its_own():
    words = ["tasks=text,recall", "recall.model=tiny", "attention=gqa,mha", "model=small"]
    words += [
        "seed=0,1",
        "recall.seed=5",
        "data=stdlib",
        "data.vocab_size=999",
        "steps=9",
        "context=64",
    ]
    words += ["recall.data.pairs=[2,3]"]
    tasks = plan.plan_jobs(words, "params", Path("out"))
    names = {task: [job.run_dir.name for job in jobs] for task, jobs in tasks.items()}
    assert names == {
        "text": ["gqa-0", "mha-0", "gqa-1", "mha-1"],
        "recall": ["recall-gqa-5", "recall-mha-5"],
    }
    text, recall = tasks["text"][0].settings, tasks["recall"][0].settings
    assert text["data"]["vocab_size"] == 999 and text["model"]["dim"] == 128
    assert recall["data"]["_target_"] == "data.tasks.Recall" and recall["data"]["pairs"] == [2, 3]
    assert recall["data"]["vocab_size"] == 128  # of data/recall.yaml
    assert text["name"] == recall["name"] == "gqa" and text["steps"] == recall["steps"] == 9
    sizes = {
        task: {sum(p.numel() for p in plan.meta_model(job.settings).parameters()) for job in jobs}
        for task, jobs in tasks.items()
    }
    assert max(sizes["recall"]) < 1.01 * min(sizes["recall"]) < min(sizes["text"]) / 2


def test_a_task_has_no_tokenizer_of_a_pretrained_model(command, drawn_run):
    words = ("tasks=recall", f"init_from={drawn_run}", "context=256")
    result = command("tools/compare/__main__.py", *words)
    assert result.code == 2 and "no tokenizer" in result.err and result.err.count("\n") == 1


def test_sizes_are_matched_within_each_model_size():
    words = ["attention=gqa,mla", "model=tiny,small"]
    models = {
        job.settings["name"]: plan.meta_model(job.settings)
        for job in plan.plan_jobs(words, "params", Path("out"))["text"]
    }
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert list(sizes) == ["gqa-tiny", "gqa-small", "mla-tiny", "mla-small"]
    for size in ("tiny", "small"):
        assert sizes[f"mla-{size}"] == pytest.approx(sizes[f"gqa-{size}"], rel=0.01)
    assert sizes["gqa-small"] > 2 * sizes["gqa-tiny"]


def test_both_tasks_are_trained_after_their_time_was_told(command, words, forked_jobs):
    asked = ("tasks=text,recall", "attention=gqa,mqa", *words, "--dir", "out")
    small = ("recall.data.pairs=[2,3]", "recall.steps=3")
    result = command("tools/compare/__main__.py", *asked, *small)
    assert result.code == 0, result.err
    before, _, after = result.err.partition("1/1")
    unknown = r"(\w+): 2 runs, time unknown until (\S+) has trained"
    assert re.findall(unknown, before) == [("text", "gqa-0"), ("recall", "recall-gqa-0")]
    assert re.findall(r"(\w+): .*about 0:0", after) == ["text", "recall"]
    steps = {path.name: Run.read(path).last["step"] for path in Path("out").glob("*-0")}
    assert steps == {"gqa-0": 4, "mqa-0": 4, "recall-gqa-0": 3, "recall-mqa-0": 3}
    assert "recall_accuracy_3" in Run.read(Path("out/recall-mqa-0")).last


MEETING = f"""
import os, sys, time
open(os.environ["CUDA_VISIBLE_DEVICES"], "w")
end = time.monotonic() + {LONG}
while not (os.path.exists("3") and os.path.exists("5")):  # until both run
    if time.monotonic() > end:
        sys.exit(1)
    time.sleep(0.01)
"""


def test_each_gpu_has_a_run_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(jobs, "ROOT", tmp_path)
    (tmp_path / "train.py").write_text(MEETING)
    monkeypatch.chdir(tmp_path)
    both = [jobs.Job(tmp_path / name, [], {"device": "auto"}) for name in ("a", "b")]
    monkeypatch.setattr(
        Run,
        "read",
        lambda _: SimpleNamespace(
            loss=1.0, metric_name="bits per byte", done=False, settings={"device": "auto"}
        ),
    )
    jobs.train_all(both)
    assert [job.problem for job in both] == [None, None] and {"3", "5"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_hydras_submitit_can_send_a_run_away():
    names = (
        train.main.__wrapped__.__code__.co_names
    )  # cloudpickle takes along torch.A.B where torch, A and B are named
    assert "torch" not in names
