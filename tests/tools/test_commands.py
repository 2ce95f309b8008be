"""Every command documents its options, and refuses misplaced arguments by name."""

import re
from pathlib import Path

import pytest

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


def test_options_cannot_be_abbreviated(command):
    """Otherwise, --prompt would be accepted as an abbreviation of --prompt-file."""
    result = command("generate.py", "--prompt", "Once")
    assert result.code == 2 and "unrecognized arguments: --prompt" in result.err


# Commands with a wrong or missing argument, and a word of the error.
MISPLACED = {
    "evaluate runs/drawn": "--text",
    "export_hf runs/drawn mine": "--out",
    "import_hf runs/drawn --out mine": "runs/drawn",
    "cost --attention gqa,mha": "--attention",
    "cost attention=gqa,mhaa": "attention=mha",
    "bench train --attention mha": "--attention",
    "compare runs/drawn runs/other": "runs/drawn",
}


@pytest.mark.parametrize("call", MISPLACED)
def test_a_misplaced_argument_is_refused_by_name(command, drawn_run, call):
    name, *words = call.split()
    file = "compare/__main__.py" if name == "compare" else f"{name}.py"
    result = command(f"tools/{file}", *words)
    *_, line = result.err.splitlines()
    assert line.startswith("error: ") and MISPLACED[call] in line
    assert result.code in (1, 2) and not result.out and not Path("mine").exists()
