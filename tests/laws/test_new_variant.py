"""A new attention variant needs only files in model/attention/ and configs/attention/."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.conftest import ROOT

HERE = Path(__file__).parent
FOLDERS = ("configs", "data", "docs", "inference", "model", "run", "tests", "tools", "training")
FILES = ("README.md", "generate.py", "pyproject.toml", "train.py")


def files_over_all_attentions() -> list[str]:
    """The test files that are parametrized by the attention presets, except GPU tests."""
    files = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        is_over_all = "VARIANTS" in text or "EACH_MECHANISM" in text
        if is_over_all and path != Path(__file__) and path.parent.name != "gpu":
            files.append(str(path.relative_to(ROOT)))
    return files


def test_new_variants_need_only_two_files_each_to_pass_all_tests(tmp_path):
    # Copy this repository with only the attention preset that its defaults need.
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, tmp_path / file)
    for preset in (tmp_path / "configs" / "attention").glob("*.yaml"):
        if preset.stem != "gqa":
            preset.unlink()
    (ROOT / ".cache").mkdir(exist_ok=True)
    (tmp_path / ".cache").symlink_to(ROOT / ".cache")  # where matvec.cpp is compiled only once

    # Add the variant.
    shutil.copy(HERE / "variant" / "average.py", tmp_path / "model" / "attention")
    shutil.copy(HERE / "variant" / "average.yaml", tmp_path / "configs" / "attention")

    # Add the variant of the tutorial in docs/extend.md, and the test of its formula. Blocks of py and
    # yml are new files; blocks of python and yaml quote shipped code.
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    created = r"^`([\w/.]+)`:\n```(?:py|yml)\n(.*?)```"
    for path, code in re.findall(created, page, re.DOTALL | re.MULTILINE):
        (tmp_path / path).write_text(code, encoding="utf-8")
    (test,) = re.findall(r"```py\n(def test_.*?)```", page, re.DOTALL)
    references = tmp_path / "tests" / "model" / "test_references.py"
    references.write_text(references.read_text(encoding="utf-8") + test, encoding="utf-8")

    # Run the tests whose parameters include the variants' names.
    files = [*files_over_all_attentions(), "tests/model/test_references.py"]
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", "--junit-xml", "results.xml")
    selected = "[average or -average or every_attention or head_scale"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", selected, *files],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    cases = [*ElementTree.parse(tmp_path / "results.xml").getroot().iter("testcase")]
    assert not [case for case in cases if len(case) > 0]  # failed or skipped
    tested = {case.get("classname").replace(".", "/") + ".py" for case in cases}
    assert tested == set(files)
