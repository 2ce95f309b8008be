"""Parsing of command-line arguments, shared by the commands that do not use Hydra."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from run import errors


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of a description, and adds the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default:
            return super()._get_help_string(action)
        return action.help


# Options of other programs, and ours; "prompt" is an argument without dashes.
OTHER_OPTIONS = {
    "--temp": "--temperature",
    "--max-tokens": "--max-new-tokens",
    "--max-length": "--max-new-tokens",
    "--length": "--max-new-tokens",
    "--n-predict": "--max-new-tokens",
    "--num-tokens": "--max-new-tokens",
    "--num-return-sequences": "--num-samples",
    "--repeat-penalty": "--repetition-penalty",
    "--rep-pen": "--repetition-penalty",
    "--prompt": "prompt",
    "--start": "prompt",
    "--text": "prompt",
    "--file": "--prompt-file",
    "--ckpt": "--run",
    "--checkpoint": "--run",
    "--checkpoint-dir": "--run",
    "--model": "--run",
    "--model-path": "--run",
    "--run-dir": "--run",
    "--out-dir": "--out",
    "--output": "--out",
    "--output-dir": "--out",
    "--precision": "--dtype",
    "--stop-sequence": "--stop",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with a fix, which ends in `hint`.

    Underscores in the name of an option are taken as dashes, and options of other programs are
    refused with ours.
    """

    def __init__(self, command: str, description: str, hint: str):
        super().__init__(
            command, description=description, formatter_class=HelpFormatter, allow_abbrev=False
        )
        self.hint = hint

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        errors.flush(sys.stdout)  # the reader of --help may have ended
        super().exit(status, message)

    def error(self, message: str, fix: str | None = None) -> NoReturn:
        fix = fix or f"{self.prog} --help; {self.hint}"
        # An option may be written as an override of train.py: temperature=0.5.
        key, equals, value = message.removeprefix("unrecognized arguments: ").partition("=")
        option = f"--{key.replace('_', '-')}"
        if equals and option in self._option_string_actions:
            fix = f"{option} {value}"
        self.exit(2, f"error: {message}. fix: {fix}\n")

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        for index, word in enumerate(words):
            if word == "--":  # what follows are no options
                break
            if word.startswith("--"):
                words[index] = self.known_option(word, words[index + 1 : index + 2])
        return super().parse_known_args(words, namespace)

    def known_option(self, word: str, following: list[str]) -> str:
        """A word --NAME or --NAME=VALUE with the name as it is spelled here.

        Ends the process with the fix for one that another program has, or that is mistyped.
        """
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        known = [option for option in self._option_string_actions if option.startswith("--")]
        if name in known:
            return f"{name}{equals}{value}"
        ours = OTHER_OPTIONS.get(name)
        has_prompt = any(action.dest == "prompt" for action in self._actions)
        if ours == "prompt" and has_prompt:
            text = shlex.quote(value or " ".join(following))
            self.error(f"unrecognized arguments: {word}", f"the prompt without an option, {text}")
        if ours not in known:
            ours = errors.suggest(name, known)
        if ours is not None:
            fix = ours
            if self._option_string_actions[ours].nargs != 0:
                fix += f" {shlex.quote(value or ' '.join(following) or 'VALUE')}"
            self.error(f"unrecognized arguments: {word}", fix)
        return word


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


def run_path(path: Path | str) -> Path:
    """The path of a run or a checkpoint; where there is no NAME, it is runs/NAME if that exists."""
    path = Path(path)
    named = Path("runs", path)
    if not path.exists() and named.exists():
        return named
    return path


def bounded_number(
    number_type: type, minimum: float, maximum: float = sys.maxsize
) -> Callable[[str], float]:
    """Return a `type` for argparse: a number from `minimum` to `maximum` (inclusive)."""
    assert minimum <= maximum

    def parse(text: str) -> float:
        number = number_type(text)
        if minimum <= number <= maximum:
            return number
        allowed = f"at least {minimum:g}"
        if maximum < sys.maxsize:
            allowed = f"from {minimum:g} to {maximum:g}"
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")

    parse.__name__ = number_type.__name__  # argparse names it in its own errors
    return parse
