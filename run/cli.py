"""Parsing of command-line arguments, shared by the commands that do not use Hydra."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from run import errors


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of a description, and adds the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default:
            return super()._get_help_string(action)
        return action.help


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with a fix, which ends in `hint`."""

    def __init__(self, command: str, description: str, hint: str):
        super().__init__(
            command,
            description=description,
            epilog=hint,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        errors.flush(sys.stdout)  # the reader of --help may have ended
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}. fix: {self.prog} --help; {self.epilog}\n")


def add_run_option(parser: Parser) -> None:
    """Add --run, the model to load."""
    parser.add_argument(
        "--run",
        type=user_path,
        help="a run or a checkpoint (default: the run that saved last, in runs/)",
    )


def add_model_options(parser: Parser) -> None:
    """Add the options of all commands that use a model: --run, and how to compute."""
    add_run_option(parser)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda", "mps"),
        default="auto",
        help="auto: a GPU if there is one",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "fp32", "bf16", "int8"),
        default="auto",
        help="of the weights; auto: bf16 on a GPU, else fp32",
    )
    parser.add_argument(
        "--batch-size", type=bounded_number(int, 1), default=8, help="sequences computed together"
    )


def user_path(text: str) -> Path:
    """A `type` for argparse: a path, in which ~ is the home folder, as in `--out=~/model`."""
    return Path(os.path.expanduser(text))


def bounded_number(
    number_type: type, minimum: float, maximum: float = sys.maxsize
) -> Callable[[str], float]:
    """Return a `type` for argparse: a number from `minimum` to `maximum` (inclusive)."""
    assert minimum <= maximum

    def parse(text: str) -> float:
        number = number_type(text)
        if minimum <= number <= maximum:
            return number
        raise argparse.ArgumentTypeError(f"must be from {minimum:g} to {maximum:g}, got {text}")

    parse.__name__ = number_type.__name__  # argparse names it in its own errors
    return parse
