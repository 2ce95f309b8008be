"""Training and generation on GPUs that are not there, in a process of its own.

The first backward of a process starts autograd's threads, one for each device that is known then,
and a process that has such threads cannot be forked, as other tests do.
"""

import subprocess
import sys

from tests.conftest import ROOT

CASES = ("tests/gpu/fake_cuda_cases.py", "tests/gpu/fake_ranks_cases.py")


def test_training_and_generation_on_gpus_that_are_not_there():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *CASES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
