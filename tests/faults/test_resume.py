"""A resumed run matches an uninterrupted run bit for bit, or reports changed settings."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from model.build import build_model
from run import checkpoint, folder
from run.signals import Signals
from tests.conftest import LONG, ROOT, TINY, settings_of, tree_of
from tests.faults.harness import forked
from training import checkpointer, evaluation, optimizers, setup, trainer
from training.budget import TimeBudget


def one_step_only() -> None:
    """Act as if a signal arrived in the first step of every process."""

    Signals.is_armed = property(
        lambda _: True, lambda self, value: setattr(self, "received", 75 * value)
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("micro_batch=1",),
        ("optimizer=adamw", "eval_every=100"),
        ("save_every=100",),
        (
            "activation_checkpointing=true",
            "z_loss=0.1",
            "attention=value_residual",
            "model.dim=64",
            "model.heads=4",
        ),
    ],
)
def test_a_run_interrupted_after_every_step_equals_an_uninterrupted_run(
    job, precision, words, monkeypatch
):
    cast = trainer.hardware.autocast
    monkeypatch.setattr(
        trainer.hardware,
        "autocast",
        lambda device, _: cast(device, getattr(trainer.torch, precision)),
    )
    job.fresh()
    assert forked(job.with_words(*words)) == 0
    expected = job.curve()
    job.fresh()
    codes = [forked(job.with_words(*words), one_step_only) for _ in range(4)]
    assert codes == [75] * 4 and forked(job.with_words(*words)) == 0
    assert job.curve() == expected


@pytest.mark.parametrize("broken", ["optimizer", "reported_step", "log", "reseeded"])
def test_interrupted_runs_differ_if_any_state_is_not_restored(job, whole, broken):
    def forget() -> None:
        one_step_only()
        restore = checkpointer.Checkpointer.restore

        def restore_without(self, saved, progress):
            restore(self, saved, progress)
            if broken == "reported_step":
                self.meter.reported_step = progress.step
            if broken == "log":
                self.log.open()
            if broken == "reseeded":
                self.trainer.loader.seed += progress.step

        checkpointer.Checkpointer.restore = restore_without
        if broken == "optimizer":
            checkpointer.load_optimizer_state = lambda *_: None

    job.fresh()
    for _ in range(4):
        forked(job, forget)
    assert forked(job, forget) == 0
    assert job.curve() != whole.curve()


def killed_in_step(number: int) -> None:
    """Send SIGKILL after computing the gradients of this step."""
    compute = trainer.Trainer.compute_gradients

    def kill(self, step, micro_batch_size):
        losses = compute(self, step, micro_batch_size)
        if step + 1 == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return losses

    trainer.Trainer.compute_gradients = kill


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_run(job, optimizer):
    words = (f"optimizer={optimizer}", "steps=24", "save_every=8")
    job.fresh()
    assert forked(job.with_words(*words)) == 0
    expected = job.curve()
    job.fresh()
    assert forked(job.with_words(*words), lambda: killed_in_step(11)) == -signal.SIGKILL
    assert [path.name for path in job.checkpoints] == ["step-00000008"]
    assert forked(job.with_words(*words)) == 0
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


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "sgd"])
def test_a_diverged_run_resumes_from_its_last_checkpoint(job, optimizer, monkeypatch, capfd):
    def sgd(model, *, lr: float, momentum: float):
        return [torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)]

    sgd.__module__ = "training.optimizers"
    monkeypatch.setattr(optimizers, "sgd", sgd, raising=False)
    words = (f"optimizer={optimizer}", "steps=6", "save_every=2")
    if optimizer == "sgd":
        spare = ("~optimizer.betas", "~optimizer.reference", "~optimizer.weight_decay")
        words = ("optimizer._target_=training.optimizers.sgd", *spare, *words[1:])
    job.fresh()
    assert forked(job.with_words(*words)) == 0
    expected = job.curve()
    job.fresh()
    assert forked(job.with_words(*words), lambda: spoiled_in_step(3)) == 4
    assert "training diverged (by step 3)" in capfd.readouterr().err
    assert [path.name for path in job.checkpoints] == ["step-00000002"]
    assert forked(job.with_words(*words)) == 0
    assert job.curve() == expected


def test_resume_keeps_the_fitted_number_of_steps(job, monkeypatch):
    monkeypatch.setattr(TimeBudget, "estimate", lambda self, progress: (4, True))
    job.fresh()
    assert forked(job.with_words("steps=100", "max_minutes=1"), one_step_only) == 75
    monkeypatch.setattr(TimeBudget, "estimate", lambda self, progress: (7, True))
    assert forked(job.with_words("steps=100", "max_minutes=1")) == 0
    assert job.checkpoints[-1].name == "step-00000004"


def test_a_time_limit_that_is_set_after_an_exact_number_of_steps_is_obeyed(job, monkeypatch):
    monkeypatch.setattr(TimeBudget, "estimate", lambda self, progress: (6, True))
    job.fresh()
    assert forked(job.with_words("steps=100", "max_minutes=1"), one_step_only) == 75
    assert forked(job.with_words("steps=50", "max_minutes=null"), one_step_only) == 75
    assert forked(job.with_words("steps=50", "max_minutes=1")) == 0
    assert job.checkpoints[-1].name == "step-00000006"


def compiled_to_other_bits() -> None:
    """Simulate a compilation that slightly changes the results."""

    def compile_model(loss_module, *_):
        loss_module.register_forward_hook(
            lambda _, batch, results: (
                1.001 * results[0],
                {name: 1.001 * values for name, values in results[1].items()},
            )
        )

    trainer.compile_model = compile_model


def test_a_resumed_run_is_compiled_if_its_first_process_was(job, monkeypatch):
    monkeypatch.setattr(setup.compilation, "missing_for_compilation", lambda device: None)
    words = ("compile=auto", "steps=6", "eval_every=3")
    curves = []
    for is_long in (True, False):
        is_long_run = lambda steps, minutes, is_long=is_long: is_long  # noqa: E731
        monkeypatch.setattr(setup.compilation, "is_long_run", is_long_run)
        job.fresh()
        assert forked(job.with_words(*words), compiled_to_other_bits) == 0
        curves.append(job.curve())
        job.fresh()
        assert forked(job.with_words(*words), compiled_to_other_bits, one_step_only) == 75
        # Later processes must not apply this rule again; here it would give the opposite answer.
        monkeypatch.setattr(
            setup.compilation, "is_long_run", lambda *_, is_long=is_long: not is_long
        )
        assert forked(job.with_words(*words), compiled_to_other_bits, one_step_only) == 75
        assert forked(job.with_words(*words), compiled_to_other_bits) == 0
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

    job.fresh()
    assert forked(job, killed_at_the_end) == -signal.SIGKILL
    assert forked(job, without_steps) == 0
    assert job.curve() == whole.curve()
    assert forked(job, without_steps) == 0  # resume again, with nothing left to do
    assert job.curve() == whole.curve()


def test_evaluation_sampling_and_logging_do_not_change_training(job, whole):
    job.fresh()
    assert (
        forked(job.with_words("eval_every=1", "sample_every=3", "log_every=1", "save_every=4")) == 0
    )
    assert job.curve()[-1] == whole.curve()[-1]


BEGAN = ("model=tiny", "attention=mqa", "optimizer=adamw", "optimizer.lr=0.01", "seed=3")


@pytest.mark.parametrize(
    ("typed", "changed"),
    [
        ("", []),
        (" ".join(BEGAN), []),
        ("steps=9 max_minutes=7", ["steps", "max_minutes"]),
        ("optimizer.lr=0.02", ["optimizer.lr"]),
        ("optimizer=adamw", ["optimizer.lr"]),
        (
            "schedule=cosine",
            ["schedule._target_", "schedule.warmup", "schedule.cooldown", "schedule.floor"],
        ),
        ("precision=fp32 micro_batch=1 sharded=true", ["precision", "micro_batch", "sharded"]),
        ("eval_every=9 clip=null wandb=offline", ["eval_every", "clip", "wandb"]),
        ("attention.kv_heads=1 data.vocab_size=4096 context=256", []),
        ("run_dir=elsewhere resume=true", []),
    ],
)
def test_a_resumed_run_has_its_saved_settings_and_the_changes_of_a_table(typed, changed):
    saved = settings_of(*BEGAN).model_dump()
    settings, told = folder.resume_settings(typed.split(), saved, Path("run"))
    now = settings.model_dump()
    assert sorted(line.partition(" ")[0] for line in told) == sorted(changed)
    assert (now.pop("run_dir"), now.pop("resume")) == ("run", True)
    for key, value in folder.by_name(now).items():
        expected = settings_of(*(typed.split() if key in changed else BEGAN))
        assert value == folder.by_name(expected.model_dump())[key], key
    assert ("schedule.cooldown" in folder.by_name(now)) == (typed != "schedule=cosine")


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("seed=0", "seed"),
        ("context=128", "context"),
        ("batch_tokens=512", "batch_tokens"),
        ("document_mask=true", "document_mask"),
        ("z_loss=0.1", "z_loss"),
        ("model=small", "model.dim"),
        ("model.tied=true", "model.tied"),
        ("attention=gqa", "attention.kv_heads"),
        ("attention.kv_heads=2", "attention.kv_heads"),
        ("ffn=gelu", "ffn._target_"),
        ("data=recall", "data._target_"),
        ("data.vocab_size=512", "data.vocab_size"),
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
    with pytest.raises(ValueError, match=r"another version .*ema, wandb.*init_from=run"):
        folder.resume_settings([], saved, Path("run"))


def test_the_rates_of_a_run_without_a_reference_can_be_changed():
    saved = settings_of(*BEGAN, "optimizer.reference=null").model_dump()
    settings, _ = folder.resume_settings(["optimizer=adamw"], saved, Path("run"))
    assert settings.optimizer == settings_of("optimizer=adamw").optimizer
    # The rates of a run from pretrained weights stay unscaled.
    saved |= {"init_from": "runs/first"}
    settings, told = folder.resume_settings(["optimizer=adamw"], saved, Path("run"))
    assert settings.optimizer["reference"] is None and "optimizer.lr" in told[0]
    # The run that it started from may be gone, and its name no longer a path.
    assert folder.resume_settings(["init_from=first"], saved, Path("run"))[1] == []


def test_a_text_that_was_moved_can_be_given():
    saved = settings_of(*BEGAN, "data=text", "data.path=here.txt").model_dump()
    typed = ["data=text", "data.path=there.txt"]
    settings, told = folder.resume_settings(typed, saved, Path("run"))
    assert settings.data["path"] == "there.txt" and len(told) == 1


def test_a_refused_change_leaves_the_run_as_it_is(job, capfd):
    job.fresh()
    assert forked(job.with_words("steps=2")) == 0
    assert forked(job.with_words("seed=1")) == 2
    assert "seed (was 0, now 1)" in capfd.readouterr().err
    assert forked(job.with_words("optimizer.lr=0.001")) == 0
    assert "optimizer.lr (was 0.035, now 0.001)" in capfd.readouterr().err


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
    def run(folder: str, seconds: float | None) -> int:
        (tmp_path / folder).mkdir(exist_ok=True)
        words = (
            "data=text",
            f"data.path={story}",
            "data.vocab_size=400",
            f"run_dir={folder}",
            "resume=true",
        )
        words = (
            *TINY,
            *words,
            "compile=true",
            "steps=40",
            "save_every=10",
            "attention.dropout=0.1",
        )
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *words], cwd=tmp_path, env=os.environ
        )
        metrics = tmp_path / folder / "metrics.jsonl"
        while seconds is not None and not (
            metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") > seconds
        ):
            time.sleep(0.01)
        if seconds is not None:
            process.send_signal(signal.SIGTERM)
        return process.wait(timeout=LONG)

    def curve(folder: str) -> list:
        lines = map(
            json.loads,
            (tmp_path / folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(),
        )
        return [
            (line["step"], line.get("train_loss"), line.get("grad_norm"), line.get("val_loss"))
            for line in lines
        ]

    assert run("whole", None) == 0
    assert [run("cut", 7), run("cut", 19), run("cut", None)] == [75, 75, 0]
    assert curve("cut") == curve("whole")
