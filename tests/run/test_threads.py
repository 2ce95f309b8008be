"""The number of threads under a CPU quota and in a resumed run, and how long they spin."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from run import threads
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("own", "quota", "kept", "expected"),
    [
        (2, None, None, 2),
        (4, 2.5, None, 2),
        (4, 0.5, None, 1),
        (4, None, 1, 1),
        (4, None, 64, 4),
        (4, 2.5, 4, 2),  # a quota throttles all threads, so it takes precedence
    ],
)
def test_threads_are_those_of_torch_or_of_the_resumed_run_within_a_quota(
    own, quota, kept, expected, monkeypatch
):
    chosen = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "cores", lambda: range(own))
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    monkeypatch.setattr(torch, "get_num_threads", lambda: [own, *chosen][-1])
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    message = threads.choose_threads(kept)
    assert chosen == ([] if expected == own else [expected]) and bool(message) == bool(chosen)
    assert threads.choose_threads(kept) == ""  # the number is already set
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.choose_threads(kept) == "" and len(chosen) <= 1


def test_threads_spin_briefly_unless_the_user_sets_it(monkeypatch):
    code = "from run import threads; import os; print(*map(os.environ.get, threads.SPIN))"

    def spinning(**environment: str) -> list[str]:
        inherited = {key: os.environ[key] for key in os.environ.keys() - threads.SPIN.keys()}
        words = [sys.executable, "-c", code]
        environment = inherited | environment
        return subprocess.check_output(words, cwd=ROOT, env=environment, encoding="utf-8").split()

    assert spinning() == [*threads.SPIN.values()]
    assert spinning(GOMP_SPINCOUNT="7")[0] == "7"
    assert spinning(OMP_WAIT_POLICY="active") == ["None", "None"]


GROUPS = {
    # The smallest quota of a group and its parents applies; "max" means no quota.
    "0::/pod/container\n": {
        "cpu.max": "max 100000",
        "pod/cpu.max": "150000 100000",
        "pod/container/cpu.max": "400000 100000",
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
