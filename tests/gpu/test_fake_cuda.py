"""Run the fake GPU tests in a separate process.

The first backward in a process starts one autograd thread per known device. A process with such
threads cannot be forked, but other tests fork theirs.
"""

import subprocess
import sys

from tests.conftest import ROOT

CASES = ("tests/gpu/fake_cuda_cases.py", "tests/gpu/fake_ranks_cases.py")


def test_the_fake_gpu_cases_pass_in_a_separate_process():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *CASES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
