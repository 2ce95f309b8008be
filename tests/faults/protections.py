"""Remove one protection at a time, in a copy, and print which test fails:  python -m tests.faults.protections"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.conftest import ROOT

PROTECTIONS = {  # Protection: (file, code, replacement, tests that should fail without it).
    "sync to disk": ("run/sealed.py", "os.fsync(descriptor)", "pass", "crashes.py -k power_cut"),
    "file hashes": (
        "run/sealed.py",
        "sha256_of(safe_child(folder, name)) != digest",
        "not safe_child(folder, name).exists()",
        "damage.py",
    ),
    "the staging folder": (
        "run/sealed.py",
        'staging = folder.with_name(f".tmp-{folder.name}")',
        "staging = folder",
        "",
    ),
    "the refusal of links": (
        "run/sealed.py",
        "path.is_symlink() or folder.is_symlink()",
        "False",
        "damage.py",
    ),
    "the lock": ("run/folder.py", "not sealed.acquire(lock)", "False", "storage.py -k one_run"),
    "loading without unpickling": (
        "run/checkpoint.py",
        "weights_only=True",
        "weights_only=False",
        "damage.py",
    ),
    "the older checkpoint": ("run/checkpoint.py", "NUM_KEPT = 2", "NUM_KEPT = 1", "signals.py"),
    "the optimizer": (
        "training/checkpointer.py",
        "load_optimizer_state(trainer.model",
        "(lambda *_: 0)(trainer",
        "resume.py",
    ),
    "the position in the data": (
        "training/trainer.py",
        "            loss_sums = self.compute_gradients(progress.step, micro_batch_size)",
        "            loss_sums = self.compute_gradients(progress.step - progress.first_step, 2)",
        "resume.py",
    ),
    "the random state of a step": (
        "training/trainer.py",
        "torch.manual_seed(draw % 2**63)",
        "pass",
        "resume.py",
    ),
    "the check for finite values": (
        "training/meter.py",
        "is_finite = self.is_finite & self.loss_sum.isfinite().all()",
        "is_finite = True",
        "resume.py -k diverged",
    ),
    "signals": ("train.py", "run.signals.arm()", "pass", "signals.py -k saves_and_ends"),
    "truncation of the log": (
        "training/logger.py",
        "file.truncate(self.sizes[name])",
        "pass",
        "crashes.py -k every_crash",
    ),
}


def seen(folder: Path, what: str) -> str | None:
    """The first test that fails without this protection, or None."""
    file, line, instead, tests = PROTECTIONS[what]
    text = (ROOT / file).read_text(encoding="utf-8")
    assert text.count(line) == 1, (file, line)
    (folder / file).write_text(text.replace(line, instead), encoding="utf-8")
    name, *rest = (tests or "crashes.py -k every_crash").split()
    path = f"tests/{name[3:]}" if name.startswith("../") else f"tests/faults/test_{name}"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        path,
        *rest,
    ]
    with (folder / "told").open("w+", encoding="utf-8") as told:
        process = subprocess.Popen(
            command, cwd=folder, stdout=told, stderr=told, start_new_session=True
        )
        process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        told.seek(0)
        failed = [line for line in told if line.startswith("FAILED")]
    (folder / file).write_text(text, encoding="utf-8")
    return failed[0].split()[1] if failed else None


def main() -> int:
    missed = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "copy"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs"))
        for what in PROTECTIONS:
            test = seen(folder, what)
            missed += test is None
            print(f"without {what}: {test or 'NO TEST FAILS'}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
