"""Every command documents its options, and all other modules report that they are not commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tools
from tests.conftest import ROOT

# The modules in tools/ by their names for python -m, and the subset that are commands.
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"): path
    for path in sorted((ROOT / "tools").rglob("*.py"))
    if path.name != "__init__.py"
}
COMMANDS = {
    name: path for name, path in MODULES.items() if "__main__" in path.read_text(encoding="utf-8")
}
OTHERS = [name for name in MODULES if name not in COMMANDS]


def test_the_list_of_commands_is_complete():
    assert list(COMMANDS) == [f"tools.{name}" for name in tools.COMMANDS]


@pytest.mark.parametrize("name", ["generate", *COMMANDS])
def test_help_shows_examples_and_each_default_once(command, name):
    path = COMMANDS.get(name, ROOT / "generate.py")
    call = "python generate.py" if name == "generate" else f"python -m {name}"
    result = command(str(path.relative_to(ROOT)), "--help")
    assert (result.code, result.err) == (0, "")
    usage, *texts = result.out.split("\n\n")
    assert usage.startswith(f"usage: {call} ")
    assert max(map(len, result.out.splitlines())) <= 100
    # The help text has an example, not only the usage line.
    assert call in "".join(texts)
    assert not re.findall(r"\(default: (?:None|False|\[\])\)", result.out)
    assert texts[-1].startswith("options:")  # no text follows the options
    for option in re.findall(r"\n  (-.*?)(?=\n  -|\n\n|$)", result.out, re.DOTALL):
        assert option.count("(default:") <= 1, option
        assert re.search(r"\s{2,}\w", option), f"{option} is not explained"


@pytest.mark.parametrize("name", [*OTHERS, "tools", "tools.kost", *COMMANDS])
def test_running_a_module_that_is_not_a_command_is_an_error(monkeypatch, capfd, name):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", name, "a=b"])
    monkeypatch.setattr(sys, "argv", ["-m", "a=b"])
    package = compile((ROOT / "tools" / "__init__.py").read_text(encoding="utf-8"), "tools", "exec")
    if name in COMMANDS:
        exec(package, {})
        return
    with pytest.raises(SystemExit) as end:
        exec(package, {})
    (line,) = capfd.readouterr().err.splitlines()
    assert end.value.code == 2
    assert line.startswith(f"error: unknown command (python -m {name}). fix: ")
    assert all(command in line for command in tools.COMMANDS)
    assert ("fix: python -m tools.cost --help" in line) == (name == "tools.kost")


def test_options_cannot_be_abbreviated(command):
    """Otherwise, --prompt would be accepted as an abbreviation of --prompt-file."""
    result = command("generate.py", "--prompt", "Once")
    assert result.code == 2 and "unrecognized arguments: --prompt" in result.err


# Commands with an argument that lacks its option, and the suggested fix.
MISPLACED = {
    "evaluate runs/drawn": "--run runs/drawn --slices",
    "evaluate runs/drawn --lengths": "--run runs/drawn",
    "evaluate --text story.txt drawn": "--run drawn",
    "export_hf runs/drawn": "--run runs/drawn --out FOLDER",
    "export_hf runs/drawn mine": "--run runs/drawn --out mine",
    "export_hf --run runs/drawn mine": "--out mine",
    "export_hf --out mine runs/drawn": "--run runs/drawn",
    "attention_map runs/drawn Ann": "--run runs/drawn --out map.png",
    "attention_map Ann": "--out map.png",
    "import_hf there": "--out FOLDER",
    "import_hf there mine": "--out mine",
    "import_hf --run there --out mine": "pass the folder without an option: there",
    "import_hf runs/drawn --out mine": "python generate.py PROMPT --run runs/drawn",
    "convert --run runs/drawn attention=mqa --out mine": "pass the folder without an option: runs/drawn",
    "convert runs/drawn --attention mqa --out mine": "attention=mqa",
    "convert runs/drawn mqa --out mine": "attention=mqa",
    "convert runs/drawn attention=mqa": "--out FOLDER",
    "cost --attention gqa,mha --context 64": "attention=gqa,mha context=64",
    "cost attention=gqa,mhaa": "attention=gqa,mha",
    "bench train --attention mha": "attention=mha",
    "compare runs/drawn runs/other": "--report runs/drawn runs/other",
}


@pytest.mark.parametrize("call", MISPLACED)
def test_the_error_for_a_misplaced_argument_suggests_its_option(command, drawn_run, call):
    name, *words = call.split()
    file = "compare/__main__.py" if name == "compare" else f"{name}.py"
    result = command(f"tools/{file}", *words)
    *_, line = result.err.splitlines()
    assert line.startswith("error: ") and line.partition(". fix: ")[2] == MISPLACED[call]
    assert result.code in (1, 2) and not result.out and not Path("mine").exists()


@pytest.mark.parametrize("call", ["export_hf runs/drawn", "attention_map runs/drawn Ann"])
def test_the_suggested_fix_for_a_misplaced_run_argument_works(command, drawn_run, call):
    name, *words = call.split()
    fixed = [word for word in words if word != "runs/drawn"]
    command(f"tools/{name}.py", *fixed, *MISPLACED[call].split()).succeeded()


def test_the_package_rejects_modules_that_are_not_commands():
    words = [sys.executable, "-m", "tools.latency"]
    result = subprocess.run(words, cwd=ROOT, stderr=subprocess.PIPE, encoding="utf-8")
    assert result.returncode == 2 and result.stderr.startswith("error: unknown command")
