"""A comparison trains missing runs under equal conditions and reports the results."""

import html
import json
import os
import shlex
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.conftest import LONG, ROOT, TINY, settings_of
from tests.faults.harness import wait_for
from tests.run.forks import Forked
from tests.tools.pages import table
from tools.compare import jobs, measures
from tools.compare.jobs import locked
from tools.compare.runs import Run, differences, group_by_variant, median_of_log

COMPARE = "tools/compare/__main__.py"
STEPS = ("steps=4", "eval_every=2", "save_every=1")
SMALL = (*TINY, *STEPS, "context=16", "batch_tokens=64", "model.depth=1")


@pytest.fixture
def words(story) -> list[str]:
    return [*SMALL, "data=text", f"data.path={story}", "data.vocab_size=400"]


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


def curves(folder: str) -> dict[str, list]:
    keys = ("step", "train_loss", "val_bpb", "grad_norm")
    found = {}
    for path in Path(folder).glob("*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found[path.parent.name] = [[line.get(key) for key in keys] for line in lines]
    return found


def test_runs_are_trained_once_and_then_reported(command, words, forked_jobs, story):
    asked = ("attention=gqa,mqa", "seed=0,1", *words, "--dir", "out")
    first = command(COMPARE, *asked).succeeded()
    assert "mqa: model.hidden=" in first.err
    rows = result()
    assert sorted(rows) == ["gqa", "mqa"]
    for name, row in rows.items():
        mean = (Run.read(Path(f"out/{name}-0")).loss + Run.read(Path(f"out/{name}-1")).loss) / 2
        assert float(row["bits per byte"]) == pytest.approx(mean, abs=1e-4)
    assert rows["gqa"]["verdict"] == "baseline"
    assert rows["mqa"]["verdict"] in ("worse", "better", "as good", "cannot tell")

    # Repeating the command trains nothing again.
    before = {path: path.stat().st_mtime_ns for path in Path("out").glob("*/*")}
    again = command(COMPARE, *asked).succeeded()
    assert again.err.count("finished before") == 4 and result() == rows
    assert {path: path.stat().st_mtime_ns for path in Path("out").glob("*/*")} == before

    # In a different folder and without checkpoints, the records give an identical report.
    Path("kept").mkdir()
    shutil.copy("out/runs.jsonl", "kept")
    pages = []
    for _ in range(2):
        command(COMPARE, "--report", "kept").succeeded()
        pages.append([Path("kept", name).read_bytes() for name in ("report.html", "text-64.svg")])
    assert pages[0] == pages[1] and result("kept") == rows
    assert f"python -m tools.compare {shlex.join(asked)}" in html.unescape(pages[0][0].decode())
    moved = command(COMPARE, *asked[:-1], "kept").succeeded()
    assert moved.err.count("finished before") == 4

    # Runs with a different text or different settings are trained again, and the old ones are kept.
    story.write_text(story.read_text(encoding="utf-8").replace("a", "o"), encoding="utf-8")
    replaced = command(COMPARE, *asked).succeeded()
    assert replaced.err.count("training again, with different text") == 4
    assert result()["gqa"]["bits per byte"] != rows["gqa"]["bits per byte"]
    other = command(COMPARE, *asked, "optimizer.lr=0.01").succeeded()
    assert other.err.count("training again, with different optimizer.lr") == 4
    assert len([*Path("out").glob("mqa-1.old-*/config.yaml")]) == 2

    with Path("kept/runs.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"folder": ')
    torn = command(COMPARE, "--report", "kept")
    assert torn.code == 2 and "runs.jsonl, line" in torn.err and "Traceback" not in torn.err


def test_a_failed_run_is_reported_and_its_variant_stays_the_baseline(command, words, quick):
    Path("out/gqa-0").mkdir(parents=True)
    Path("out/gqa-0/mine").touch()  # a folder with unrelated files cannot be used by a run
    asked = ("attention=gqa,mla", "seed=0,1", *words, "--dir", "out")
    command(COMPARE, *asked).succeeded()
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "gqa-0 is not in the report: exit 2: " in page
    rows = result()
    assert sorted(rows) == ["gqa", "mla"]
    assert rows["gqa"]["verdict"] == "baseline"
    assert rows["mla"]["verdict"] == "cannot tell: one seed"
    assert "nan" not in page.lower()

    Path("out/runs.jsonl").unlink()
    Path("out/mla-0/metrics.jsonl").write_text("{", encoding="utf-8")
    runs = ("out/gqa-1", "out/mla-0", "out/mla-1")
    command(COMPARE, "--report", *runs, "--dir", "out").succeeded()
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "mla-0 is not in the report: cannot read the metrics" in page


def test_runs_that_depend_on_a_failed_baseline_are_not_trained(command, words, quick):
    Path("out/gqa-0").mkdir(parents=True)
    Path("out/gqa-0/mine").touch()
    asked = ("attention=gqa,mla", *words, "max_minutes=1", "--dir", "out")
    result = command(COMPARE, *asked)
    assert (
        result.code == 2
        and "mla-0: the baseline, which sets the number of steps, did not" in result.err
    )
    assert not Path("out/mla-0").exists()


def begun(said: Path, *words: str) -> Forked:
    """Start the command in a new process that writes its output to `said`."""
    with said.open("w", encoding="utf-8") as file:
        return Forked([sys.executable, ROOT / COMPARE, *words], file, file, {})


def test_a_killed_comparison_resumes(command, words, quick, tmp_path):
    asked = ["attention=gqa,mqa,mha", *words, "steps=40", "save_every=4"]
    command(COMPARE, *asked, "--dir", "whole").succeeded()
    cut = begun(tmp_path / "said", *asked, "--dir", "cut")
    wait_for(lambda: [*tmp_path.glob("cut/mqa-0/checkpoints/step-*")])
    children = Path(f"/proc/{cut.pid}/task/{cut.pid}/children").read_text(encoding="utf-8")
    os.kill(cut.pid, signal.SIGKILL)
    for trainer in children.split():  # also kill the runs that it was training
        os.kill(int(trainer), signal.SIGKILL)
    assert cut.wait() == -signal.SIGKILL
    assert not Run.read(tmp_path / "cut/mqa-0").done and Run.read(tmp_path / "cut/gqa-0").done
    finished = (tmp_path / "cut/gqa-0/metrics.jsonl").stat().st_mtime_ns
    command(COMPARE, *asked, "--dir", "cut").succeeded()
    assert (tmp_path / "cut/gqa-0/metrics.jsonl").stat().st_mtime_ns == finished
    assert curves("cut") == curves("whole") and result("cut") == result("whole")


def test_only_one_comparison_at_a_time_trains_in_a_folder(command, words, quick):
    with locked(Path("out")):
        refused = command(COMPARE, *words, "--dir", "out")
    assert refused.code == 2 and "another process" in refused.err
    assert not Path("out/runs.jsonl").exists()
    # The run of a comparison that was killed may still be training.
    Path("out/run-0").mkdir()
    with FileLock("out/run-0/.lock"):
        command(COMPARE, *words, "--dir", "out")
    assert not Path("out/runs.jsonl").exists() and [*Path("out").glob("*.log")] == []
    command(COMPARE, *words, "--dir", "out").succeeded()


@pytest.mark.long
def test_a_window_of_two_tokens_is_judged_worse_but_different_seeds_are_not(command):
    words = [
        "model=tiny",
        "context=128",
        "batch_tokens=2048",
        "max_minutes=null",
        "steps=150",
        "compile=false",
    ]
    seeds = {"early": range(3), "late": range(3, 6), "cut": range(3)}
    runs = []
    for name, each in seeds.items():
        chosen = [f"name={name}", f"seed={','.join(map(str, each))}"]
        chosen += ["attention.window=2"] if name == "cut" else []
        command(COMPARE, *words, *chosen, "--dir", "out").succeeded()
        runs += [f"out/{name}-{seed}" for seed in each]
    command(COMPARE, "--report", *runs, "--dir", "out").succeeded()
    rows = result()
    assert rows["late"]["verdict"] in ("as good", "cannot tell"), rows
    assert rows["cut"]["verdict"] == "worse", rows


@pytest.mark.parametrize(
    "end", ["max_minutes=0.01", "max_minutes=null tokens_per_parameter=0.02 model.depth=1,2"]
)
def test_the_baseline_determines_the_steps_of_all_variants(command, words, quick, end):
    timed = [word for word in words if not word.startswith(("steps", "max_minutes", "model.depth"))]
    asked = ("attention=gqa,mha", *timed, *end.split(), "--match", "none", "--dir", "out")
    command(COMPARE, *asked).succeeded()
    runs = [Run.read(path.parent) for path in Path("out").glob("*/metrics.jsonl")]
    assert len(runs) == (4 if "depth" in end else 2)
    assert len({run.last["tokens"] for run in runs}) == 1
    assert [run.settings["steps"] for run in runs].count(None) == 1  # the baseline


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_a_comparison(command, words, quick, tmp_path, number, code):
    running = begun(tmp_path / "said", *words, "steps=1000000", "--dir", "out")
    wait_for(lambda: [*tmp_path.glob("out/run-0/checkpoints/step-*")])
    os.kill(running.pid, number)
    assert running.wait() == code
    said = (tmp_path / "said").read_text(encoding="utf-8")
    assert "run the same command to continue" in said
    assert "is saved. To continue: " in (tmp_path / "out/run-0.log").read_text(encoding="utf-8")
    assert not Run.read(tmp_path / "out/run-0").done


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["attention=gqa,magic"], 1, "magic"),
        (["attention=gqa,mha", "model.heads=3"], 2, "heads=3"),
        (["model.hidden=64,128"], 2, "--match none"),
        (["data=recall,text"], 2, "data=recall"),
        (["data=text", "data.holdout=20,3"], 2, "data.holdout=20"),
        (["optimizer.lr=interval(0,1)"], 1, "interval"),
        (["model=tiny", "data.vocab_size=400,400000"], 2, "--match none"),
        (["model.dim=64,"], 1, "model.dim=64,"),
        (["tasks=recall"], 1, "tasks"),
        (["data=recall", "data.pairs=[64,65]", "context=256"], 2, "do not fit (context=256"),
        (["precision=fp16", "device=cpu"], 2, "fp16 needs a GPU"),
        (["--report", "absent"], 2, "absent"),
        ([], 2, "overrides"),
        (["--attention=gqa"], 2, "--attention=gqa"),
    ],
)
def test_an_invalid_comparison_is_refused_in_one_line(command, words, code, said):
    result = command(COMPARE, *words)
    assert result.code == code and said in result.err and result.err.startswith("error: "), result
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
    lines = [{"step": 1, "tokens_per_second": 9.0}]
    lines += [{"tokens_per_second": speed} for speed in (0.5, 0.1, 0.2, None)]
    assert median_of_log(lines, "tokens_per_second") == 0.2
    assert median_of_log(lines[:1], "tokens_per_second") == 9.0
    assert median_of_log(lines, "mfu") is None


def test_damaged_checkpoints_do_not_prevent_a_report(command, words, quick):
    command(COMPARE, "attention=gqa,mqa", *words, "--dir", "out", "--quick").succeeded()
    for weights in Path("out/mqa-0/checkpoints").glob("*/*.safetensors"):
        weights.write_bytes(b"")
    reported = command(COMPARE, "--report", "out").succeeded()
    assert "mqa-0: all checkpoints are damaged" in reported.err
    assert result()["gqa"]["decoding, ms/token"] == "1.00"


def test_a_comparison_can_train_on_a_task(command, words, quick):
    others = [word for word in words if not word.startswith(("data", "steps"))]
    task = ("data=recall", "data.pairs=[2,3]", "data.vocab_size=128", "steps=3")
    asked = ("attention=gqa,mqa", *others, *task, "--dir", "out", "--quick")
    told = command(COMPARE, *asked).succeeded()
    assert "recall_accuracy_3" in Run.read(Path("out/mqa-0")).last
    assert told.out.startswith("No variant solves recall.")
    row = result()["gqa"]
    assert row["seeds that solve it"] == "0 of 1" and "decoding, ms/token" not in row


MEETING = f"""
import os, sys, time
open(os.environ["CUDA_VISIBLE_DEVICES"], "w")
end = time.monotonic() + {LONG}
while not (os.path.exists("3") and os.path.exists("5")):  # until both run
    if time.monotonic() > end:
        sys.exit(1)
    time.sleep(0.01)
"""


def test_each_gpu_trains_a_separate_run(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(jobs, "ROOT", tmp_path)
    (tmp_path / "train.py").write_text(MEETING, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    settings = settings_of(*TINY, "device=auto").model_dump()
    both = [jobs.Job(tmp_path / name, [], settings, [], "a") for name in ("a", "b")]
    monkeypatch.setattr(Run, "read", lambda folder: Run(folder, settings, [{"val_bpb": 1.0}], True))
    jobs.train_all(both)
    assert [job.run.folder for job in both] == [job.run_dir for job in both]
    assert {"3", "5"} <= {path.name for path in tmp_path.iterdir()}


def test_runs_share_the_cores_of_a_cpu(monkeypatch):
    monkeypatch.setattr(jobs, "cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(jobs, "cpu_quota", lambda: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert len(jobs.environments("cpu")) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert len(jobs.environments("cpu")) == 4
    monkeypatch.setattr(jobs, "cpu_quota", lambda: 2.0)
    assert len(jobs.environments("cpu")) == 2
