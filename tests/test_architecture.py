"""Who may import whom: model/ and data/ know nothing of each other, of Hydra or of the run."""

import ast
import subprocess
import sys

import pytest

from tests.conftest import ROOT

ALLOWED = {
    "common": {"tqdm", "common"},
    "model": {"torch", "model"},
    "data": {"torch", "numpy", "sentencepiece", "datasets", "huggingface_hub", "pyarrow", "tqdm", "data", "common"},
}
SLOW = {"datasets", "wandb", "transformers", "matplotlib", "pyarrow", "huggingface_hub"}


def imported(tree: ast.AST) -> set[str]:
    nodes = [*ast.walk(tree)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_they_may(package):
    for path in (ROOT / package).rglob("*.py"):
        strangers = imported(ast.parse(path.read_text())) - ALLOWED[package] - sys.stdlib_module_names
        assert not strangers, f"{path} imports {strangers}"


@pytest.mark.parametrize("command", ["train", "generate"])
def test_slow_libraries_are_imported_only_where_they_are_used(command):
    code = f"import {command}, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not SLOW & set(loaded.stdout.split())
