"""Which package may import which: arrows point one way, and nothing imports a command."""

import ast
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# Each package may import itself and those before it, except that model and data know nothing of
# each other, and that model and data know only these libraries.
ORDER = ("run", "model", "data", "inference", "training", "tools")
STRANGERS = {"model": {"data"}, "data": {"model"}}
LIBRARIES = {
    "model": {"torch", "fla"},  # fla is optional: one file needs it, which is imported at use
    "data": {
        "torch",
        "numpy",
        "sentencepiece",
        "tokenizers",
        "datasets",
        "huggingface_hub",
        "pyarrow",
        "tqdm",
    },
}
# A prompt goes through these files in this order, and none imports one that comes after it.
INFERENCE = ("batch", "prompts", "sampling", "speculative", "engine", "text")
WITHOUT_HYDRA = ("model", "data", "inference")
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


def test_a_prompt_never_climbs_back():
    for position, name in enumerate(INFERENCE):
        tree = ast.parse((ROOT / "inference" / f"{name}.py").read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not imported & {f"inference.{later}" for later in INFERENCE[position:]}, name


@pytest.mark.parametrize("command", ["train", "generate"])
def test_slow_libraries_are_imported_only_where_they_are_used(command):
    code = f"import {command}, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not SLOW & set(loaded.stdout.split())
