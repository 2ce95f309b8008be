"""Standard streams whose reader exits or whose disk is full."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG, ROOT, SHORT, TINY, saved, tell, tree_of


def bash(line: str) -> subprocess.CompletedProcess:
    """Run a shell command with pipefail."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    words = ["bash", "-o", "pipefail", "-c", line]
    return subprocess.run(words, env=environment, capture_output=True, timeout=LONG)


@pytest.fixture
def generate(tmp_path, tokenizer, monkeypatch) -> str:
    """The generate.py command line, in a folder with a run."""
    monkeypatch.chdir(tmp_path)
    saved(Path("runs/drawn"), tree_of("gqa", "model.depth=1"), tokenizer)
    return f"{sys.executable} {ROOT}/generate.py --temperature 0 --device cpu"


def test_generation_ends_quietly_when_its_reader_has_read_enough(generate):
    told = bash(f"{generate} --num-samples 9 Ann | head -1")
    assert told.stdout.startswith(b"--- 1: Ann") and b"rror" not in told.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_writing_standard_output_to_a_full_disk_is_a_storage_error(generate, unbuffered):
    """Without buffering, the first write fails; otherwise a flush fails, and keeps the text."""
    told = bash(f"PYTHONUNBUFFERED={unbuffered} {generate} Ann > /dev/full")
    assert told.returncode == 74 and b"error: No space left on device" in told.stderr


@pytest.mark.parametrize("end", ["2>/dev/full", "2>&1 | true"])
def test_the_exit_code_reports_an_error_that_cannot_be_printed(end):
    assert bash(f"(sleep 1; {sys.executable} {ROOT}/train.py --colour) {end}").returncode == 2


def test_training_does_not_end_when_the_reader_of_its_messages_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"data=text data.path={tell(tmp_path)} data.vocab_size=400"
    words = " ".join([*TINY, *SHORT])
    told = bash(f"({sys.executable} {ROOT}/train.py {words} {text}; echo $? > code) 2>&1 | true")
    assert told.returncode == 0 and Path("code").read_text(encoding="utf-8") == "0\n"
    assert Path("runs/text-tiny-gqa/checkpoints/step-00000004").exists()
