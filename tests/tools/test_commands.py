"""Every command says what it takes, and every other module that it is none."""

import re
import subprocess
import sys

import pytest

import tools
from tests.conftest import ROOT

# The modules of tools/ by the names that python -m takes, and those of them that run when called.
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"): path
    for path in sorted((ROOT / "tools").rglob("*.py"))
    if path.name != "__init__.py"
}
COMMANDS = {
    name: path for name, path in MODULES.items() if "__main__" in path.read_text(encoding="utf-8")
}
OTHERS = [name for name in MODULES if name not in COMMANDS]


def test_the_commands_are_listed():
    assert list(COMMANDS) == [f"tools.{name}" for name in tools.COMMANDS]


@pytest.mark.parametrize("name", ["generate", *COMMANDS])
def test_help_has_examples_and_each_default_once(command, name):
    path = COMMANDS.get(name, ROOT / "generate.py")
    call = "python generate.py" if name == "generate" else f"python -m {name}"
    result = command(str(path.relative_to(ROOT)), "--help")
    assert (result.code, result.err) == (0, "")
    usage, *texts = result.out.split("\n\n")
    assert usage.startswith(f"usage: {call} ")
    assert max(map(len, result.out.splitlines())) <= 100
    # An example is in the text, and not only in the usage.
    assert call in "".join(texts)
    assert not re.findall(r"\(default: (?:None|False|\[\])\)", result.out)
    assert texts[-1].startswith("options:")  # nothing dangles behind them
    for option in re.findall(r"\n  (-.*?)(?=\n  -|\n\n|$)", result.out, re.DOTALL):
        assert option.count("(default:") <= 1, option
        assert re.search(r"\s{2,}\w", option), f"{option} is not explained"


@pytest.mark.parametrize("name", [*OTHERS, "tools", "tools.kost", *COMMANDS])
def test_a_module_that_is_no_command_says_so(monkeypatch, capfd, name):
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
    assert line.startswith(f"error: not a command (python -m {name}). fix: ")
    assert all(command in line for command in tools.COMMANDS)
    assert ("fix: python -m tools.cost --help" in line) == (name == "tools.kost")


def test_an_option_is_not_abbreviated(command):
    """generate.py --prompt would be its --prompt-file."""
    result = command("generate.py", "--prompt", "Once")
    assert result.code == 2 and "unrecognized arguments: --prompt" in result.err


def test_python_asks_the_package_first():
    words = [sys.executable, "-m", "tools.latency"]
    result = subprocess.run(words, cwd=ROOT, stderr=subprocess.PIPE, encoding="utf-8")
    assert result.returncode == 2 and result.stderr.startswith("error: not a command")
