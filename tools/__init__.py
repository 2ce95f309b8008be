"""Commands for runs and models:  python -m tools.NAME"""

import sys
from importlib import import_module

from run import errors

COMMANDS = (
    "attention_map",
    "bench",
    "compare",
    "convert",
    "cost",
    "doctor",
    "evaluate",
    "export_hf",
    "import_hf",
)

ANSWERS_FIRST = ("compare", "cost")  # these import torch only after parsing arguments


def import_torch() -> None:
    """Import torch, which takes seconds."""
    from run.progress import waiting  # imports tqdm

    with waiting("loading PyTorch"):
        import_module("torch")


# `python -m tools.NAME` imports this package before any other module.
if sys.argv[0] == "-m" and "-m" in sys.orig_argv:
    errors.begin_command()
    name = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    if name.removeprefix("tools.") not in COMMANDS:
        nearest = errors.suggest(name, COMMANDS) or "NAME"
        errors.exit_with(
            errors.INPUT,
            f"unknown command (python -m {name}). fix: python -m tools.{nearest} --help; the "
            f"commands are {', '.join(COMMANDS)}",
        )
    if name.removeprefix("tools.") not in ANSWERS_FIRST:
        import_torch()
