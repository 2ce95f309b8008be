"""Argument parsing shared by the commands."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}. fix: {self.prog} --help; {self.epilog}\n")


def bounded_number(kind: type, least: float, most: float = sys.maxsize) -> Callable[[str], float]:
    """For argparse: text that is a number from `least` to `most`."""

    def parse(text: str) -> float:
        if not least <= kind(text) <= most:
            most_too = f" to {most:g}" if most < sys.maxsize else ""
            raise argparse.ArgumentTypeError(f"must be from {least:g}{most_too}, got {text}")
        return kind(text)

    parse.__name__ = kind.__name__
    return parse
