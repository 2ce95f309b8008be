"""A comparison trains missing runs under equal conditions and reports the results."""

import html
import os
import shlex
import shutil
import signal
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock

from tests.conftest import ROOT, TINY, settings_of, tell
from tests.faults.harness import wait_for
from tests.run.forks import Forked
from tests.tools.pages import table
from tools.compare import jobs, measures
from tools.compare.jobs import Job, locked
from tools.compare.runs import Run, differences, group_by_variant, median_of_log

COMPARE = "tools/compare/__main__.py"
SMALL = (*TINY, "steps=4", "eval_every=2", "save_every=1", "context=16", "batch_tokens=64")


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder with a text that all comparisons of this module train on."""
    folder = tmp_path_factory.mktemp("shared")
    tell(folder)
    return folder


@pytest.fixture
def words(shared, story) -> list[str]:
    """Settings of a small run; `story` provides its tokenizer."""
    path = shared / "story.txt"
    return [*SMALL, "model.depth=1", "data=text", f"data.path={path}", "data.vocab_size=400"]


@pytest.fixture
def asked(words) -> list[str]:
    """A comparison of two variants with two seeds."""
    return ["attention=gqa,mqa", "seed=0,1", *words, "--dir", "out"]


@pytest.fixture
def forked_jobs(monkeypatch) -> None:
    """Run the training jobs of a comparison in forks, which start faster than new processes."""
    monkeypatch.setattr(
        jobs, "subprocess", SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)
    )
    monkeypatch.setattr(jobs, "sleep", lambda seconds: sleep(seconds / 20))


@pytest.fixture
def compared(command, asked, shared, forked_jobs) -> Path:
    """A folder with this comparison, trained only once, that the test may modify."""
    if not (shared / "out").exists():
        command(COMPARE, *asked).succeeded()
        shutil.copytree("out", shared / "out")
        shutil.rmtree("out")
    return shutil.copytree(shared / "out", Path("out"))


@pytest.fixture
def quick(forked_jobs, monkeypatch) -> None:
    """Fork the runs, and skip decoding measurements in the report."""

    def latencies(runs: dict[str, Path], *_) -> dict[str, dict[str, float]]:
        return {name: {"decoding, ms/token": 1.0} for name in runs}

    monkeypatch.setattr(measures, "latencies", latencies)


def result(folder: str = "out") -> dict[str, dict[str, str]]:
    """The table cells of each variant, without the speeds."""
    page = Path(folder, "report.html").read_text(encoding="utf-8")
    rows = table(page, 0)
    for row in rows.values():
        row.pop("tokens/s", None)
    return rows


def test_a_report_has_the_mean_loss_of_each_variant(compared):
    rows = result()
    assert sorted(rows) == ["gqa", "mqa"]
    for name, row in rows.items():
        mean = (Run.read(compared / f"{name}-0").loss + Run.read(compared / f"{name}-1").loss) / 2
        assert float(row["bits per byte"]) == pytest.approx(mean, abs=1e-4)
        assert float(row["decoding, ms/token"]) > 0
    assert rows["gqa"]["verdict"] == "baseline"
    assert rows["mqa"]["verdict"] in ("worse", "better", "as good", "cannot tell")


def test_repeating_a_comparison_trains_nothing_again(command, compared, asked):
    rows = result()
    before = {path: path.stat().st_mtime_ns for path in compared.glob("*/*")}
    again = command(COMPARE, *asked).succeeded()
    assert again.err.count("already finished") == 4 and result() == rows
    assert {path: path.stat().st_mtime_ns for path in compared.glob("*/*")} == before


def test_the_records_alone_give_the_same_report(command, compared, asked):
    rows = result()
    Path("kept").mkdir()
    shutil.copy("out/runs.jsonl", "kept")
    pages = []
    for _ in range(2):
        command(COMPARE, "--report", "kept").succeeded()
        pages.append([Path("kept", name).read_bytes() for name in ("report.html", "text-64.svg")])
    assert pages[0] == pages[1] and result("kept") == rows
    assert f"python -m tools.compare {shlex.join(asked)}" in html.unescape(pages[0][0].decode())
    moved = command(COMPARE, *asked[:-1], "kept").succeeded()
    assert moved.err.count("already finished") == 4

    with Path("kept/runs.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"folder": ')
    torn = command(COMPARE, "--report", "kept")
    assert torn.code == 2 and "runs.jsonl, line" in torn.err and torn.err.count("\n") == 1


def test_runs_with_another_text_or_setting_are_trained_again(command, compared, words, quick):
    text = Path("other.txt")
    old = Path(words[-2].removeprefix("data.path=")).read_text(encoding="utf-8")
    text.write_text(old.replace("a", "o"), encoding="utf-8")
    words = ["attention=gqa", "seed=0", "name=gqa", *words, "--dir", "out"]
    for word, key in ((f"data.path={text.absolute()}", "text"), ("clip=2", "clip")):
        again = command(COMPARE, *words, word).succeeded()
        assert "gqa-0: training again, with different " in again.err and key in again.err
    # The old runs are kept.
    assert len([*compared.glob("gqa-0.old-*/config.yaml")]) == 2


def test_a_failed_run_is_reported_and_its_variant_stays_the_baseline(
    command, compared, asked, quick
):
    lines = Path("out/runs.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if '"gqa-0"' not in line]
    Path("out/runs.jsonl").write_text("".join(kept), encoding="utf-8")
    shutil.rmtree("out/gqa-0")
    Path("out/gqa-0").mkdir()
    Path("out/gqa-0/mine").touch()  # a folder with unrelated files cannot be used by a run
    command(COMPARE, *asked).succeeded()
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "gqa-0 is not in the report: exit 2: " in page
    rows = result()
    assert sorted(rows) == ["gqa", "mqa"]
    assert rows["gqa"]["verdict"] == "baseline"
    assert rows["mqa"]["verdict"] == "cannot tell: one seed"
    assert "nan" not in page.lower()


@pytest.mark.parametrize("end", ["max_minutes=1", "tokens_per_parameter=2"])
def test_the_baseline_determines_the_steps_of_all_variants(end, tmp_path):
    settings = settings_of(*TINY, "steps=null", end).model_dump()
    baseline, job, other = (
        Job(tmp_path / name, [], deepcopy(settings), ["model.depth"], "a") for name in "abc"
    )
    job.baseline = other.baseline = baseline
    other.prepare()
    assert "baseline" in other.outcome and other.run is None and not other.run_dir.exists()
    machine = {"machine": {"compiled": False}}
    baseline.run = Run(baseline.run_dir, settings | machine, [{"tokens": 7 * 512}], True)
    job.prepare()
    assert (job.settings["steps"], job.settings["max_minutes"]) == (7, None)
    assert job.overrides == ["compile=false", "max_minutes=null", "steps=7"]


def test_only_one_comparison_at_a_time_trains_in_a_folder(command, words, quick):
    with locked(Path("out")):
        refused = command(COMPARE, *words, "--dir", "out")
    assert refused.code == 2
    # The run of a comparison that was killed may still be training.
    Path("out/run-0").mkdir()
    with FileLock("out/run-0/.lock"):
        command(COMPARE, *words, "--dir", "out")
    assert not Path("out/runs.jsonl").exists() and [*Path("out").glob("*.log")] == []


def test_a_signal_saves_and_the_same_command_continues(command, words, quick, tmp_path):
    words = [*words, "steps=80", "save_every=20", "--dir", "out"]
    with open("said", "w", encoding="utf-8") as file:
        running = Forked([sys.executable, ROOT / COMPARE, *words], file, file, {})
    folder = tmp_path / "out/run-0"
    wait_for(lambda: [*folder.glob("checkpoints/step-*")])
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait() == 75
    metrics = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    assert not Run.read(folder).done
    command(COMPARE, *words).succeeded()
    assert Run.read(folder).done
    assert (folder / "metrics.jsonl").read_text(encoding="utf-8").startswith(metrics)


@pytest.mark.parametrize(
    "words, code, named",
    [
        (["model.hidden=64,128"], 2, "--match none"),
        (["data=recall,text"], 2, "data=recall"),
        (["optimizer.lr=interval(0,1)"], 1, "interval"),
        (["precision=fp16", "device=cpu"], 2, "fp16"),
        (["--report", "absent"], 2, "absent"),
        ([], 2, "overrides"),
    ],
)
def test_an_invalid_comparison_is_refused_in_one_line(command, words, code, named):
    result = command(COMPARE, *words)
    assert result.code == code and named in result.err and result.err.startswith("error: "), result
    assert result.err.count("\n") == 1 and not [*Path().iterdir()]


def test_runs_of_train_py_are_grouped_by_their_settings():
    settings = [settings_of(*TINY, f"seed={seed}", f"steps={5 + seed}") for seed in (0, 1)]
    settings.append(settings_of(*TINY, "attention.window=5"))
    names = ("test", "test-2", "test-3")
    one, other, window = [
        Run(Path(name), each.model_dump(), [{"tokens": 1}], True)
        for name, each in zip(names, settings, strict=True)
    ]
    # Groups with the same name are named after the folder of their first run.
    groups = group_by_variant([one, other, window])
    assert groups == {"test": [one, other], "test-3": [window]}
    with pytest.raises(ValueError, match="test-2"):
        group_by_variant([one, replace(one, folder=Path("test-2"))])
    # Two comparisons may have different variants of the same name.
    with pytest.raises(ValueError, match=r"model\.attention\.window"):
        group_by_variant([replace(run, baseline="test") for run in (one, window)])


def test_a_run_differs_if_an_option_is_added_or_left_out():
    plain, scaled = (
        settings_of(*TINY, *words).model_dump()
        for words in ((), ("attention=gqa", "attention.rope_scaling={_target_: model.rope.YaRN}"))
    )
    for old, new in ((plain, scaled), (scaled, plain)):
        assert [*differences(old, new)] == ["model.attention.rope_scaling"]
    del plain["clip"]  # a key that an earlier version lacked
    assert [*differences(plain, settings_of(*TINY).model_dump())] == []


def test_the_median_speed_excludes_the_first_line():
    lines = [{"tokens_per_second": speed} for speed in (9.0, 0.5, 0.1, 0.2, None)]
    assert median_of_log(lines, "tokens_per_second") == 0.2
    assert median_of_log(lines[:1], "tokens_per_second") == 9.0
    assert median_of_log(lines, "mfu") is None


def test_a_comparison_can_train_on_a_task(command, words, quick):
    others = [word for word in words if not word.startswith(("data", "steps"))]
    task = ("data=recall", "data.pairs=[2,3]", "data.vocab_size=128", "steps=3")
    command(COMPARE, *others, *task, "--dir", "out", "--quick").succeeded()
    assert "recall_accuracy_3" in Run.read(Path("out/run-0")).last
    row = result()["run"]
    assert row["seeds that solve it"] == "0 of 1" and "decoding, ms/token" not in row


def test_each_gpu_trains_a_separate_run(monkeypatch, tmp_path):
    events = []

    class Process:
        returncode = 0

        def __init__(self, *_, env, **__):
            events.append(env["CUDA_VISIBLE_DEVICES"])

        def poll(self) -> int:
            events.append("poll")
            return 0

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(Popen=Process, DEVNULL=None))
    settings = settings_of(*TINY, "device=auto").model_dump()
    monkeypatch.setattr(Run, "read", lambda folder: Run(folder, settings, [{"val_bpb": 1.0}], True))
    both = [Job(tmp_path / name, [], settings, [], "a") for name in ("a", "b")]
    jobs.train_all(both)
    # Both begin before one ends.
    assert {*events[:2]} == {"3", "5"}
    assert [job.run.folder for job in both] == [job.run_dir for job in both]


def test_runs_share_the_cores_of_a_cpu(monkeypatch):
    monkeypatch.setattr(jobs, "cores", lambda: [*range(8)])
    monkeypatch.setattr(jobs, "cpu_quota", lambda: 4.0)
    # The driver of both GPUs is too old.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert len(jobs.environments("auto")) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert len(jobs.environments("cpu")) == 4
