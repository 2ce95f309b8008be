"""Import rules: dependencies point one way, and the commands do not import conversion tools."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from run.compose import compose
from run.settings import flatten
from tests.conftest import ROOT

# Each package ("room") may import itself and earlier packages, but model and data must not import
# each other. Both may import only the libraries listed here.
ORDER = ("run", "model", "data", "inference", "training", "tools")
STRANGERS = {"model": {"data"}, "data": {"model"}}
LIBRARIES = {
    "model": {"torch"},
    "data": {"torch", "numpy", "sentencepiece", "tokenizers", "datasets", "huggingface_hub"}
    | {"filelock", "pyarrow", "tqdm", "annotated_types"},
}
WITHOUT_HYDRA = ("model", "data", "inference")
SLOW = {
    "torch._dynamo",
    "datasets",
    "wandb",
    "transformers",
    "matplotlib",
    "pyarrow",
    "huggingface_hub",
}
COMMANDS = ("train", "generate")
FILES = [path for room in ORDER for path in (ROOT / room).rglob("*.py")]
FILES += [ROOT / f"{name}.py" for name in COMMANDS]


@cache
def imports(path: Path) -> set[str]:
    """The modules that a file imports anywhere, and the names imported from them, such as a.b.c."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imported_files(path: Path) -> set[Path]:
    """The project files that a file imports, except __init__.py."""
    names = imports(path)
    return {file for file in FILES if module_of(file) in names and file.stem != "__init__"}


def reachable_files(waiting: list[Path]) -> set[Path]:
    """The project files that are imported, directly or not, by the files in `waiting`."""
    reached = set()
    while waiting:
        file = waiting.pop()
        if file not in reached:
            reached.add(file)
            waiting += imported_files(file)
    return reached


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("room", ORDER)
def test_packages_import_only_earlier_packages(room):
    allowed = set(ORDER[: ORDER.index(room) + 1]) - STRANGERS.get(room, set())
    for path in (ROOT / room).rglob("*.py"):
        imported = {name.partition(".")[0] for name in imports(path)}
        ours = imported & {*ORDER, *COMMANDS, "tests"}
        assert ours <= allowed, f"{path} imports {ours - allowed}"
        libraries = imported - ours - sys.stdlib_module_names
        assert libraries <= LIBRARIES.get(room, libraries), f"{path} imports {libraries}"
        if room in WITHOUT_HYDRA:
            assert not imported & {"hydra", "omegaconf", "wandb"}, path


def test_imports_have_no_cycles():
    graph = {path: imported_files(path) for path in FILES}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_line_count_in_the_readme_is_correct():
    """Counts all files that the commands import, including in functions and for default presets."""
    settings = compose([]).model_dump()
    named = {
        value.rpartition(".")[0] for key, value in flatten(settings) if key.endswith("_target_")
    }
    waiting = [ROOT / f"{name}.py" for name in COMMANDS]
    waiting += [file for file in FILES if module_of(file) in named]
    files = reachable_files(waiting)
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (stated,) = re.findall(r"run some ([\d,]+) lines", readme)
    assert int(stated.replace(",", "")) == round(lines, -2)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_neither_tools_nor_unused_attention_variants(command):
    modules = {module_of(path) for path in reachable_files([ROOT / f"{command}.py"])}
    assert not {name for name in modules if name.startswith("tools.")}
    modules = {name for name in modules if not name.startswith("model.attention.kernels.")}
    core = {"model.attention.base", "model.attention.softmax"}
    assert {name for name in modules if name.startswith("model.attention.")} <= core


def test_slow_libraries_are_imported_only_in_the_functions_that_use_them():
    code = f"import {', '.join(COMMANDS)}, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    )
    assert not SLOW & set(loaded.stdout.split())
