"""A run killed at any instant loses no saved state and resumes as if it had not been killed."""

import errno
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from run import checkpoint
from tests.faults import harness
from tests.faults.harness import Job, copying, finish, forked, killed_at, start


def judged(job: Job, code: int, whole: Job) -> list[str]:
    """The problems found in a run that was killed and then resumed to its end."""
    if code != 0:
        return [f"exit code {code}"]
    found = [] if job.curve() == whole.curve() else ["another curve"]
    return found + [f"left over: {name}" for name in job.leftovers()]


def every_crash_point(job: Job, whole: Job, *broken) -> tuple[int, list[str]]:
    """Resume from the files left by a kill before each file operation; kill every third run again.

    A kill leaves the files unchanged, so one run copies them before each operation. Only the second
    kills are real. States whose files have the same names and sizes are tried only once.
    """
    found, states = [], []
    copies = job.root.with_name("copies")
    shutil.rmtree(copies, ignore_errors=True)
    job.fresh()
    assert forked(job, *broken, copying(job.root, copies)) == 0
    points = len([*copies.iterdir()])
    for event in range(1, points + 1):
        shutil.rmtree(job.root)
        shutil.move(copies / str(event), job.root)
        if event % 3 == 0:
            forked(job, *broken, killed_at(1 + event * 7 % 50, job.root))
        states.append({path: path.stat().st_size for path in job.root.rglob("*")})
        if states.count(states[-1]) > 1:
            continue
        found += [
            f"operation {event}: {problem}" for problem in judged(job, forked(job, *broken), whole)
        ]
        if broken and found:
            break
    return points, found


def random_kills(job: Job, whole: Job, kills: int, seed: int) -> list[str]:
    """Kill each run three times at random instants, and then let it finish."""
    draw, found = random.Random(seed), []
    began = time.monotonic()
    job.fresh()
    assert forked(job) == 0
    usual = time.monotonic() - began
    for number in range(kills // 3):
        job.fresh()
        for _ in range(3):
            pid = start(job)
            time.sleep(draw.uniform(0, usual))
            os.kill(pid, signal.SIGKILL)
            finish(pid)
        found += [
            f"chain {number} of seed {seed}: {problem}"
            for problem in judged(job, forked(job), whole)
        ]
    return found


def power_cuts(job: Job, whole: Job, events: range, *broken) -> list[str]:
    """Kill a run and truncate its unsynced files; saved checkpoints must survive."""
    found, record = [], job.root.parent / "record"
    for event in events:
        job.fresh()
        record.unlink(missing_ok=True)
        forked(job, harness.losing_power(record), *broken, killed_at(event, job.root))
        there = job.checkpoints
        harness.lose_power(record, there)
        for path in there:
            try:
                checkpoint.verify(path, "")
            except Exception:
                found.append(f"operation {event}: {path.name} was lost")
        found += [f"operation {event}: {problem}" for problem in judged(job, forked(job), whole)]
    return found


def test_a_run_resumes_from_every_crash_point(job, whole):
    points, found = every_crash_point(job, whole)
    assert points > 60 and found == []


def test_the_crash_point_test_detects_a_saver_that_writes_in_place(job, whole):
    assert every_crash_point(job, whole, harness.in_place)[1]


MANY = [pytest.param(102, seed, marks=pytest.mark.long) for seed in range(1, 6)]


@pytest.mark.parametrize("kills, seed", [(15, 0), *MANY])
def test_a_run_resumes_after_random_kills(job, whole, kills, seed):
    assert random_kills(job, whole, kills, seed) == []


def test_a_power_cut_loses_no_saved_checkpoint(job, whole):
    assert power_cuts(job, whole, range(20, 120, 9)) == []


def test_files_are_synced_before_they_are_renamed(tmp_path, monkeypatch):
    trace, fsync, rename = [], os.fsync, Path.rename

    def noted(descriptor: int) -> None:
        trace.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def named(path: Path, to: Path) -> None:
        trace.append(f"rename to {to.name}")
        rename(path, to)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", named)
    with checkpoint.atomic_directory(tmp_path / "folder") as unsealed:
        for name in ("a", "b"):
            (unsealed / name).write_bytes(b"x")
    assert trace == ["a", "b", "manifest.json", ".tmp-folder", "rename to folder", tmp_path.name]


@pytest.mark.parametrize("number", range(1, 5))
def test_a_disk_error_in_any_sync_leaves_no_incomplete_folder(tmp_path, monkeypatch, number):
    calls, fsync = [], os.fsync

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with (
        pytest.raises(OSError, match="No space"),
        checkpoint.atomic_directory(tmp_path / "folder") as unsealed,
    ):
        for name in ("a", "b"):
            (unsealed / name).write_bytes(b"x")
    assert not list(tmp_path.iterdir())


def test_the_power_cut_test_detects_a_saver_that_does_not_sync(job, whole):
    assert power_cuts(job, whole, range(60, 120, 20), harness.unsynced)
