"""A resumed run matches an uninterrupted run bit for bit, or reports changed settings."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from model.build import build_model
from run import checkpoint, folder
from run.signals import Signals
from tests.conftest import LONG, ROOT, TINY, settings_of, tree_of
from tests.faults.harness import count_lines, forked, wait_for
from training import evaluation, setup, trainer
from training.budget import TimeBudget


def one_step_only() -> None:
    """Act as if a signal arrived in the first step of every process."""

    Signals.is_armed = property(
        lambda _: True, lambda self, value: setattr(self, "received", 75 * value)
    )


@pytest.mark.parametrize(
    "words",
    [
        "precision=fp32 micro_batch=1",
        "precision=fp32 optimizer=adamw eval_every=100",
        "precision=bf16 attention=value_residual activation_checkpointing=true z_loss=0.1",
    ],
)
def test_a_run_interrupted_after_every_step_equals_an_uninterrupted_run(job, words):
    train = job.with_words(*words.split())
    assert forked(train) == 0
    expected = job.curve()
    job.fresh()
    assert [forked(train, one_step_only) for _ in range(4)] == [75] * 4
    assert forked(train) == 0
    assert job.curve() == expected


def spoiled_in_step(number: int) -> None:
    """Make the loss of this step NaN."""
    accumulate = trainer.Trainer.accumulate

    def spoil(self, step, rows, *, is_last):
        losses = accumulate(self, step, rows, is_last=is_last)
        if step + 1 == number:
            losses.fill_(float("nan"))
            next(self.model.parameters()).grad.fill_(float("nan"))
        return losses

    trainer.Trainer.accumulate = spoil


def test_a_run_that_ends_between_two_saves_equals_an_uninterrupted_run(job, capfd):
    """Step 4 is in its metrics but not in a checkpoint."""
    train = job.with_words("steps=6", "save_every=3")
    assert forked(train) == 0
    expected = job.curve()
    job.fresh()
    assert forked(train, lambda: spoiled_in_step(5)) == 4
    assert "step 6" in capfd.readouterr().err
    assert [path.name for path in job.checkpoints] == ["step-00000003"]
    assert forked(train) == 0
    assert job.curve() == expected


def test_resume_keeps_the_fitted_number_of_steps(job, monkeypatch):
    train = job.with_words("steps=100", "max_minutes=1")
    monkeypatch.setattr(TimeBudget, "estimate", lambda self, progress: (4, True))
    assert forked(train, one_step_only) == 75
    monkeypatch.setattr(TimeBudget, "estimate", lambda self, progress: (7, True))
    assert forked(train) == 0
    assert job.checkpoints[-1].name == "step-00000004"


def test_a_time_limit_that_is_set_after_an_exact_number_of_steps_is_obeyed(job, monkeypatch):
    monkeypatch.setattr(TimeBudget, "estimate", lambda self, progress: (6, True))
    assert forked(job.with_words("steps=100", "max_minutes=1"), one_step_only) == 75
    assert forked(job.with_words("steps=50", "max_minutes=null"), one_step_only) == 75
    assert forked(job.with_words("steps=50", "max_minutes=1")) == 0
    assert job.checkpoints[-1].name == "step-00000006"


def compiled_to_other_bits() -> None:
    """Simulate a compilation that slightly changes the results."""

    def change(_, batch: tuple, results: tuple) -> tuple:
        objective, metrics = results
        return 1.001 * objective, {name: 1.001 * values for name, values in metrics.items()}

    def compile_model(loss_module: torch.nn.Module, *_) -> None:
        loss_module.register_forward_hook(change)

    trainer.compile_model = compile_model


def test_a_resumed_run_is_compiled_if_its_first_process_was(job, monkeypatch):
    monkeypatch.setattr(setup.compilation, "missing_for_compilation", lambda device: None)
    train = job.with_words("compile=auto", "steps=4", "eval_every=3")
    curves = []
    for is_long in (True, False):
        monkeypatch.setattr(setup.compilation, "is_long_run", Mock(return_value=is_long))
        job.fresh()
        assert forked(train, compiled_to_other_bits) == 0
        curves.append(job.curve())
        job.fresh()
        assert forked(train, compiled_to_other_bits, one_step_only) == 75
        # The second process must not decide again; here it would decide otherwise.
        monkeypatch.setattr(setup.compilation, "is_long_run", Mock(return_value=not is_long))
        assert forked(train, compiled_to_other_bits) == 0
        assert job.curve() == curves[-1]
    assert curves[0] != curves[1]


@pytest.mark.parametrize("cut", ["stream_text", "evaluate"])
def test_a_run_killed_after_its_last_save_resumes_without_training(job, whole, cut):
    def killed_at_the_end() -> None:
        function = getattr(evaluation, cut)

        def kill(*arguments, **options):
            if (job.root / "run" / "checkpoints" / "step-00000004").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        setattr(evaluation, cut, kill)

    def without_steps() -> None:
        trainer.Trainer.step = None

    assert forked(job, killed_at_the_end) == -signal.SIGKILL
    assert forked(job, without_steps) == 0
    assert job.curve() == whole.curve()
    assert forked(job, without_steps) == 0  # resume again, with nothing left to do
    assert job.curve() == whole.curve()


def test_evaluation_sampling_and_logging_do_not_change_training(job, whole):
    often = ("eval_every=1", "sample_every=3", "log_every=1", "save_every=4")
    assert forked(job.with_words(*often)) == 0
    assert job.curve()[-1] == whole.curve()[-1]


BEGAN = ("model=tiny", "attention=mqa", "optimizer=adamw", "optimizer.lr=0.01", "seed=3")


@pytest.mark.parametrize(
    ("typed", "changed"),
    [
        ("", ""),
        ("optimizer=adamw", "optimizer.lr"),
        ("schedule=cosine", "schedule._target_ schedule.cooldown schedule.floor schedule.warmup"),
        ("steps=9 precision=fp32 clip=null", "clip precision steps"),
        ("attention.kv_heads=1 context=256 run_dir=elsewhere resume=true", ""),
    ],
)
def test_a_resumed_run_has_its_saved_settings_and_the_allowed_changes(typed, changed):
    saved = settings_of(*BEGAN).model_dump()
    settings, messages = folder.resume_settings(typed.split(), saved, Path("run"))
    assert sorted(line.partition(" ")[0] for line in messages) == changed.split()
    assert (settings.run_dir, settings.resume) == ("run", True)
    now = folder.by_name(settings.model_dump() | {"run_dir": None, "resume": False})
    then = folder.by_name(saved)
    new = folder.by_name(settings_of(*typed.split()).model_dump())
    for key in changed.split():
        then.pop(key, None)
        if key in new:
            then[key] = new[key]
    assert now == then


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("seed=0", "seed"),
        ("batch_tokens=512", "batch_tokens"),
        ("attention.kv_heads=2", "attention.kv_heads"),
        ("data=recall", "data._target_"),
        ("optimizer=muon", "optimizer._target_"),
        ("init_from=other", "init_from"),
        ("experiment=tinystories", "data._target_"),
    ],
)
def test_a_resumed_run_refuses_any_other_change(typed, key):
    saved = settings_of(*BEGAN).model_dump()
    with pytest.raises(ValueError, match=rf"\b{re.escape(key)} \(was .*init_from=run"):
        folder.resume_settings(typed.split(), saved, Path("run"))


def test_a_run_of_another_version_is_refused_by_its_keys():
    saved = settings_of(*BEGAN).model_dump() | {"ema": 0.9}
    del saved["wandb"]
    with pytest.raises(ValueError, match=r"ema, wandb.*init_from=run"):
        folder.resume_settings([], saved, Path("run"))


def test_the_rates_of_a_run_from_pretrained_weights_stay_unscaled():
    saved = settings_of(*BEGAN, "optimizer.reference=null").model_dump()
    saved |= {"init_from": "runs/first"}
    settings, messages = folder.resume_settings(["optimizer=adamw"], saved, Path("run"))
    assert settings.optimizer["reference"] is None and "optimizer.lr" in messages[0]
    # The run that it started from may be gone, and its name no longer a path.
    assert folder.resume_settings(["init_from=first"], saved, Path("run"))[1] == []


def test_a_text_that_was_moved_can_be_given():
    saved = settings_of(*BEGAN, "data=text", "data.path=here.txt").model_dump()
    for typed in (["data=text", "data.path=there.txt"], ["data.path=there.txt"]):
        settings, messages = folder.resume_settings(typed, saved, Path("run"))
        assert settings.data["path"] == "there.txt" and len(messages) == 1


LOADING = """
import re, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from model.build import build_model
from run.checkpoint import load_model
from run import checkpoint, folder
torch.set_num_threads(1)
tree = checkpoint.load_config(Path(sys.argv[2]))["model"]
build_model(tree, "meta")  # all that is imported on the way
memory = lambda kind: int(re.search(kind + ".*?([0-9]+)", Path("/proc/self/status").read_text())[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = memory("VmRSS")
model = load_model(Path(sys.argv[2]), "cpu")
print((memory("VmHWM") - before) / sum(p.nbytes for p in model.parameters()))
"""


def test_loading_takes_little_more_memory_than_the_weights(tmp_path, tokenizer):
    sizes = ("model.dim=384", "model.depth=12", "model.heads=8", "model.hidden=1536")
    tree = tree_of("gqa", *sizes)
    weights = build_model(tree).state_dict()
    state = {"optimizer": weights}  # not needed by inference
    path = checkpoint.save(tmp_path, 1, weights, {"model": tree}, tokenizer.files, state)
    command = [sys.executable, "-c", LOADING, str(ROOT), str(path)]
    share = float(subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout)
    assert 0.9 < share < 1.2


@pytest.mark.long
def test_a_compiled_run_resumes_bit_for_bit(tmp_path, story):
    data = ("data=text", f"data.path={story}", "data.vocab_size=400")
    words = ("resume=true", "compile=true", "steps=40", "save_every=10", "attention.dropout=0.1")

    def run(folder: str, ended_after: int | None = None) -> int:
        """Train, and send SIGTERM after a number of lines of metrics; return the exit code."""
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [sys.executable, str(ROOT / "train.py"), *TINY, *data, *words]
        process = subprocess.Popen([*command, f"run_dir={folder}"], cwd=tmp_path)
        metrics = tmp_path / folder / "metrics.jsonl"
        if ended_after is not None:
            wait_for(lambda: count_lines(metrics) > ended_after)
            process.send_signal(signal.SIGTERM)
        return process.wait(timeout=LONG)

    def curve(folder: str) -> list:
        keys = ("step", "train_loss", "grad_norm", "val_loss")
        lines = (tmp_path / folder / "metrics.jsonl").read_text("utf-8").splitlines()
        return [[json.loads(line).get(key) for key in keys] for line in lines]

    assert run("whole") == 0
    assert [run("cut", 7), run("cut", 19), run("cut")] == [75, 75, 0]
    assert curve("cut") == curve("whole")
