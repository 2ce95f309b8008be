"""Commands around runs:  python -m tools.NAME"""

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

# Python has imported nothing else yet when `python -m` begins with this package.
if sys.argv[0] == "-m" and "-m" in sys.orig_argv:
    errors.begin_command()
    name = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    if name.removeprefix("tools.") not in COMMANDS:
        errors.exit_with(
            errors.INPUT,
            f"not a command (python -m {name}). "
            f"fix: python -m tools.NAME --help, with NAME one of {', '.join(COMMANDS)}",
        )
    from run.progress import waiting  # which imports tqdm

    with waiting("loading PyTorch"):
        import_module("torch")
