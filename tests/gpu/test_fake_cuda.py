"""Run the cases on a fake GPU in separate processes.

The first backward in a process starts one autograd thread per known device. A process with such
threads cannot be forked, but other tests fork theirs.
"""

import subprocess
import sys

import pytest

from tests.conftest import ROOT


def run_cases(name: str, mark: str) -> None:
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", "-m", mark)
    command = [sys.executable, "-m", "pytest", *options, f"tests/gpu/fake_{name}_cases.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.parametrize("name", ["training", "decoding", "ranks"])
def test_the_cases_on_a_fake_gpu_pass(name):
    run_cases(name, "not long")


@pytest.mark.long
@pytest.mark.parametrize("name", ["training", "decoding"])
def test_the_cases_of_covered_presets_pass(name):
    run_cases(name, "long")
