"""The number of a process's CPU threads, and how long they spin while they wait.

Threads that share a matrix product wait at its end for the slowest thread. They spin while they
wait, because going to sleep takes longer than most waits. On a busy machine this wastes cores,
because the slowest thread has lost its core, often to a spinning thread. Threads therefore spin
only briefly. A CPU quota also limits the number of threads.
"""

import os
from pathlib import Path

# Limits of spinning: rounds for GNU's libgomp, whose default of 300,000 takes milliseconds, and
# milliseconds for Intel's and LLVM's libraries, whose default is 200. The number of rounds was
# compared only on a Zen 4 processor (docs/speed.md).
SPIN = {"GOMP_SPINCOUNT": "30000", "KMP_BLOCKTIME": "1"}


def limit_spin_wait() -> None:
    """Let threads sleep after a short wait, unless the user set OMP_WAIT_POLICY or the SPIN keys.

    Call this before torch is imported, since its libraries read these variables only once.
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


def cpu_quota() -> float | None:
    """Return the CPU time that a container may use, in cores; None without a quota.

    This is the smallest quota of this process's control group and the groups that contain it:
    docs.kernel.org/admin-guide/cgroup-v2.html, cpu.max. Inside a container, the group is often the
    root of the mounted file system.
    """
    root = Path("/sys/fs/cgroup")
    membership = Path("/proc/self/cgroup")
    group = ""
    if membership.exists():
        for line in membership.read_text("utf-8").splitlines():
            if line.startswith("0::"):
                group = line.removeprefix("0::/")
    quotas = []
    for folder in (root / group, *(root / group).parents):
        file = folder / "cpu.max"
        if file.exists():
            quota, period = file.read_text("utf-8").split()
            if quota != "max":
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def choose_threads(kept: int | None = None) -> str:
    """Set the number of torch's threads; return a line about it, or "" if torch's number is kept.

    The number is torch's own or, in a resumed run, `kept`, because it determines how sums are
    rounded. The cores and the quota of this process limit it. OMP_NUM_THREADS, which torchrun also
    sets, takes precedence.
    """
    import torch  # after `limit_spin_wait`

    if "OMP_NUM_THREADS" in os.environ:
        return ""
    own = torch.get_num_threads()
    most = len(cores())
    reason = f"the run used {kept} before" if kept else f"{most} cores"
    quota = cpu_quota()
    if quota is not None and quota < (kept or own):
        most = max(1, int(quota))
        reason = f"a quota of {quota:.1f} cores"
    threads = min(kept or own, most)
    if threads == own:
        return ""
    torch.set_num_threads(threads)
    return f"computing with {threads} threads, not {own} ({reason}; OMP_NUM_THREADS=N changes it)"
