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

STEP = (trainer.Trainer, "accumulate")
EVALUATION = (evaluation, "evaluate")
SAMPLE = (evaluation, "stream_text")
SAVE = (checkpoint, "save")
SAVE_FILE = (checkpoint, "save_file")


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


def close_errors() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)


IN_STEP_1 = sending(signal.SIGTERM, STEP, 1)
IN_STEP_3 = sending(signal.SIGTERM, STEP, 3)
CTRL_C = sending(signal.SIGINT, STEP, 3)


@pytest.mark.parametrize(
    ("before", "code", "saved"),
    [
        ([IN_STEP_3], 75, [2, 3]),
        ([sending(signal.SIGINT, EVALUATION, 2)], 130, [3, 4]),
        ([sending(signal.SIGTERM, SAMPLE, 1)], 75, [1, 2]),
        ([sending(signal.SIGUSR1, SAVE, 2)], 75, [1, 2]),  # before a sample
        ([sending(signal.SIGHUP, SAVE, 4)], 75, [3, 4]),
        # Without anything to save, and after the last step.
        ([IN_STEP_1], 75, []),
        ([sending(signal.SIGINT, (Logger, "plot"), 1)], 130, [3, 4]),
        # A signal that is repeated, as by a scheduler, does not end the save; a second Ctrl-C does.
        ([IN_STEP_3, sending(signal.SIGTERM, SAVE_FILE, 3)], 75, [2, 3]),
        ([CTRL_C, sending(signal.SIGINT, SAVE_FILE, 3)], 130, [1, 2]),
        ([close_errors, CTRL_C], 130, [2, 3]),
    ],
)
def test_a_signal_saves_and_ends_a_run(job, whole, before, code, saved):
    assert forked(job, *before) == code
    assert [path.name for path in job.checkpoints] == [f"step-{step:08d}" for step in saved]
    assert forked(job) == 0
    assert job.curve() == whole.curve() and job.leftovers() == []


@pytest.mark.parametrize(
    ("number", "where", "code"),
    [
        (signal.SIGINT, (preparation, "tokenizer_texts"), 130),
        (signal.SIGTERM, (Tokenizer, "encode_documents"), 75),
    ],
)
def test_a_signal_interrupts_data_preparation(tmp_path, story, number, where, code):
    def preparing() -> None:
        with Signals():
            prepare(source(story), tmp_path / "cache")

    assert forked(preparing, sending(number, where, 1)) == code
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

    codes, messages = ranks(train, 2, tmp_path, send(signal.SIGTERM, after=3))
    assert codes == [75, 75] and "resume=true" in messages, messages
    newest = checkpoint.newest_checkpoint(Path("run"))
    steps = [json.loads(line)["step"] for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert newest.name == f"step-{steps[-1]:08d}"

    resume = [*train, "resume=true"]
    codes, _ = ranks(resume, 2, tmp_path, send(signal.SIGKILL, after=len(steps) + 6))
    assert codes[0] > 0 and codes[1] == -signal.SIGKILL
    assert checkpoint.newest_checkpoint(Path("run")).name > newest.name
