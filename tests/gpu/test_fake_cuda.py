"""Training and generation on GPUs that are not there, in processes of their own.

The first backward of a process starts autograd's threads, one for each device that is known then,
and a process that has such threads cannot be forked, as other tests do.
"""

import subprocess
import sys

import pytest

from tests.conftest import ROOT


def run(*arguments: str) -> None:
    options = ("-q", "-n", "2", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.parametrize("cases", ["fake_cuda_cases.py", "fake_ranks_cases.py"])
def test_training_and_generation_on_a_gpu_that_is_not_there(cases):
    run(f"tests/gpu/{cases}")
