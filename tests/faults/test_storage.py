"""Full disks lose no checkpoint, and a run locks its folder until its process ends."""

import errno
import fcntl
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from data.prepare import prepare
from data.tokenizer import Tokenizer
from run import checkpoint, folder, progress
from tests.conftest import LONG, TINY
from tests.faults.harness import at_most, finish, forked, source, start, wait_for


@pytest.mark.parametrize("room", [5000, 20_000, 60_000, 150_000])
def test_a_full_disk_loses_no_checkpoint(job, whole, room, capfd):
    files = [path.stat().st_size for path in whole.checkpoints[-1].iterdir()]
    assert room < max(files)
    job.fresh()
    assert forked(job.with_words("steps=2", "save_every=2")) == 0
    assert forked(job, at_most(room)) == 74
    told = capfd.readouterr().err
    assert told.count("\nerror: ") == 1 and "fix: free disk space" in told
    assert "File too large" in told and "fix: free disk space" in told
    assert [path.name for path in (job.root / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    assert forked(job) == 0 and job.checkpoints[-1].name == "step-00000004"


def full(name: str) -> None:
    """Make appending to this file fail as on a full disk."""
    opened = Path.open

    def full_or_not(path, mode="r", *more, **named):
        path = Path("/dev/full") if path.name == name and mode == "a" else path
        return opened(path, mode, *more, **named)

    Path.open = full_or_not


def test_training_continues_with_a_warning_if_metrics_cannot_be_written(job, whole, capfd):
    job.fresh()
    assert forked(job, lambda: full("metrics.jsonl")) == 0
    assert capfd.readouterr().err.count("training continues") == 1
    assert job.curve()[-3:] == whole.curve()[-3:]  # samples and weights


def test_a_metrics_line_is_written_completely_or_not_at_all(job):
    job.fresh()
    words = ("steps=40", "log_every=1", "save_every=40", "eval_every=40")
    assert forked(job.with_words(*words), at_most(4000)) == 74  # standard error is also limited
    lines = [
        json.loads(line)["step"]
        for line in (job.root / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert lines == sorted(set(lines)) and 5 < len(lines) < 40


def test_only_one_run_can_use_a_folder(job, capfd):
    job.fresh()
    assert forked(job.with_words("steps=2")) == 0
    before = {path: path.read_bytes() for path in (job.root / "run").rglob("*") if path.is_file()}
    with (job.root / "run" / ".lock").open("a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert forked(job) == 2
        told = capfd.readouterr().err
        assert f"another process is training in this folder (run_dir={job.root}/run). fix: " in told
    assert before == {
        path: path.read_bytes() for path in (job.root / "run").rglob("*") if path.is_file()
    }
    assert forked(job) == 0


def test_the_lock_test_detects_a_missing_lock(job, monkeypatch, capfd):
    monkeypatch.setattr(folder.FileLock, "acquire", lambda *_: None)
    with pytest.raises(AssertionError, match="assert 0 == 2"):
        test_only_one_run_can_use_a_folder(job, capfd)


def test_a_lock_does_not_outlive_its_process(job):
    job.fresh()
    pid = start(job.with_words("steps=100000"))
    wait_for((job.root / "run" / "metrics.jsonl").exists)
    os.kill(pid, signal.SIGKILL)
    finish(pid)
    assert forked(job.with_words("steps=3")) == 0


def test_a_killed_preparation_leaves_no_lock(tmp_path, story, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode_documents", lambda self, texts: time.sleep(LONG))
    cache = tmp_path / "cache"
    pid = start(lambda: prepare(source(story), cache) and None)
    wait_for(lambda: list(cache.glob(".tmp-*")))
    os.kill(pid, signal.SIGKILL)
    finish(pid)
    monkeypatch.undo()
    assert forked(lambda: prepare(source(story), cache) and None) == 0


def test_a_renamed_checkpoint_is_not_resumed(job):
    job.fresh()
    assert forked(job.with_words("steps=2")) == 0
    job.checkpoints[-1].rename(job.checkpoints[-1].with_name("step-00000009"))
    assert checkpoint.newest_checkpoint(job.root / "run").name == "step-00000001"


def test_an_unwritable_run_folder_is_reported_as_a_storage_error(command, story):
    Path("file").touch()
    words = (
        "steps=2",
        "data=text",
        f"data.path={story}",
        "data.vocab_size=400",
        "run_dir=file/run",
    )
    result = command("train.py", *TINY, *words)
    assert result.code == 74 and "fix: choose a different run_dir" in result.err.splitlines()[-1]


def test_a_run_folder_with_unrelated_files_is_refused(command, story):
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("my: config", encoding="utf-8")
    words = ("steps=2", "data=text", f"data.path={story}", "data.vocab_size=400", "run_dir=mine")
    for more in ((), ("resume=true",)):
        result = command("train.py", *TINY, *words, *more)
        assert result.code == 2 and "contains files but no run" in result.err
    assert [path.read_text(encoding="utf-8") for path in Path("mine").iterdir()] == ["my: config"]


def test_a_copied_checkpoint_is_not_removed(job):
    job.fresh()
    assert forked(job.with_words("steps=2")) == 0
    shutil.copytree(job.checkpoints[-1], job.checkpoints[-1].with_name("step-00000002.bak"))
    assert forked(job) == 0
    names = {path.name for path in (job.root / "run" / "checkpoints").iterdir()}
    assert names == {"step-00000002.bak", "step-00000003", "step-00000004"}


def test_a_run_on_a_file_system_without_syncs_and_locks_gets_one_warning_each(
    command, story, monkeypatch
):
    def refuse(*_) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    progress.warn_once.cache_clear()
    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(folder.FileLock, "acquire", refuse)
    words = ("train.py", *TINY, "data=text", f"data.path={story}", "data.vocab_size=400")
    words += ("save_every=1", "run_dir=run")
    first = command(*words, "steps=2").succeeded()
    again = command(*words, "steps=3", "resume=true").succeeded()
    assert first.err.count("synced") == first.err.count("locked") == 1
    assert "resuming step 2" in again.err and "warning" not in again.err
