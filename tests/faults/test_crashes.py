"""A run killed at any instant loses no saved state and resumes as if it had not been killed."""

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from run import checkpoint
from tests.faults.harness import Job, copying, finish, forked, lose_power, losing_power, start


def check_resume(job: Job, whole: Job, crash: object) -> None:
    """Resume a crashed run to its end, and check that it is like an uninterrupted run."""
    assert forked(job) == 0, crash
    assert job.curve() == whole.curve(), crash
    assert job.leftovers() == [], crash


def crashed(job: Job, copies: Path) -> Iterator[str]:
    """Restore each copy of a run's files. Files with the same names and sizes come only once."""
    seen = []
    for number in range(1, 1 + len([*copies.iterdir()])):
        shutil.rmtree(job.root)
        shutil.move(copies / str(number), job.root)
        state = {path: path.stat().st_size for path in (job.root / "run").rglob("*")}
        if state not in seen:
            seen.append(state)
            yield f"operation {number} of {copies.name}"


def test_a_run_resumes_from_every_crash_point(job, whole, tmp_path):
    """A kill leaves the files unchanged, so copies made before each file operation replace kills.

    The first process is really killed while it saves step 2; the second process resumes.
    """
    first = tmp_path / "first process"
    second = tmp_path / "second process"
    assert forked(job, copying(job.root, first, killed_at=35)) == -signal.SIGKILL
    assert [path.name for path in job.checkpoints] == ["step-00000001"]
    assert forked(job, copying(job.root, second)) == 0
    points = 0
    for copies in (first, second):
        for crash in crashed(job, copies):
            check_resume(job, whole, crash)
            points += 1
    assert points > 40


def test_a_power_cut_loses_no_saved_checkpoint(job, whole, tmp_path):
    """The copies of a run also record which of its files had been synced to disk."""
    record = job.root / "synced"
    copies = tmp_path / "process"
    assert forked(job, losing_power(record), copying(job.root, copies)) == 0
    for number, crash in enumerate(crashed(job, copies)):
        lose_power(record, job.checkpoints)
        for path in job.checkpoints:
            checkpoint.verify(path, crash)
        if number % 5 == 0:
            check_resume(job, whole, crash)


@pytest.mark.long
def test_a_run_resumes_after_random_kills(job, whole):
    draw = random.Random(0)
    began = time.monotonic()
    assert forked(job) == 0
    usual = time.monotonic() - began
    for number in range(100):
        job.fresh()
        for _ in range(3):
            pid = start(job)
            time.sleep(draw.uniform(0, usual))
            os.kill(pid, signal.SIGKILL)
            finish(pid)
        check_resume(job, whole, number)


def test_files_are_synced_before_they_are_renamed(tmp_path, monkeypatch):
    trace = []
    fsync = os.fsync
    rename = Path.rename

    def traced_fsync(descriptor: int) -> None:
        trace.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def traced_rename(path: Path, to: Path) -> None:
        trace.append(f"rename to {to.name}")
        rename(path, to)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "rename", traced_rename)
    with checkpoint.atomic_directory(tmp_path / "folder") as staging:
        for name in ("a", "b"):
            (staging / name).write_bytes(b"x")
    assert trace == ["a", "b", "manifest.json", ".tmp-folder", "rename to folder", tmp_path.name]
