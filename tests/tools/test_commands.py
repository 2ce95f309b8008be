"""Every command documents its call, and refuses misplaced arguments by name."""

from pathlib import Path

import pytest

from tests.conftest import ROOT

# The file of each command, and how it is called.
CALLS = {"generate.py": "python generate.py"}
for path in sorted((ROOT / "tools").rglob("*.py")):
    if "__main__" in path.read_text(encoding="utf-8"):
        file = path.relative_to(ROOT)
        module = ".".join(file.with_suffix("").parts).removesuffix(".__main__")
        CALLS[str(file)] = f"python -m {module}"


@pytest.mark.parametrize("file", CALLS)
def test_help_shows_how_to_call_the_command(command, file):
    result = command(file, "--help").succeeded()
    usage, *texts = result.out.split("\n\n")
    assert usage.startswith(f"usage: {CALLS[file]} ")
    # The help text has an example, not only the usage line.
    assert CALLS[file] in "".join(texts)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("evaluate runs/drawn", "--text"),
        ("export_hf runs/drawn mine", "--out"),
        ("import_hf runs/drawn --out mine", "runs/drawn"),
        ("cost --attention gqa,mha", "--attention"),
        ("cost attention=gqa,mhaa", "attention=mha"),
        ("bench train attention=mla", "attention=llama"),
        ("compare/__main__ runs/drawn", "runs/drawn"),
        # Otherwise, the command would take it as an abbreviation of --run.
        ("export_hf --ru runs/drawn --out mine", "--ru"),
    ],
)
def test_a_misplaced_argument_is_refused_by_name(command, drawn_run, call, named):
    name, *words = call.split()
    result = command(f"tools/{name}.py", *words)
    *_, line = result.err.splitlines()
    assert line.startswith("error: ") and named in line
    assert result.code in (1, 2) and not result.out and not Path("mine").exists()
