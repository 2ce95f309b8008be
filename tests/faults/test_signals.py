"""A signal saves and ends a run within a step, and resuming it gives the same results."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from data import prepare as preparation
from data.prepare import prepare
from data.tokenizer import Tokenizer
from run import checkpoint
from run.signals import Signals
from tests.conftest import ROOT, TINY
from tests.faults.harness import Action, count_lines, forked, source, wait_for
from tests.run.forks import ranks
from training import evaluation, trainer
from training.logger import Logger

CODES = {signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGINT: 130}
STEP = (trainer.Trainer, "accumulate")
EVALUATION = (evaluation, "evaluate")
SAMPLE = (evaluation, "stream_text")
SAVE = (checkpoint, "save")


def sending(number: int, where: tuple[object, str], call: int) -> Action:
    """Make this process send itself a signal at the given call of a function."""

    def patch() -> None:
        owner, name = where
        wrapped = getattr(owner, name)
        calls = []

        def noisy(*arguments, **named):
            calls.append(name)
            if len(calls) == call:
                os.kill(os.getpid(), number)
            return wrapped(*arguments, **named)

        setattr(owner, name, noisy)

    return patch


@pytest.mark.parametrize(
    ("number", "where", "call", "step"),
    [
        (signal.SIGTERM, STEP, 3, 3),
        (signal.SIGINT, EVALUATION, 2, 4),
        (signal.SIGTERM, SAMPLE, 1, 2),
        (signal.SIGUSR1, SAVE, 2, 2),  # before a sample
        (signal.SIGTERM, SAVE, 4, 4),
    ],
)
def test_a_signal_saves_and_ends_a_run(job, whole, number, where, call, step, capfd):
    assert forked(job, sending(number, where, call)) == CODES[number]
    assert job.checkpoints[-1].name == f"step-{step:08d}"
    assert "resume=true" in capfd.readouterr().err
    assert forked(job) == 0
    assert job.curve() == whole.curve() and job.leftovers() == []


def test_a_signal_in_the_first_step_ends_a_run_immediately(job, whole):
    assert forked(job, sending(signal.SIGTERM, STEP, 1)) == 75
    assert job.checkpoints == []
    assert forked(job) == 0 and job.curve() == whole.curve()


def test_a_second_ctrl_c_ends_a_run_immediately(job, whole):
    noisy = sending(signal.SIGINT, STEP, 3)
    assert forked(job, noisy, sending(signal.SIGINT, (checkpoint, "save_file"), 3)) == 130
    assert job.leftovers() == ["step-00000001", "step-00000002"]  # the checkpoints are kept
    assert forked(job) == 0 and job.curve() == whole.curve()


def test_a_signal_saves_a_run_whose_standard_error_is_closed(job, whole):
    def close_errors() -> None:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 2)

    noisy = sending(signal.SIGINT, STEP, 3)
    assert forked(job, close_errors, noisy) == CODES[signal.SIGINT]
    assert job.checkpoints[-1].name == "step-00000003"
    assert forked(job) == 0 and job.curve() == whole.curve()


def test_a_repeated_signal_saves_a_run_only_once(job, whole):
    noisy = sending(signal.SIGTERM, STEP, 3)
    assert forked(job, noisy, sending(signal.SIGTERM, SAVE, 3)) == 75
    assert job.checkpoints[-1].name == "step-00000003"


def test_a_signal_after_the_last_step_ends_a_run_immediately(job, whole, capfd):
    assert forked(job, sending(signal.SIGINT, (Logger, "plot"), 1)) == 130
    assert "saving after" not in capfd.readouterr().err
    assert forked(job) == 0 and job.curve() == whole.curve()


@pytest.mark.parametrize(
    ("number", "where"),
    [
        (signal.SIGINT, (preparation, "tokenizer_texts")),
        (signal.SIGTERM, (Tokenizer, "encode_documents")),
    ],
)
def test_a_signal_interrupts_data_preparation(tmp_path, story, number, where):
    def preparing() -> None:
        with Signals():
            prepare(source(story), tmp_path / "cache")

    assert forked(preparing, sending(number, where, 1)) == CODES[number]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_signal_to_one_of_two_ranks_saves_and_ends_both(tmp_path, story, monkeypatch):
    monkeypatch.chdir(tmp_path)
    metrics = Path("run/metrics.jsonl")
    data = ("data=text", f"data.path={story}", "data.vocab_size=400")
    words = ("run_dir=run", "save_every=5", "steps=100000", "eval_every=100000", "model.depth=1")
    train = [sys.executable, ROOT / "train.py", *TINY, *data, *words]

    def send(number: int, after: int):
        def act(processes: list) -> None:
            wait_for(lambda: count_lines(metrics) > after)
            os.kill(processes[-1].pid, number)

        return act

    codes, told = ranks(train, 2, tmp_path, send(signal.SIGTERM, after=3))
    assert codes == [75, 75] and "resume=true" in told, told
    newest = checkpoint.newest_checkpoint(Path("run"))
    steps = [json.loads(line)["step"] for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert newest.name == f"step-{steps[-1]:08d}"

    resume = [*train, "resume=true"]
    codes, _ = ranks(resume, 2, tmp_path, send(signal.SIGKILL, after=len(steps) + 6))
    assert codes[0] > 0 and codes[1] == -signal.SIGKILL
    assert checkpoint.newest_checkpoint(Path("run")).name > newest.name
