"""`train.py` as a user runs it: its output, its files and its exit codes."""

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from data.tokenizer import Tokenizer
from inference.text import generate_text
from run.checkpoint import load_model
from run.distributed import Ranks
from tests.conftest import LONG, ROOT, SHORT, TINY
from tests.run.forks import ranks
from tools.compare.runs import Run
from training import evaluation, setup
from training.rates import ROLES

TEXT = ("data=text", "data.path=story.txt", "data.vocab_size=400")
TRAIN = ("train.py", *TINY, *SHORT, *TEXT)


def metrics(run: Path | str) -> list[dict]:
    return [
        json.loads(line)
        for line in Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def config_of(run: Path | str) -> dict:
    return yaml.safe_load(Path(run, "config.yaml").read_text(encoding="utf-8"))


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
    assert config_of(trained)["model"]["attention"]["kv_heads"] == 2
    assert "--- step 4\n" in (trained / "samples.txt").read_text(encoding="utf-8")


def test_a_run_is_resumed_with_its_saved_settings(command, trained):
    words = ("train.py", f"run_dir={trained}", "resume=true")
    resumed = command(*words, "steps=6", "schedule=cosine").succeeded()
    assert "changed: schedule._target_" in resumed.err
    assert "changed: steps (was 4, now 6)" in resumed.err
    # The second resume keeps what the first one has changed, and trains no step.
    again = command(*words).succeeded()
    assert "changed" not in again.err and f"train.py run_dir={trained} resume=true" in again.err
    config = config_of(trained)
    assert config["schedule"]["_target_"].endswith("cosine")
    assert (config["steps"], config["context"], config["data"]["vocab_size"]) == (6, 64, 400)
    assert metrics(trained)[-1]["step"] == 6


def test_a_changed_text_or_order_of_rows_is_not_resumed(command, trained, story, monkeypatch):
    words = ("train.py", f"run_dir={trained}", "resume=true", "steps=6")
    with monkeypatch.context() as patch:
        patch.setattr("data.corpus.ROW_ORDER", 1)
        assert command(*words).code == 2
    with story.open("a", encoding="utf-8") as text:
        text.write("More.")
    before = (trained / "config.yaml").read_bytes()
    refused = command(*words, *TEXT)
    assert refused.code == 2 and "SHA-256" in refused.err
    assert (trained / "config.yaml").read_bytes() == before
    assert metrics(trained)[-1]["step"] == 4


def test_a_finished_run_is_not_sampled_or_evaluated_again(command, trained, monkeypatch):
    files = [trained / name for name in ("metrics.jsonl", "samples.txt")]
    before = [file.read_bytes() for file in files]
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", None)
        patch.setattr(evaluation, "stream_text", None)
        command("train.py", f"run_dir={trained}", "resume=true").succeeded()
    assert [file.read_bytes() for file in files] == before
    # If the end of a file is missing, even only its newline, it is written again. Without its last
    # five characters, the text of the sample is whole.
    for num_missing in (1, 3, 4, 5, 6):
        for file, content in zip(files, before, strict=True):
            file.write_bytes(content[:-num_missing])
        command("train.py", f"run_dir={trained}", "resume=true").succeeded()
        assert values(trained, "step") == [1, 2, 2, 3, 4, 4]
        assert files[1].read_bytes() == before[1]


def test_an_extended_run_keeps_the_evaluation_at_its_old_end(command, story, monkeypatch):
    monkeypatch.setattr(evaluation, "MIN_EVAL_TOKENS", 32)
    words = ("eval_every=100", "sample_every=100", "run_dir=runs/a", "batch_tokens=128")
    command(*TRAIN, *words).succeeded()
    run = Path("runs/a")
    (old_end,) = (line for line in metrics(run) if "val_loss" in line)
    samples = (run / "samples.txt").read_text(encoding="utf-8")
    assert old_end["eval_tokens"] == 4 * 128 // 10  # a run of 8 steps would evaluate more tokens
    extended = command("train.py", "run_dir=runs/a", "resume=true", "steps=8").succeeded()
    # The rate is near its end before, and near its peak afterwards, as the metrics also say.
    rates = {line["step"]: line["lr"] for line in metrics(run) if "lr" in line}
    assert f"by a factor of {rates[5] / rates[4]:.2g}" in extended.err
    kept, new_end = (line for line in metrics(run) if "val_loss" in line)
    assert kept["step"] == 4 and new_end["step"] == 8
    assert kept["val_loss"] == old_end["val_loss"]
    assert kept["eval_tokens"] == new_end["eval_tokens"] == old_end["eval_tokens"]
    assert (run / "samples.txt").read_text(encoding="utf-8").startswith(samples)


def test_a_profile_is_written_and_its_largest_entries_are_shown(command, story):
    words = ("steps=5", "profile=1", "run_dir=runs/a", "model.depth=1", "batch_tokens=64")
    result = command(*TRAIN, *words).succeeded()
    trace = gzip.decompress(Path("runs/a/trace.json.gz").read_bytes())
    events = json.loads(trace)["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#3"}
    assert "Self CPU %" in result.err


@pytest.mark.parametrize(
    ("words", "named"),
    [("resume=true run_dir=runs/mispelt", "runs/mispelt"), ("run_dir=R", "run_dir=R")],
)
def test_the_run_folder_is_checked_before_the_text_is_prepared(
    command, story, finished, monkeypatch, words, named
):
    shutil.copytree(finished / "runs/text-tiny-gqa", "R")
    monkeypatch.setattr(setup, "prepare", None)
    result = command(*TRAIN, *words.split())
    assert result.code == 2 and named in result.err.splitlines()[0]
    assert config_of("R") == config_of(finished / "runs/text-tiny-gqa")


def test_two_processes_report_an_error_once(tmp_path, story, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (*TRAIN[1:], "resume=true", "run_dir=runs/mispelt")
    codes, messages = ranks([sys.executable, ROOT / "train.py", *words], 2, tmp_path)
    (line,) = [line for line in messages.splitlines() if line.startswith("error: ")]
    assert "run_dir=runs/mispelt" in line
    assert codes == [2, 2]
    assert not Path("runs").exists()


def test_a_run_starts_from_another_run_and_does_not_depend_on_it(command, trained):
    # In bf16, two evaluations differ by a thousandth.
    words = (*TINY[1:], *SHORT, *TEXT[:2], "precision=fp32", "optimizer.lr=0.005")
    command("train.py", *words, f"init_from={trained.name}", "run_dir=begun").succeeded()
    before = metrics(trained)
    look, after, *_, last = metrics("begun")
    assert look["step"] == 0 and look["val_loss"] == pytest.approx(before[-1]["val_loss"], abs=0.01)
    # Over 5 seeds, in fp32 and bf16, four steps reduce the loss of a batch by 0.75.
    assert after["train_loss"] < before[0]["train_loss"] - 0.1
    assert {after[key] for key in ROLES.values()} == {after["lr"]}  # not scaled to the size
    # The new run is evaluated and resumed without the original run.
    shutil.rmtree(trained)
    result = command("tools/evaluate.py", "--run", "begun", "--slices").succeeded()
    assert json.loads(result.out)["val_loss"] == pytest.approx(last["val_loss"], rel=1e-5)
    command("train.py", "run_dir=begun", "resume=true", "steps=6").succeeded()
    assert metrics("begun")[-1]["step"] == 6


def test_a_run_can_start_with_a_different_context(command, trained):
    words = (f"init_from={trained}", "data=recall", "data.pairs=[2,4]", "device=cpu")
    for more, context in ((), 64), (("context=32",), 32):
        settings, start, _ = setup.read_settings([*words, *more])
        assert settings.context == settings.model["context"] == settings.data["context"] == context
        assert start.pretrained == trained / "checkpoints/step-00000004"


def test_running_out_of_memory_is_reported_in_one_line(command, story, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. Much more text")

    monkeypatch.setattr("training.trainer.build_parallel", full)
    result = command(*TRAIN)
    line = result.err.splitlines()[-1]
    assert result.code == 2 and line.startswith("error: ") and "micro_batch" in line


# It has an auxiliary loss. In bf16 with AMX, products of another batch size round differently, so
# that it may select other keys, which changes the loss by 0.004.
INDEXED = (*TEXT, "attention=dsa", "attention.topk=8", "precision=fp32")
RECALL = ("data=recall", "data.pairs=[2,4]", "data.vocab_size=16")


@pytest.mark.parametrize("data", [INDEXED, RECALL], ids=["text", "recall"])
def test_training_with_two_processes_matches_one(command, tmp_path, story, data):
    words = (*TINY, "steps=8", *data, "micro_batch=4")
    assert command("train.py", *words, "run_dir=alone").code == 0
    codes, messages = ranks(
        [sys.executable, ROOT / "train.py", *words, "run_dir=both"], 2, tmp_path
    )
    assert codes == [0, 0], messages
    # Equal over 5 seeds, in fp32 and, except for the first case with AMX, in bf16.
    assert len(losses("alone")) == 9 and losses("alone") == pytest.approx(losses("both"), abs=1e-3)
    # Evaluations are summed over processes.
    last = [Run.read(tmp_path / name).last for name in ("alone", "both")]
    counts = [{name: part["tokens"] for name, part in run["slices"].items()} for run in last]
    assert counts[0] == counts[1] and sum(counts[0].values()) > 0
    assert last[0].get("recall_accuracy") == last[1].get("recall_accuracy")
    divergences = [[row.get("indexer_kl") for row in metrics(name)] for name in ("alone", "both")]
    assert divergences[0] == pytest.approx(divergences[1], abs=1e-3)
    assert any(divergences[0]) == (data == INDEXED)


def test_processes_draw_different_dropout(run_of, monkeypatch):
    seeds = []
    for rank in (0, 1):
        run = run_of("attention.dropout=0.5", "optimizer=adamw")
        run.trainer.ranks = Ranks(rank, 2, torch.device("cpu"))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "manual_seed", seeds.append)
            run.trainer.compute_gradients(0, 4)
    assert seeds[0] != seeds[1]


# A run that is resumed on as many processes as before continues bit for bit.
SHARDED = [
    ("precision=fp32 optimizer=adamw micro_batch=2 activation_checkpointing=true", 1, 1e-5),
    ("precision=fp32 clip=null micro_batch=4", 2, 0),
    pytest.param("precision=fp32 optimizer=adamw micro_batch=2", 4, 1e-5, marks=pytest.mark.long),
    # Over 5 seeds, losses in bf16 differ by at most 0.00002.
    ("precision=bf16 optimizer=adamw optimizer.lr=1e-3 micro_batch=2", 2, 0),
]


@pytest.mark.parametrize("more, num_resumed, tolerance", SHARDED)
def test_a_sharded_run_matches_one_process_and_resumes_with_any_number_of_processes(
    command, tmp_path, story, more, num_resumed, tolerance
):
    # All ranks run one forward per token of a sample.
    sizes = ("context=16", "batch_tokens=128")
    words = (*TINY, *SHORT, *TEXT, *sizes, *more.split())
    command("train.py", *words, "run_dir=alone").succeeded()
    train = [sys.executable, ROOT / "train.py", *words, "run_dir=spread"]
    codes, messages = ranks([*train, "sharded=true"], 2, tmp_path)
    assert codes == [0, 0], messages
    expected = losses("spread")
    difference = 1e-5 if "fp32" in more else 1e-3
    assert losses("alone") == pytest.approx(expected, abs=difference)
    norms = [values(name, "grad_norm") for name in ("alone", "spread")]
    assert norms[0] == pytest.approx(norms[1], rel=10 * difference)
    last = Path("spread/checkpoints/step-00000004")
    if "fp32" in more:  # one process with these weights samples the same text
        tokenizer = Tokenizer.load(last / "tokenizer.model")
        how = {"max_new_tokens": 15, "temperature": 0.8, "top_k": 50, "seed": 4}
        (text,) = generate_text(load_model(last, "cpu"), tokenizer, "", **how)
        samples = Path("spread/samples.txt").read_text(encoding="utf-8")
        assert samples == f"--- step 4\n{text}\n---\n"
    # Resume from step 2.
    shutil.rmtree(last)
    resume = ("resume=true", f"sharded={str(num_resumed > 1).lower()}")
    codes, messages = ranks([*train, *resume], num_resumed, tmp_path)
    assert codes == [0] * num_resumed and "resuming from step 2" in messages, messages
    assert losses("spread") == pytest.approx(expected, abs=tolerance, rel=0)


SPOILED = f"""import runpy
import torch
from training.checkpointer import Checkpointer
save = Checkpointer.save
@torch.no_grad()
def spoiled(self, progress):
    if self.env.ranks.rank == 1:
        next(self.trainer.model.parameters()).to_local().fill_(float("inf"))
    save(self, progress)
Checkpointer.save = spoiled
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""


def test_infinite_weights_in_one_process_end_all_processes(tmp_path, story, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("spoiled.py").write_text(SPOILED, encoding="utf-8")
    words = (*TRAIN[1:], "save_every=1", "sharded=true", "micro_batch=4")
    codes, messages = ranks([sys.executable, tmp_path / "spoiled.py", *words], 2, tmp_path)
    assert codes == [4, 4], messages
    assert not [*tmp_path.glob("runs/*/checkpoints/step-*")]


@pytest.mark.long
def test_torchrun_trains_with_two_processes(tmp_path, story):
    start = [sys.executable, *["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]]
    words = [ROOT / "train.py", *TRAIN[1:], "micro_batch=4", "run_dir=run"]
    subprocess.run([*start, *words], cwd=tmp_path, timeout=LONG, check=True)
    assert metrics(tmp_path / "run")[-1]["step"] == 4
