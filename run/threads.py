"""The number of a process's CPU threads, and how long they spin while they wait.

Threads that share a matrix product wait at its end for the slowest thread. They spin while they
wait, because going to sleep takes longer than most waits. On a busy machine this wastes cores,
because the slowest thread has lost its core, often to a spinning thread. Threads therefore spin
only briefly. Under a quota, a process uses no more threads than the quota allows cores.
"""

import os
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Limits of spinning: rounds for GNU's libgomp, whose default of 300,000 takes milliseconds, and
# milliseconds for Intel's and LLVM's libraries, whose default is 200.
SPIN = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")  # ticks are the unit of /proc/stat
IDLE_FIELDS = (3, 4)  # fields of a line in /proc/stat: idle, and waiting for a disk
GUEST_FIELDS = slice(8, None)  # already included in the user's time


class CpuTime(NamedTuple):
    """A point in time, and how many seconds this process's cores had been busy until then."""

    now: float
    busy: float  # with any process
    own: float  # with this process and the children that it has waited for


def bound_spinning() -> None:
    """Let threads sleep after a short wait, unless the user has set the environment variables.

    Call this before torch is imported, since the libraries read these variables only once.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return
    for key, value in SPIN.items():
        os.environ.setdefault(key, value)


def cores() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count()))


def cpu_time() -> CpuTime:
    """Return how long this process's cores have been busy; 0 if the system hides it."""
    own = sum(os.times()[:4])
    busy = 0.0
    statistics = Path("/proc/stat")
    if statistics.exists():
        names = {f"cpu{core}" for core in cores()}
        for line in statistics.read_text("utf-8").splitlines():
            name, *fields = line.split()
            if name in names:
                ticks = [int(field) for field in fields]
                del ticks[GUEST_FIELDS]
                busy += sum(ticks) - sum(ticks[field] for field in IDLE_FIELDS)
    return CpuTime(time.monotonic(), busy / TICKS_PER_SECOND, own)


def other_load(start: CpuTime) -> float:
    """Return the number of cores that other processes have used on average since `start`."""
    end = cpu_time()
    if end.busy == 0:
        return 0.0
    used = (end.busy - start.busy) - (end.own - start.own)
    return max(0.0, used / max(1e-3, end.now - start.now))


def cpu_quota() -> float | None:
    """Return the CPU time that a container may use, in cores; None without a quota.

    This is the smallest quota of this process's control group and the groups that contain it, in
    versions 1 and 2: docs.kernel.org/admin-guide/cgroup-v2.html, cpu.max.
    """
    memberships = Path("/proc/self/cgroup")
    quotas = []
    if memberships.exists():
        for line in memberships.read_text("utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                quotas += group_quotas(Path("/sys/fs/cgroup"), group)
            elif "cpu" in controllers.split(","):
                quotas += group_quotas(Path("/sys/fs/cgroup/cpu"), group)
    return min(quotas, default=None)


def group_quotas(root: Path, group: str) -> list[float]:
    """Return the quotas, in cores, of a control group and its parent groups, up to `root`."""
    quotas = []
    folder = root / group.lstrip("/")
    for parent in (folder, *folder.parents):
        if not parent.is_relative_to(root):
            break
        version2 = parent / "cpu.max"
        version1 = parent / "cpu.cfs_quota_us"
        if version2.exists():
            quota, period = version2.read_text("utf-8").split()
        elif version1.exists():
            quota = version1.read_text("utf-8")
            period = (parent / "cpu.cfs_period_us").read_text("utf-8")
        else:
            continue
        if quota != "max" and int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return quotas


@cache
def default_threads() -> int:
    """Return the number of threads that torch used at the first call."""
    import torch  # after `bound_spinning`

    return torch.get_num_threads()


def choose_threads(kept: int | None = None) -> str:
    """Set the number of torch's threads. Return a line about it if it is not torch's own number.

    It is torch's own number or, in a resumed run, the number `kept`, which determines how sums are
    rounded; but at most the cores and the quota of this process. OMP_NUM_THREADS, which torchrun
    also sets, takes precedence.
    """
    import torch  # after `bound_spinning`

    if "OMP_NUM_THREADS" in os.environ:
        return ""
    own = default_threads()
    most = len(cores())
    reason = "as at the start of the run"
    quota = cpu_quota()
    if quota is not None and quota < (kept or own):
        most = max(1, int(quota))
        reason = f"a quota of {quota:.1f} cores"
    threads = min(kept or own, most)
    if threads == torch.get_num_threads():
        return ""
    torch.set_num_threads(threads)
    return f"computing with {threads} of {own} threads ({reason}; OMP_NUM_THREADS=N changes it)"
