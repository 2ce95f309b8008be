"""A comparison trains missing runs under equal conditions and reports the results."""

import html
import json
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import LONG, ROOT, TINY, settings_of
from tests.faults.harness import wait_for
from tests.run.forks import Forked
from tests.tools.pages import table
from tools.compare import jobs, measures
from tools.compare.__main__ import announce
from tools.compare.plan import Variant
from tools.compare.runs import Run, group_by_variant, median_of_log

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


def result(folder: str = "out") -> dict[str, list[str]]:
    """The table cells of each variant, up to the cache column, and the cells of its parts."""
    page = Path(folder, "report.html").read_text(encoding="utf-8")
    parts = table(page, 2)
    found = {}
    for name, row in table(page, 0).items():
        judged = list(row.values())[1 : list(row).index("cache, kB")]
        found[name] = [*judged, *list(parts.get(name, {}).values())[1:]]
    return found


def curves(folder: str) -> dict[str, list]:
    keys = ("step", "train_loss", "val_bpb", "grad_norm")
    found = {}
    for path in Path(folder).glob("*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found[path.parent.name] = [[line.get(key) for key in keys] for line in lines]
    return found


def test_runs_are_trained_once_and_then_reported(command, words, forked_jobs):
    asked = ("attention=gqa,mqa", "seed=0,1", *words, "--dir", "out")
    first = command(COMPARE, *asked)
    assert first.code == 0 and "mqa: model.hidden=" in first.err, first.err
    assert re.match(
        r"(Too little data to choose: 2 of 3 seeds, 0.0\d+ of 10 tokens per parameter; \w+ has|"
        r"Only a hint: mqa's loss is lower).*\nA reliable answer needs 3 seeds per variant "
        r"\(seed=0,1,2\); 10 tokens per parameter \(steps=\d+ max_minutes=null.*\); "
        r"learning rates tuned for each variant \(--tune\)\..*mqa",
        first.out,
        re.DOTALL,
    )
    assert "attention=gqa,mqa" in Path("out/report.html").read_text(encoding="utf-8")
    losses = result()
    assert sorted(losses) == ["gqa", "mqa"]
    for name, cells in losses.items():
        mean = (Run.read(Path(f"out/{name}-0")).loss + Run.read(Path(f"out/{name}-1")).loss) / 2
        assert float(cells[0]) == pytest.approx(mean, abs=1e-4)
    assert losses["gqa"][1:3] == ["", "baseline"]
    assert losses["mqa"][2] in ("worse", "better", "as good", "cannot tell")

    # Repeating the command trains nothing again, and a different learning rate is refused.
    before = {path: path.stat().st_mtime_ns for path in Path("out").glob("*/*")}
    again = command(COMPARE, *asked)
    assert again.code == 0 and again.err.count("finished before") == 4
    assert result() == losses
    other = command(COMPARE, *asked, "optimizer.lr=0.01")
    assert other.code == 2 and "overrides (optimizer.lr=0.01)" in other.err
    assert {path: path.stat().st_mtime_ns for path in Path("out").glob("*/*")} == before

    # In a different folder and without checkpoints, the records give an identical report.
    Path("kept").mkdir()
    shutil.copy("out/runs.jsonl", "kept")
    pages = []
    for _ in range(2):
        command(COMPARE, "--report", "kept").succeeded()
        pages.append([Path("kept", name).read_bytes() for name in ("report.html", "text-64.svg")])
    assert pages[0] == pages[1] and result("kept") == losses
    trained_by = f"python -m tools.compare {shlex.join(asked)}"
    assert f">{trained_by}\n\nmodel._target_=" in html.unescape(pages[0][0].decode())
    moved = command(COMPARE, *asked[:-1], "kept")
    assert moved.code == 0 and moved.err.count("finished before") == 4, moved.err
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
    assert rows["gqa"][2] == "baseline" and rows["mla"][2] == "cannot tell: one seed"
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
    assert not [*Path("out/mla-0").iterdir()]


def begun(said: Path, *words: str) -> Forked:
    """Start the command in a new process that writes its output to `said`."""
    with said.open("w", encoding="utf-8") as file:
        return Forked([sys.executable, ROOT / COMPARE, *words], file, file, {})


def test_a_killed_comparison_resumes(command, words, quick, tmp_path):
    asked = ["attention=gqa,mqa,mha", *words, "steps=40", "save_every=4"]
    command(COMPARE, *asked, "--dir", "whole").succeeded()
    cut = begun(tmp_path / "said", *asked, "--dir", "cut")
    wait_for(lambda: [*tmp_path.glob("cut/mqa-0/checkpoints/step-*")])
    (trainer,) = (
        Path(f"/proc/{cut.pid}/task/{cut.pid}/children").read_text(encoding="utf-8").split()
    )
    os.kill(cut.pid, signal.SIGKILL)  # also kill the run that it was training
    os.kill(int(trainer), signal.SIGKILL)
    assert cut.wait() == -signal.SIGKILL
    assert not Run.read(tmp_path / "cut/mqa-0").done and Run.read(tmp_path / "cut/gqa-0").done
    finished = (tmp_path / "cut/gqa-0/metrics.jsonl").stat().st_mtime_ns
    command(COMPARE, *asked, "--dir", "cut").succeeded()
    assert (tmp_path / "cut/gqa-0/metrics.jsonl").stat().st_mtime_ns == finished
    assert curves("cut") == curves("whole") and result("cut") == result("whole")


def test_two_simultaneous_comparisons_share_their_runs(command, words, quick, tmp_path):
    asked = ("attention=gqa,mqa", "seed=0,1", *words, "--dir", "out")
    both = [begun(tmp_path / name, *asked) for name in ("one", "other")]
    assert [call.wait() for call in both] == [0, 0]
    said = "".join((tmp_path / name).read_text(encoding="utf-8") for name in ("one", "other"))
    assert "not in the report" not in said
    trained = re.findall(r"(\w+-\d): [\d.]+ bits per byte", said)
    assert sorted(trained) == ["gqa-0", "gqa-1", "mqa-0", "mqa-1"]


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
    assert rows["late"][2] in ("as good", "cannot tell") and rows["cut"][2] == "worse", rows


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


def test_a_signal_saves_and_ends_a_comparison(command, words, quick, tmp_path):
    running = begun(tmp_path / "said", *words, "steps=1000000", "--dir", "out")
    wait_for(lambda: [*tmp_path.glob("out/run-0/checkpoints/step-*")])
    running.terminate()
    assert running.wait() == 75
    said = (tmp_path / "said").read_text(encoding="utf-8")
    assert "saving after this step" in said
    assert "run the same command to continue" in said
    assert "is saved. To continue: " in (tmp_path / "out/run-0.log").read_text(encoding="utf-8")
    assert not Run.read(tmp_path / "out/run-0").done


def test_ctrl_c_starts_no_run_and_a_second_one_does_not_wait(capfd):
    updated = []
    waited = []

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def job(name: str, process: SimpleNamespace | None) -> SimpleNamespace:
        def update(*_) -> None:
            updated.append(name)
            press()

        return SimpleNamespace(
            overrides=[*TINY, "steps=1"], outcome=None, process=process, update=update
        )

    # The second Ctrl-C arrives when the comparison has begun to end.
    process = SimpleNamespace(terminate=press, wait=lambda: waited.append("first"))
    with pytest.raises(SystemExit) as ended:
        jobs.train_all([job("first", process), job("second", None)])
    assert ended.value.code == 130
    assert updated == ["first"] and waited == []
    assert "error: stopped" in capfd.readouterr().err


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["attention=gqa,magic"], 1, "magic"),
        (["attention=gqa,mha", "model.heads=3"], 2, "heads=3"),
        (["model.hidden=64,128"], 2, "--match none"),
        (["data=recall,track"], 2, "data=recall"),
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


def test_runs_are_grouped_into_variants_by_their_settings():
    settings = [settings_of(*TINY, f"seed={seed}", f"steps={5 + seed}") for seed in (0, 1)]
    settings.append(settings_of(*TINY, "attention.window=5"))
    one, other, window = [
        Run(Path(), each.model_dump(), [{"tokens": 1}], True) for each in settings
    ]
    groups = group_by_variant([one, other, window])
    assert groups == {"test window=None": [one, other], "test window=5": [window]}


@pytest.mark.parametrize(("seeds", "text"), [([0], "1 run in out/"), ([0, 1], "2 runs in out/")])
def test_the_number_of_runs_is_announced(capsys, seeds, text):
    announce([Variant("gqa", [*TINY, "steps=1"], seeds, Path("out"), "gqa")], has_search=False)
    assert capsys.readouterr().err == f"{text}\n"


def test_variant_names_stay_short():
    changed = ("attention.gated=true", "attention.qk_norm=null", "attention.bias=true")
    clipped = ("clip=2.0", "z_loss=0.1")
    runs = [
        Run(Path(), settings_of(*TINY, *words).model_dump(), [{"tokens": 1}], True)
        for words in ((), changed, (*changed, *clipped), (*changed, clipped[0]))
    ]
    # Five settings differ. Duplicate names get a number.
    assert list(group_by_variant(runs)) == [
        "test qk_norm=before_rope gated=False bias=False and 2 more",
        "test qk_norm=None gated=True bias=True and 2 more",
        "test qk_norm=None gated=True bias=True and 2 more (2)",
        "test qk_norm=None gated=True bias=True and 2 more (3)",
    ]
    # Names contain classes without their modules.
    runs[1] = Run(Path(), settings_of(*TINY, "ffn=gelu").model_dump(), [{"tokens": 1}], True)
    assert list(group_by_variant(runs[:2])) == [
        "test GatedFeedForward activation=silu",
        "test FeedForward activation=gelu",
    ]


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
    assert reported.err.count("mqa-0: all checkpoints are damaged") == 2
    rows = table(Path("out/report.html").read_text(encoding="utf-8"), 1)
    assert rows["gqa"]["decoding, ms/token"] == "1.00"


def test_a_comparison_can_train_on_a_task(command, words, quick):
    others = [word for word in words if not word.startswith(("data", "steps"))]
    task = ("data=recall", "data.pairs=[2,3]", "data.vocab_size=128", "steps=3")
    asked = ("attention=gqa,mqa", *others, *task, "--dir", "out", "--quick")
    result = command(COMPARE, *asked).succeeded()
    assert "recall_accuracy_3" in Run.read(Path("out/mqa-0")).last
    assert result.out.startswith("No variant solves recall: no seed reaches 90 % accuracy.")
    assert result.out.count(" 0 of 1 (no better than guessing)") == 2
    rows = table(Path("out/report.html").read_text(encoding="utf-8"), 0)
    assert rows["gqa"]["seeds that solve it"] == "0 of 1"
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "decoding, ms/token" not in table(page, 1)["gqa"]


MEETING = f"""
import os, sys, time
open(os.environ["CUDA_VISIBLE_DEVICES"], "w")
end = time.monotonic() + {LONG}
while not (os.path.exists("3") and os.path.exists("5")):  # until both run
    if time.monotonic() > end:
        sys.exit(1)
    time.sleep(0.01)
"""


def test_each_gpu_trains_a_separate_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(jobs, "ROOT", tmp_path)
    (tmp_path / "train.py").write_text(MEETING, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    both = [jobs.Job(tmp_path / name, []) for name in ("a", "b")]
    settings = settings_of(*TINY).model_dump()
    monkeypatch.setattr(Run, "read", lambda folder: Run(folder, settings, [{"val_bpb": 1.0}], True))
    jobs.train_all(both)
    assert "a: training (run 1 of 2)\nb: training (run 2 of 2)\n" in capsys.readouterr().err
    assert [job.run.folder for job in both] == [job.run_dir for job in both]
    assert {"3", "5"} <= {path.name for path in tmp_path.iterdir()}
