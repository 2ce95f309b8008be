"""Full disks lose no checkpoint, and a run locks its folder until its process ends."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from run import checkpoint, folder, progress
from run.distributed import Ranks
from tests.conftest import TINY, settings_of
from tests.faults.harness import at_most, forked


@pytest.mark.parametrize("room", [5000, 400_000])
def test_a_full_disk_loses_no_checkpoint(job, whole, room, capfd):
    """Either the first file that is written does not fit, or only the largest file does not."""
    assert room < (whole.checkpoints[-1] / "state.pt").stat().st_size
    assert forked(job.with_words("steps=2", "save_every=2")) == 0
    assert forked(job, at_most(room)) == 74
    assert capfd.readouterr().err.count("\nerror: ") == 1
    assert [path.name for path in (job.root / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    assert forked(job) == 0 and job.checkpoints[-1].name == "step-00000004"


def test_a_disk_error_in_a_sync_leaves_no_folder(tmp_path, monkeypatch):
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with (
        pytest.raises(OSError, match="No space"),
        checkpoint.atomic_directory(tmp_path / "folder") as unsealed,
    ):
        (unsealed / "file").write_bytes(b"x")
    assert not list(tmp_path.iterdir())


def test_training_continues_with_a_warning_if_metrics_cannot_be_written(job, whole, capfd):
    opened = Path.open

    def failing(path: Path, mode: str = "r", *more, **named):
        """After its first line, metrics.jsonl cannot be opened any more."""
        if path.name == "metrics.jsonl" and mode == "a" and path.stat().st_size > 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, mode, *more, **named)

    def fail_to_open() -> None:
        Path.open = failing

    assert forked(job, fail_to_open) == 0
    assert capfd.readouterr().err.count("training continues") == 1
    assert job.curve()[-3:] == whole.curve()[-3:]  # samples and weights
    (line,) = (job.root / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line)["step"] == 2


def test_a_metrics_line_is_written_completely_or_not_at_all(job):
    words = ("steps=40", "log_every=1", "save_every=40", "eval_every=40")
    assert forked(job.with_words(*words), at_most(4000)) == 74  # standard error is also limited
    lines = (job.root / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted({*steps}) and 5 < len(steps) < 40


def test_only_one_run_can_use_a_folder(job, capfd):
    assert forked(job.with_words("steps=2")) == 0
    files = [path for path in job.root.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    settings = settings_of(f"run_dir={job.root}/run", "resume=true")
    ranks = Ranks(0, 1, torch.device("cpu"))
    with folder.open_run_dir(settings, ranks, job.checkpoints[-1]):
        assert forked(job) == 2
    *_, line = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and "run_dir" in line
    assert before == {path: path.read_bytes() for path in before}
    # An error also releases the lock.
    with pytest.raises(KeyError), folder.open_run_dir(settings, ranks, job.checkpoints[-1]):
        raise KeyError
    assert forked(job) == 0


def test_a_run_folder_that_cannot_be_used_is_refused(command, story):
    Path("file").touch()
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("my: config", encoding="utf-8")
    words = (*TINY, "steps=2", "data=text", f"data.path={story}", "data.vocab_size=400")
    for code, *more in [
        (74, "run_dir=file/run"),
        (2, "run_dir=mine"),
        (2, "run_dir=mine", "resume=true"),
    ]:
        result = command("train.py", *words, *more)
        assert result.code == code and "run_dir" in result.err.splitlines()[-1]
    assert [path.read_text(encoding="utf-8") for path in Path("mine").iterdir()] == ["my: config"]


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
    assert first.err.count("cannot sync") == first.err.count("cannot lock") == 1
    assert "resuming from step 2" in again.err and "warning" not in again.err
