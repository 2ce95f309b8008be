"""Which package may import which: arrows point one way, and nothing imports a command."""

import ast
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# Each package may import itself and those before it, except that model and data know nothing of
# each other, and that model, data and common know only these libraries.
ORDER = ("common", "model", "data", "checkpoints", "inference", "training", "tools")
STRANGERS = {"model": {"data"}, "data": {"model"}}
LIBRARIES = {
    "model": {"torch"},
    "data": {"torch", "numpy", "sentencepiece", "datasets", "huggingface_hub", "pyarrow", "tqdm"},
}
WITHOUT_HYDRA = ("model", "data", "checkpoints", "inference")
SLOW = {"datasets", "wandb", "transformers", "matplotlib", "pyarrow", "huggingface_hub"}


def imported_packages(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_only_those_below_them(package):
    allowed = set(ORDER[: ORDER.index(package) + 1]) - STRANGERS.get(package, set())
    for path in (ROOT / package).rglob("*.py"):
        imported = imported_packages(path.read_text())
        ours = imported & {*ORDER, "train", "generate", "tests"}
        assert ours <= allowed, f"{path} imports {ours - allowed}"
        if package in LIBRARIES:
            libraries = imported - ours - sys.stdlib_module_names
            assert libraries <= LIBRARIES[package], (
                f"{path} imports {libraries - LIBRARIES[package]}"
            )
        if package in WITHOUT_HYDRA:
            assert not imported & {"hydra", "omegaconf", "wandb"}, path


@pytest.mark.parametrize("command", ["train", "generate"])
def test_slow_libraries_are_imported_only_where_they_are_used(command):
    code = f"import {command}, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not SLOW & set(loaded.stdout.split())
