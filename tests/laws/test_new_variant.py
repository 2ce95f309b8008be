"""A new attention is a file in model/attention/ and a yaml in configs/attention/, and nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conftest import ROOT

HERE = Path(__file__).parent
TREE = (
    "checkpoints",
    "common",
    "configs",
    "data",
    "docs",
    "inference",
    "model",
    "tests",
    "tools",
    "training",
)
FILES = ("README.md", "generate.py", "pyproject.toml", "train.py")
# all that is parametrised by the attentions, or goes over them
EVERY = (
    "test_build", "test_compare", "test_configs", "test_cost", "test_export", "test_laws", "test_loss", "test_slots",
    "test_training",
)  # fmt: skip
CASES = {"average": EVERY}


@pytest.mark.parametrize("name", CASES)
def test_a_variant_of_two_files_keeps_every_law(name, tmp_path):
    # a copy of this repository, with as few other attentions as its defaults need
    for folder in TREE:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, tmp_path / file)
    for preset in (tmp_path / "configs" / "attention").glob("*.yaml"):
        if preset.stem != "gqa":
            preset.unlink()
    (ROOT / ".cache").mkdir(exist_ok=True)
    (tmp_path / ".cache").symlink_to(ROOT / ".cache")  # where matvec.cpp is compiled to, once

    # the variant
    shutil.copy(HERE / "variant" / f"{name}.py", tmp_path / "model" / "attention")
    shutil.copy(HERE / "variant" / f"{name}.yaml", tmp_path / "configs" / "attention")

    # its tests
    files = [f"tests/{file}.py" for file in CASES[name]]
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", "--junit-xml", "results.xml")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", f"{name} or every_attention", *files],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    cases = [*ElementTree.parse(tmp_path / "results.xml").getroot().iter("testcase")]
    assert not [case for case in cases if len(case) > 0]  # failed or skipped
    assert {case.get("classname").partition(".")[2] for case in cases} == set(CASES[name])


def test_the_cases_are_all_files_that_go_over_the_attentions():
    found = {path.stem for path in HERE.glob("test_*.py") if "VARIANTS" in path.read_text()}
    # Two of them need a GPU, or a build of torch for one.
    assert found == {*EVERY, "test_gpu", "test_triton", Path(__file__).stem}
