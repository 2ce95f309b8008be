"""Standard streams whose reader exits or whose disk is full."""

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from tests.conftest import LONG, ROOT, SHORT, TINY
from tests.run.forks import Forked


def closed_pipe() -> IO:
    """A pipe whose reader has exited."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "wb")


def full_disk() -> IO:
    return open("/dev/full", "wb")


def run(stdout: IO, stderr: IO, *command: str) -> int:
    """Run `python FILE ARGUMENTS` with these streams in a fork; return its exit code."""
    file, *arguments = command
    with stdout, stderr:
        return Forked([sys.executable, ROOT / file, *arguments], stdout, stderr, {}).wait()


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("generate.py --temperature 0 --device cpu --num-samples 9 Ann", b"--- 1: Ann"),
        ("tools/cost.py model=tiny attention=gqa,mha,mqa", b"attention "),
    ],
)
def test_a_command_ends_quietly_when_its_reader_has_read_enough(drawn_run, words, first):
    line = f"PYTHONPATH={ROOT} {sys.executable} {ROOT}/{words} | head -1"
    shell = ["bash", "-o", "pipefail", "-c", line]
    ended = subprocess.run(shell, capture_output=True, timeout=LONG)
    assert ended.stdout.startswith(first) and b"rror" not in ended.stderr


def test_writing_standard_output_to_a_full_disk_is_a_storage_error(drawn_run):
    errors = Path("errors")
    assert run(full_disk(), errors.open("wb"), "generate.py", "Ann", "--device", "cpu") == 74
    *_, line = errors.read_text(encoding="utf-8").splitlines()
    assert line.startswith("error: ")


@pytest.mark.parametrize("stream", [full_disk, closed_pipe])
def test_the_exit_code_reports_an_error_that_cannot_be_printed(command, stream):
    assert run(stream(), stream(), "train.py", "--colour") == 2


def test_training_does_not_end_when_the_reader_of_its_messages_does(command, story):
    words = (*TINY, *SHORT, "data=text", f"data.path={story}", "data.vocab_size=400")
    assert run(closed_pipe(), closed_pipe(), "train.py", *words) == 0
    assert Path("runs/text-tiny-gqa/checkpoints/step-00000004").exists()
