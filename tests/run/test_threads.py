"""The choice of the number of threads under load from other processes and under a CPU quota."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from run import threads
from tests.conftest import ROOT

CHOICE = """
from run import threads
import torch
torch.set_num_threads({available})
print(threads.choose_threads({kept}) or "all")
print(torch.get_num_threads(), *map(threads.os.environ.get, threads.SPIN))
"""


def choose(available: int = 2, kept: int | None = None, prepare: str = "", **environment: str):
    """Start a process; return its message about threads, their number and the spin settings."""
    code = CHOICE.format(available=available, kept=kept)
    unset = {"OMP_NUM_THREADS", *threads.SPIN}
    inherited = {key: os.environ[key] for key in os.environ if key not in unset}
    result = subprocess.run(
        [sys.executable, "-c", f"from run import threads\n{prepare}\n{code}"],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    )
    line, settings = result.stdout.splitlines()
    number, *spinning = settings.split()
    return line, int(number), spinning


def loaded(cores: int, load: float) -> str:
    return f"threads.cores = lambda: range({cores}); threads.other_load = lambda start: {load}"


@pytest.mark.parametrize(
    "cores, available, load, expected",
    [
        (2, 2, 0.4, 2),
        (2, 2, 1.0, 1),
        (2, 2, 2.0, 1),
        (16, 16, 1.2, 15),
        (16, 16, 15.9, 8),
        # torch uses one of the two hardware threads of a core.
        (16, 8, 7.0, 8),
        (16, 8, 10.0, 6),
        (16, 8, 16.0, 4),
        (1, 1, 1.0, 1),
    ],
)
def test_load_never_reduces_threads_below_half(cores, available, load, expected):
    no_wait = "threads.BURST_SECONDS = 0; threads.cpu_quota = lambda: None"
    line, number, _ = choose(available, prepare=f"{loaded(cores, load)}; {no_wait}")
    assert number == expected
    assert line == "all" or f"use {load:.1f} of {cores} cores" in line
    assert (line == "all") == (expected == available)


def test_the_load_reduces_the_threads_only_once():
    """Otherwise, each model that is loaded would use fewer threads than the one before."""
    busy = f"{loaded(16, 15.9)}; threads.BURST_SECONDS = 0; threads.cpu_quota = lambda: None"
    first = (
        "import torch; torch.set_num_threads(16); assert '8 threads' in threads.choose_threads()"
    )
    assert choose(8, prepare=f"{busy}; {first}")[:2] == ("all", 8)


def test_a_burst_of_load_at_startup_is_ignored():
    loads = "loads = [2.0, 0.1]; threads.other_load = lambda start: loads.pop(0)"
    quiet = "threads.BURST_SECONDS = 0; threads.cpu_quota = lambda: None"
    assert choose(2, prepare=f"{loads}; {quiet}")[:2] == ("all", 2)


def test_user_settings_take_precedence():
    busy = loaded(2, 2.0)
    assert choose(2, prepare=busy, OMP_NUM_THREADS="2")[:2] == ("all", 2)
    assert choose(prepare=busy, OMP_NUM_THREADS="2", GOMP_SPINCOUNT="7")[2][0] == "7"
    patient = choose(prepare=busy, OMP_NUM_THREADS="2", OMP_WAIT_POLICY="active")[2]
    assert patient == ["None", "None"]
    bounded = choose(prepare=busy, OMP_NUM_THREADS="2")[2]
    assert bounded == [*threads.SPIN.values()]


def test_a_resumed_run_keeps_its_thread_count():
    busy = f"{loaded(4, 4.0)}; threads.BURST_SECONDS = 0; threads.cpu_quota = lambda: None"
    assert choose(4, kept=4, prepare=busy)[:2] == ("all", 4)
    line, number, _ = choose(4, kept=1, prepare=busy)
    assert number == 1 and line.startswith("computing with 1 thread (as at the start of the run; ")
    assert choose(4, kept=64, prepare=busy)[1] == 4
    # A quota throttles all threads, so it takes precedence.
    assert choose(4, kept=4, prepare="threads.cpu_quota = lambda: 2.5")[1] == 2


def test_load_includes_only_other_processes():
    """A busy loop counts in a different process but not in this process."""
    if threads.cpu_time().busy == 0:
        pytest.skip("needs /proc/stat")
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        start = threads.cpu_time()
        while threads.cpu_time().now < start.now + 1:
            pass
        load = threads.other_load(start)
        end = threads.cpu_time()
    finally:
        loop.kill()
        loop.wait()
    # Other tests may run on the same cores, so each loop may get only part of a core.
    own = end.own - start.own
    assert own > 0
    assert 0.1 < load < end.busy - start.busy - 0.8 * own


GROUPS = {
    # Version 2: the smallest quota of a group and its parents applies; "max" means no quota.
    "0::/pod/container\n": {
        "cpu.max": "max 100000",
        "pod/cpu.max": "150000 100000",
        "pod/container/cpu.max": "400000 100000",
    },
    # Version 1: -1 means no quota.
    "4:memory:/x\n3:cpu,cpuacct:/pod\n": {
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
        "cpu/pod/cpu.cfs_quota_us": "75000",
        "cpu/pod/cpu.cfs_period_us": "50000",
    },
    # Inside a container, the group's path does not exist, because the group appears as the root.
    "0::/../elsewhere\n": {"cpu.max": "150000 100000"},
}


@pytest.mark.parametrize("membership", GROUPS)
def test_the_smallest_control_group_quota_applies(membership, tmp_path, monkeypatch):
    for name, content in GROUPS[membership].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "membership").write_text(membership, encoding="utf-8")

    def inside(path: str) -> Path:
        if path == "/proc/self/cgroup":
            return tmp_path / "membership"
        return Path(path.replace("/sys/fs/cgroup", str(tmp_path)))

    monkeypatch.setattr(threads, "Path", inside)
    assert threads.cpu_quota() == 1.5
    monkeypatch.setattr(threads, "cores", lambda: range(4))
    assert threads.free_threads(4) == (1, "a quota of 1.5 cores")


def test_load_is_zero_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "Path", lambda path: tmp_path / "missing")
    assert threads.other_load(threads.cpu_time()) == 0
    assert threads.cpu_quota() is None
    assert threads.free_threads(torch.get_num_threads())[1] == ""
