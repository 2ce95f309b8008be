"""`train.py` as a user runs it: its output, its files and its exit codes."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from data.tokenizer import Tokenizer
from inference.text import generate_text
from run import checkpoint
from run.checkpoint import load_model
from run.distributed import DistEnv
from tests.conftest import LONG, ROOT, SHORT, TINY
from tests.run.forks import ranks
from tools.compare.runs import Run
from training import evaluation, setup
from training.environment import Environment
from training.logger import Logger

TEXT = ("data=text", "data.path=story.txt", "data.vocab_size=400")
TRAIN = ("train.py", *TINY, *SHORT, *TEXT)


def metrics(run: Path | str) -> list[dict]:
    return [
        json.loads(line)
        for line in Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def values(run: Path | str, *keys: str) -> list[float]:
    return [line[key] for line in metrics(run) for key in keys if key in line]


def losses(run: Path | str) -> list[float]:
    return values(run, "train_loss", "val_loss")


def test_a_run_writes_all_its_files_to_its_folder(trained):
    files = {path.relative_to(trained).as_posix() for path in trained.rglob("*") if path.is_file()}
    inside = ("model.safetensors", "state.pt", "config.json", "tokenizer.model", "manifest.json")
    saved = {f"checkpoints/step-{step:08d}/{name}" for step in (2, 4) for name in inside}
    assert files == {".lock", "config.yaml", "metrics.jsonl", "samples.txt", "loss.png", *saved}
    # Hydra writes no files.
    assert {path.name for path in Path().iterdir()} == {"runs", ".cache", "story.txt"}
    assert values(trained, "step") == [1, 2, 2, 3, 4, 4]
    assert [line["step"] for line in metrics(trained) if "val_bpb" in line] == [2, 4]
    assert (
        yaml.safe_load((trained / "config.yaml").read_text(encoding="utf-8"))["model"]["attention"][
            "kv_heads"
        ]
        == 2
    )
    assert "--- step 4\n" in (trained / "samples.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(("losses", "is_told"), [((5, 4, 4.5), True), ((5, 4, 4.01), False)])
def test_a_rising_held_out_loss_is_reported(tmp_path, capfd, losses, is_told):
    lines = [f'{{"tokens": {loss}, "val_loss": {loss}}}\n' for loss in losses]
    (tmp_path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    loader = SimpleNamespace(rows_per_epoch=1, batch_size=1)
    alone = DistEnv(0, 1, torch.device("cpu"))
    Logger(Environment(None, None, loader, tmp_path, alone, None, None)).plot()
    told = capfd.readouterr().err
    assert ("the held-out loss rose from 4.000 to 4.500 nats" in told) == is_told, told


def test_a_training_command_can_be_repeated_and_resumed(command, trained):
    checkpoints = Path("runs/text-tiny-gqa-2/checkpoints")
    assert command(*TRAIN).code == 0 and (checkpoints / "step-00000004").is_dir()
    again = (*TRAIN, "resume=true", f"run_dir={checkpoints.parent}")
    finished = command(*again)
    assert finished.code == 0 and "finished: step 4 is done" in finished.err
    longer = command(*again, "steps=6")
    assert longer.code == 0 and "done. Now try: python generate.py --run runs/text" in longer.err
    assert (checkpoints / "step-00000006").is_dir()


def test_a_run_is_resumed_with_its_saved_settings(command, trained):
    words = ("train.py", f"run_dir={trained}", "resume=true")
    resumed = command(*words, "steps=6", "schedule=cosine").succeeded()
    assert "changed: schedule._target_" in resumed.err
    assert "changed: steps (was 4, now 6)" in resumed.err
    # The second resume keeps what the first one has changed.
    again = command(*words).succeeded()
    assert "finished: step 6 is done" in again.err and "changed" not in again.err
    assert f"python train.py run_dir={trained} resume=true steps=12" in again.err
    config = yaml.safe_load((trained / "config.yaml").read_text(encoding="utf-8"))
    assert config["schedule"]["_target_"].endswith("cosine")
    assert (config["steps"], config["context"], config["data"]["vocab_size"]) == (6, 64, 400)


def test_a_changed_text_or_order_of_rows_is_not_resumed(command, story, monkeypatch):
    command(*TRAIN, "run_dir=run").succeeded()
    words = ("train.py", "run_dir=run", "resume=true", "steps=6")
    with monkeypatch.context() as patch:
        patch.setattr("data.corpus.ROW_ORDER", 1)
        result = command(*words)
        assert result.code == 2 and "order" in result.err
    with story.open("a", encoding="utf-8") as text:
        text.write("More.")
    result = command(*words)
    assert result.code == 2 and "the text has changed" in result.err


def test_a_finished_run_is_not_sampled_or_evaluated_again(command, trained, monkeypatch):
    files = [trained / name for name in ("metrics.jsonl", "samples.txt")]
    before = [file.read_bytes() for file in files]
    refuse = None  # a sample or an evaluation would fail
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", refuse)
        patch.setattr(evaluation, "stream_text", refuse)
        result = command("train.py", f"run_dir={trained}", "resume=true").succeeded()
    assert "held out" not in result.err and "a sample" not in result.err
    assert [file.read_bytes() for file in files] == before
    # If the end of a file is missing, it is written again.
    for file, content, missing in zip(files * 2, before * 2, (1, 1, 3, 3), strict=True):
        file.write_bytes(content[:-missing])
        command("train.py", f"run_dir={trained}", "resume=true").succeeded()
        now = [each.read_bytes() for each in files]
        assert now[1] == before[1]
        without_times = [re.sub(rb'"seconds": [\d.]+', b"", text) for text in (now[0], before[0])]
        assert without_times[0] == without_times[1]
    # With more steps, the evaluation at the old end stays, and is logged once.
    command("train.py", f"run_dir={trained}", "resume=true", "steps=6").succeeded()
    assert [line["step"] for line in metrics(trained) if "val_loss" in line] == [2, 4, 6]


@pytest.mark.parametrize("minutes", ["null", "10"])
def test_an_extended_run_keeps_the_evaluation_at_its_old_end(command, story, monkeypatch, minutes):
    monkeypatch.setattr(evaluation, "MIN_EVAL_TOKENS", 32)
    limits = ("batch_tokens=128", f"max_minutes={minutes}")
    words = (*TRAIN, "eval_every=100", "sample_every=100", "run_dir=runs/a", *limits)
    command(*words).succeeded()
    run = Path("runs/a")
    (old_end,) = (line for line in metrics(run) if "val_loss" in line)
    samples = (run / "samples.txt").read_text(encoding="utf-8")
    assert old_end["eval_tokens"] == 4 * 128 // 10  # a run of 8 steps would evaluate more tokens
    command("train.py", "run_dir=runs/a", "resume=true", "steps=8").succeeded()
    kept, new_end = (line for line in metrics(run) if "val_loss" in line)
    assert kept["step"] == 4 and new_end["step"] == 8
    assert kept["val_loss"] == old_end["val_loss"]
    assert kept["eval_tokens"] == new_end["eval_tokens"] == old_end["eval_tokens"]
    assert (run / "samples.txt").read_text(encoding="utf-8").startswith(samples)


def test_a_profile_is_written_and_its_largest_entries_are_shown(command, story):
    result = command(*TRAIN, "steps=6", "profile=2", "run_dir=runs/a").succeeded()
    assert "profiler_start" not in result.err  # a message of the profiler's library
    trace = gzip.decompress(Path("runs/a/trace.json.gz").read_bytes())
    events = json.loads(trace)["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4"}
    assert "Self CPU %" in result.err


@pytest.mark.parametrize(
    "words, code, said",
    [
        ("", 2, "fix: resume=true, or choose a different run_dir"),
        ("resume=true model.depth=3", 2, "model.depth (was 2, now 3)"),
        ("resume=true optimizer=adamw", 2, "optimizer._target_ (was training.optimizers.muon"),
        ("run_dir=story.txt/x", 74, "fix: choose a different run_dir"),
    ],
)
def test_a_refused_run_changes_nothing_in_its_folder(command, trained, words, code, said):
    files = [path for path in trained.rglob("*") if path.name != ".lock"]
    before = {path: path.stat().st_mtime_ns for path in files}
    words = words.split() if "run_dir" in words else [f"run_dir={trained}", *words.split()]
    refused = command(*TRAIN, *words)
    assert refused.code == code and said in refused.err
    assert before == {path: path.stat().st_mtime_ns for path in files}


def test_resume_without_a_checkpoint_starts_a_run_with_a_note(command, story):
    Path("begun").mkdir()  # as left by a run that was killed before its first save
    result = command(*TRAIN, "resume=true", "run_dir=begun")
    assert result.code == 0 and result.err.startswith("nothing to resume: begun has no")


@pytest.mark.parametrize(
    "words, told",
    [
        (("resume=true",), "needs the folder of the run. fix: run_dir=runs/NAME"),
        (("resume=true", "run_dir=begun"), "nothing to resume: begun has no"),
        (("resume=true", "run_dir=runs/mispelt"), "runs/mispelt does not exist"),
        (("run_dir=R",), "the folder already contains a run (run_dir=R)"),
        (("run_dir=others",), "the folder contains files but no run (run_dir=others)"),
    ],
)
def test_the_run_folder_is_checked_before_the_text_is_prepared(
    command, story, finished, monkeypatch, words, told
):
    Path("begun").mkdir()
    Path("others").mkdir()
    Path("others/notes.txt").touch()
    shutil.copytree(finished / "runs/text-tiny-gqa", "R")

    def prepare(*_) -> None:
        raise ValueError("the text is prepared. fix: nothing")

    monkeypatch.setattr(setup, "prepare", prepare)
    result = command(*TRAIN, *words)
    assert result.code == 2 and told in result.err.splitlines()[0]


@pytest.mark.parametrize("processes", [1, 2])
def test_resume_refuses_a_missing_folder(tmp_path, story, monkeypatch, processes):
    monkeypatch.chdir(tmp_path)
    words = (*TRAIN[1:], "resume=true", "run_dir=runs/mispelt")
    codes, told = ranks([sys.executable, ROOT / "train.py", *words], processes, tmp_path)
    (line,) = [line for line in told.splitlines() if line.startswith("error: ")]
    assert "run_dir=runs/mispelt" in line
    assert codes == [2] * processes
    assert not Path("runs").exists()


def test_a_run_can_start_from_the_weights_of_another_run(command, trained):
    words = (*TINY[1:], *SHORT, *TEXT[:2], f"init_from={trained}")
    command("train.py", *words).succeeded()
    before, (look, after, *_) = metrics(trained), metrics(f"runs/text-{trained.name}")
    assert look["step"] == 0 and look["val_loss"] == before[-1]["val_loss"]
    # Over 5 seeds, in fp32 and bf16, four steps reduce the loss of a batch by 0.75.
    assert after["train_loss"] < before[0]["train_loss"] - 0.1


@pytest.mark.parametrize("folder", ["run_dir=begun", "name=begun"])
def test_a_run_does_not_depend_on_the_run_it_started_from(command, trained, folder):
    words = (*TINY[1:], *SHORT, *TEXT[:2], f"init_from={trained}", "optimizer.lr=0.001", folder)
    words += ("precision=fp32",)  # in bf16, two evaluations differ by a thousandth
    command("train.py", *words).succeeded()
    shutil.rmtree(trained)
    begun = Path("begun" if folder == "run_dir=begun" else "runs/begun")
    # The new run is evaluated, compared and resumed without the original run.
    last = metrics(begun)[-1]["val_loss"]
    result = command("tools/evaluate.py", "--run", str(begun), "--slices").succeeded()
    assert json.loads(result.out)["val_loss"] == pytest.approx(last, rel=1e-5)
    command("tools/compare/__main__.py", "--report", str(begun)).succeeded()
    again = (*words, f"run_dir={begun}", "resume=true", "steps=6")
    result = command("train.py", *again).succeeded()
    assert "resuming step 4" in result.err and "data.tokenizer" not in result.err
    assert [line["step"] for line in metrics(begun)][-1] == 6


def test_a_run_is_found_by_its_name(command, trained):
    words = (*TINY[1:], *SHORT, *TEXT[:2], "optimizer.lr=0.001", "name=begun")
    name = trained.name
    command("train.py", *words, f"init_from={name}").succeeded()
    for tool in ("tools/evaluate.py", "tools/export_hf.py"):
        more = ("--slices",) if "evaluate" in tool else ("--out", "exported")
        command(tool, "--run", name, *more).succeeded()
    command("tools/compare/__main__.py", "--report", name, "--quick").succeeded()
    # A folder with that name takes precedence.
    shutil.copytree("runs/begun", name)
    assert checkpoint.find_model(name).parts[0] == name


def test_a_run_is_resumed_without_the_run_that_it_started_from(command, trained):
    words = (*TINY[1:], *SHORT, *TEXT[:2], "optimizer.lr=0.001", "run_dir=begun")
    more = [word for word in words if not word.startswith(("context=", "batch_tokens="))]
    more += ["context=32", "batch_tokens=1024", f"init_from={trained}"]
    command("train.py", *more).succeeded()
    shutil.rmtree(trained)
    result = command("train.py", "run_dir=begun", "resume=true", "steps=6")
    assert "changed: steps" in result.succeeded().err and "init_from" not in result.err
    assert metrics("begun")[-1]["step"] == 6


def test_a_task_run_can_start_from_another_task_run(command):
    words = (*TINY[1:], *SHORT, "data=recall", "data.pairs=[4]", "optimizer.lr=0.001")
    command("train.py", *words, "model=tiny", "data.vocab_size=64", "run_dir=first").succeeded()
    # If no context is given, rows have the length of the model's context.
    more = [word for word in words if not word.startswith("context=")]
    more += ["init_from=first", "run_dir=second"]
    command("train.py", *more, "data.vocab_size=64").succeeded()
    config = checkpoint.load_config(checkpoint.find_model("second"))
    assert config["context"] == config["model"]["context"] == config["data"]["context"] == 64
    refused = command("train.py", *more, "data.vocab_size=65", "run_dir=third")
    assert refused.code == 2 and "fix: data.vocab_size=64" in refused.err


@pytest.mark.parametrize("place", ["Trainer.step", "build_parallel"])
def test_running_out_of_memory_is_reported_in_one_line(command, story, monkeypatch, place):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. Much more text")

    monkeypatch.setattr(f"training.trainer.{place}", full)
    result = command(*TRAIN)
    line = result.err.splitlines()[-1]
    assert result.code == 2 and "error: CUDA out of memory. fix: use a smaller micro_batch" in line


def test_a_run_reports_its_limits_and_can_continue_for_more_epochs(command, story):
    words = (*TINY, *TEXT, "batch_tokens=256", "steps=null", "run_dir=run")
    ends = []
    for epochs, resume in ((1, "false"), (1, "true"), (2, "true")):
        result = command("train.py", *words, f"max_epochs={epochs}", f"resume={resume}")
        ends.append(int(checkpoint.newest_checkpoint(Path("run")).name.removeprefix("step-")))
        bounds = f"micro_batch=4\nends after {ends[-1]} steps"
        assert result.code == 0 and bounds in result.err
        assert (", in at most 2.0 passes" in result.err) == (epochs == 2)
    assert ends[0] == ends[1] and ends[2] in (2 * ends[0], 2 * ends[0] + 1)
    assert (
        yaml.safe_load(Path("run/config.yaml").read_text(encoding="utf-8"))["micro_batch"] is None
    )


# It has an auxiliary loss. In bf16 with AMX, products of another batch size round differently, so
# that it may select other keys, which changes the loss by 0.004.
INDEXED = ("attention=dsa", "attention.topk=8", "precision=fp32")
TWO_PROCESSES = [TEXT, ("data=recall", "data.pairs=[2,4]", "data.vocab_size=16"), (*TEXT, *INDEXED)]


@pytest.mark.parametrize("data", TWO_PROCESSES)
def test_training_with_two_processes_matches_one(command, tmp_path, story, data):
    words = (*TINY, "steps=8", *data, "micro_batch=4")
    assert command("train.py", *words, "run_dir=alone").code == 0
    codes, told = ranks([sys.executable, ROOT / "train.py", *words, "run_dir=both"], 2, tmp_path)
    assert codes == [0, 0], told
    # Equal over 5 seeds, in fp32 and, except for the last case with AMX, in bf16.
    assert len(losses("alone")) == 9 and losses("alone") == pytest.approx(losses("both"), abs=1e-3)
    # Evaluations are summed over processes.
    last = [Run.read(tmp_path / name).last for name in ("alone", "both")]
    counts = [{name: part["tokens"] for name, part in run["slices"].items()} for run in last]
    assert counts[0] == counts[1] and sum(counts[0].values()) > 0
    assert last[0].get("recall_accuracy") == last[1].get("recall_accuracy")
    divergences = [[row.get("indexer_kl") for row in metrics(name)] for name in ("alone", "both")]
    assert divergences[0] == pytest.approx(divergences[1], abs=1e-3)
    assert any(divergences[0]) == (data == TWO_PROCESSES[-1])


# Over 5 seeds in bf16, losses differ by at most 0.00002, and norms by at most 0.00007 relatively.
SHARDED = [
    ("optimizer=adamw precision=fp32 micro_batch=2", 1e-5, (0, 4)),
    ("clip=null precision=fp32 micro_batch=4", 1e-5, (2,)),
    (
        "optimizer=adamw optimizer.lr=1e-3 precision=bf16 micro_batch=2 activation_checkpointing=true",
        1e-3,
        (2,),
    ),
]


@pytest.mark.parametrize("more, close, numbers", SHARDED)
def test_a_sharded_run_matches_one_process_and_resumes_with_any_number_of_processes(
    command, tmp_path, story, more, close, numbers
):
    # All ranks run one forward per token of a sample.
    sizes = ("context=16", "batch_tokens=128", "sample_every=2")
    words = (*TINY, *SHORT, *TEXT, *sizes, *more.split())
    assert command("train.py", *words, "run_dir=alone").code == 0
    train = [sys.executable, ROOT / "train.py", *words]
    codes, told = ranks([*train, "run_dir=spread", "sharded=true"], 2, tmp_path)
    assert codes == [0, 0], told
    spread = losses("spread")
    assert losses("alone") == pytest.approx(spread, abs=close)
    norms = [values(name, "grad_norm") for name in ("alone", "spread")]
    assert norms[0] == pytest.approx(norms[1], rel=10 * close)
    second = Path("spread/checkpoints/step-00000002")
    if "precision=fp32" in more:  # one process with these weights samples the same text
        tokenizer = Tokenizer.load(second / "tokenizer.model")
        (text,) = generate_text(
            load_model(second, "cpu"),
            tokenizer,
            "",
            max_new_tokens=15,
            temperature=0.8,
            top_k=50,
            seed=2,
        )
        samples = Path("spread/samples.txt").read_text(encoding="utf-8")
        assert samples.startswith(f"--- step 2\n{text}\n--- step 4\n")
    shutil.rmtree(second.with_name("step-00000004"))
    for processes in numbers:
        again = f"on{processes}"
        shutil.copytree("spread", again)
        resume = (f"run_dir={again}", "resume=true", f"sharded={str(processes > 1).lower()}")
        if processes == 0:
            alone = command("train.py", *words, *resume)
            codes, told = [alone.code], alone.err
        else:
            codes, told = ranks([*train, *resume], processes, tmp_path)
        assert set(codes) == {0} and "resuming step 2" in told, told
        expected = spread if processes == 2 else pytest.approx(spread, abs=close)
        assert losses(again) == expected


SPOILED = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from training.checkpointer import Checkpointer
save = Checkpointer.save
@torch.no_grad()
def spoiled(self, progress):
    if self.env.ranks.rank == 1:
        next(self.trainer.model.parameters()).to_local().fill_(float("inf"))
    save(self, progress)
Checkpointer.save = spoiled
import runpy
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""


def test_infinite_weights_in_one_process_end_all_processes(tmp_path, story):
    (tmp_path / "train.py").write_text(SPOILED, encoding="utf-8")
    start = [sys.executable, *["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]]
    words = (*TRAIN, "save_every=1", "sharded=true", "micro_batch=4")
    how = {"cwd": tmp_path, "capture_output": True, "encoding": "utf-8", "timeout": LONG}
    done = subprocess.run([*start, *words], **how)
    assert (
        "error: training diverged (step 1 made weights or optimizer state non-finite)"
        in done.stderr
    )
    assert done.stderr.count("exitcode  : 4") == 2
    assert not [*tmp_path.glob("runs/*/checkpoints/step-*")]
