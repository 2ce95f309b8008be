"""Parsing of command-line arguments, shared by the commands that do not use Hydra."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with a fix. Its epilog must be a hint of what to type."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}. fix: {self.prog} --help; {self.epilog}\n")


def bounded_number(
    number_type: type, minimum: float, maximum: float = sys.maxsize
) -> Callable[[str], float]:
    """Return a `type` for argparse that takes numbers from `minimum` to `maximum` (inclusive)."""

    def parse(text: str) -> float:
        number = number_type(text)
        if minimum <= number <= maximum:
            return number
        bounds = f"at least {minimum:g}"
        if maximum < sys.maxsize:
            bounds = f"from {minimum:g} to {maximum:g}"
        raise argparse.ArgumentTypeError(f"must be {bounds}, got {text}")

    parse.__name__ = number_type.__name__  # argparse names it in its own errors
    return parse
