"""Parsing of command-line arguments, shared by commands other than train.py."""

import argparse
import difflib
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

DTYPES = ("auto", "fp32", "bf16", "int8")  # dtypes of the weights that --dtype accepts


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of a description, and adds defaults, except null, false and 0."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default:
            return super()._get_help_string(action)
        return action.help


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, with the option nearest to a mistyped one."""

    def __init__(self, command: str, description: str):
        super().__init__(
            command, description=description, formatter_class=HelpFormatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        fix = f"{self.prog} --help"
        typed = re.search(r"unrecognized arguments:.*?(--[\w-]+)", message)
        options = re.findall(r"--[\w-]+", self.format_help())
        if typed and (nearest := difflib.get_close_matches(typed[1], options, 1)):
            fix = nearest[0]
        self.exit(2, f"error: {message}. fix: {fix}\n")


def end_with_reader() -> None:
    """End this command quietly when `| head` has read enough. Only for commands that only print."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def add_run_option(parser: Parser) -> None:
    """Add --run, the model to load."""
    parser.add_argument(
        "--run",
        type=user_path,
        help="run or checkpoint (default: the run in runs/ with the newest checkpoint)",
    )


def add_model_options(
    parser: Parser, auto_dtype: str = "bf16 on a CUDA GPU with native bf16, else fp32"
) -> None:
    """Add --run, --device and --dtype; `auto_dtype` describes the dtype with --dtype auto."""
    add_run_option(parser)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda", "mps"),
        default="auto",
        help="auto: a GPU if available",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help=f"dtype of the weights; auto: {auto_dtype}"
    )


def add_batch_option(parser: Parser) -> None:
    parser.add_argument(
        "--batch-size", type=bounded_number(int, 1), default=8, help="sequences per forward pass"
    )


def user_path(text: str) -> Path:
    """Parse a path for argparse, expanding ~ to the home folder, as in `--out=~/model`."""
    return Path(os.path.expanduser(text))


def bounded_number(
    number_type: type, minimum: float, maximum: float = sys.maxsize
) -> Callable[[str], float]:
    """Return an argparse `type` for numbers from `minimum` to `maximum` (inclusive)."""
    assert minimum <= maximum

    def parse(text: str) -> float:
        number = number_type(text)
        if minimum <= number <= maximum:
            return number
        most = "" if maximum == sys.maxsize else f" and at most {maximum:g}"
        raise argparse.ArgumentTypeError(f"must be at least {minimum:g}{most}, got {text}")

    parse.__name__ = number_type.__name__  # argparse names it in its own errors
    return parse
