"""A resumed run matches an uninterrupted run bit for bit, or reports changed settings."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from model.build import build_model
from run import checkpoint
from run.signals import Signals
from tests.conftest import LONG, ROOT, TINY, tree_of
from tests.faults.harness import forked
from training import budget, checkpointer, evaluation, optimizers, setup, trainer
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
                self.log.open({})
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
    monkeypatch.setattr(budget, "EVALUATION_COST", 0.0)
    monkeypatch.setattr(TimeBudget, "count_steps", lambda self, step: (3, True))
    job.fresh()
    assert forked(job.with_words("steps=100", "max_minutes=1"), one_step_only) == 75
    monkeypatch.setattr(TimeBudget, "count_steps", lambda self, step: (6, True))
    assert forked(job.with_words("steps=100", "max_minutes=1")) == 0
    assert job.checkpoints[-1].name == "step-00000004"


def test_a_fitted_run_without_its_time_limit_keeps_its_steps_after_every_resume(job, monkeypatch):
    monkeypatch.setattr(budget, "EVALUATION_COST", 0.0)
    monkeypatch.setattr(TimeBudget, "count_steps", lambda self, step: (3, True))
    job.fresh()
    words = ("steps=null", "max_epochs=1")
    assert forked(job.with_words(*words, "max_minutes=1"), one_step_only) == 75
    for _ in range(2):
        assert forked(job.with_words(*words, "max_minutes=null"), one_step_only) == 75
    assert forked(job.with_words(*words, "max_minutes=null")) == 0
    assert job.checkpoints[-1].name == "step-00000004"


def test_a_time_limit_that_is_set_after_an_exact_number_of_steps_is_obeyed(job, monkeypatch):
    monkeypatch.setattr(budget, "EVALUATION_COST", 0.0)
    monkeypatch.setattr(TimeBudget, "count_steps", lambda self, progress: (6 - progress.step, True))
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


FIXED = {
    "seed": 1,
    "context": 32,
    "batch_tokens": 128,
    "document_mask": True,
    "text": "b",
    "model": {"dim": 2},
}
FREE = {
    "steps": 9,
    "eval_every": 9,
    "clip": None,
    "schedule": {"warmup": 9},
    "precision": "fp32",
    "micro_batch": 9,
}
THEN = {
    "seed": 0,
    "context": 16,
    "batch_tokens": 64,
    "document_mask": False,
    "text": "a",
    "model": {"dim": 1},
    "steps": 1,
    "eval_every": 1,
    "clip": 1.0,
    "schedule": {"warmup": 1},
    "precision": "bf16",
    "micro_batch": 1,
    "machine": {"threads": 1},
    "resume": False,
    "name": "a",
}


@pytest.mark.parametrize("key", [*FIXED, *FREE])
def test_resume_reports_allowed_changes_and_refuses_others(key):
    now = THEN | {key: (FIXED | FREE)[key]}
    if key in FIXED:
        with pytest.raises(ValueError, match=rf"{key}[.a-z]* \(was .*, now .*\)\. fix: "):
            checkpointer.check_resumed(THEN, now, Path("step-00000001"))
    else:
        assert f"changed since step-00000001: {key}" in checkpointer.check_resumed(
            THEN, now, Path("step-00000001")
        )


def test_resume_refuses_a_run_with_a_different_row_order():
    now = THEN | {"row_order": 2}  # a run of the first version has no such key
    with pytest.raises(ValueError, match="00001 was saved by a version that reads the rows"):
        checkpointer.check_resumed(THEN, now, Path("run/checkpoints/step-00000001"))


@pytest.mark.parametrize("change", [{"row_order": 2}, {"seed": 1}])
def test_the_override_for_a_new_run_can_be_pasted_if_the_path_has_a_space(change):
    with pytest.raises(ValueError, match="init_from=") as refused:
        checkpointer.check_resumed(THEN, THEN | change, Path("my run/checkpoints/step-00000001"))
    pasted = str(refused.value).rpartition(" and add ")[2]
    assert shlex.split(pasted) == ["init_from=my run"]


@pytest.mark.parametrize(
    ("model", "can_start"), [({"dim": 1, "context": 32}, True), ({"dim": 2}, False)]
)
def test_a_refused_resume_suggests_weights_only_for_the_same_architecture(model, can_start):
    with pytest.raises(ValueError, match="start a new run") as refused:
        checkpointer.check_resumed(
            THEN, THEN | {"model": model}, Path("r/checkpoints/step-00000001")
        )
    assert ("add init_from=r" in str(refused.value)) == can_start


def test_resume_reports_a_change_of_machine():
    said = checkpointer.check_resumed(
        THEN, THEN | {"machine": {"threads": 2}, "resume": True}, Path("step-00000001")
    )
    assert said == "changed since step-00000001: machine.threads (was 1, now 2)"


def test_resume_refuses_a_changed_seed_batch_size_model_or_row_order(job, capfd, monkeypatch):
    job.fresh()
    assert forked(job.with_words("steps=2")) == 0
    for word in ("seed=1", "batch_tokens=128", "model.tied=true"):
        assert forked(job.with_words(word)) == 2
        assert f"{word.partition('=')[0]} (was" in capfd.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr("data.corpus.ROW_ORDER", 1)
        assert forked(job.with_words()) == 2
        assert "in a different order. fix: " in capfd.readouterr().err
    assert forked(job.with_words("optimizer.lr=0.001")) == 0
    assert (
        "changed since step-00000002: optimizer.lr (was 0.035, now 0.001), steps (was 2"
        in capfd.readouterr().err
    )


LOADING = """
import re, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from model.build import build_model
from run.checkpoint import load_model
from run import checkpoint
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
