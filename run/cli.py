"""Parsing of command-line arguments, shared by the commands that do not use Hydra."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from run import aliases, errors
from run.paths import holding_run, is_run


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of a description, and adds the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default:
            return super()._get_help_string(action)
        return action.help


# Options of other programs and their equivalents here; "prompt" is an argument without dashes.
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
DTYPES = ("auto", "fp32", "bf16", "int8")  # dtypes of the weights that --dtype accepts
# Other programs' switches -> our options for on and for off; None: no option is needed.
OTHER_SWITCHES = {
    "--greedy": ("--temperature 0", None),
    "--sample": (None, "--temperature 0"),
    "--do-sample": (None, "--temperature 0"),
    "--cache": (None, "--no-cache"),
    "--use-cache": (None, "--no-cache"),
    "--use-kv-cache": (None, "--no-cache"),
    "--stream": (None, None),
    "--cpu": ("--device cpu", None),
    "--gpu": ("--device cuda", "--device cpu"),
    "--cuda": ("--device cuda", "--device cpu"),
    "--bf16": ("--dtype bf16", None),
    "--fp32": ("--dtype fp32", None),
    "--int8": ("--dtype int8", None),
    "--load-in-8bit": ("--dtype int8", None),
}
ON = ("", "true", "1", "yes", "on")
OFF = ("false", "0", "no", "off")


class Parser(argparse.ArgumentParser):
    """A parser that reports each error as one line with a fix; the default fix ends with `hint`.

    Underscores in option names are read as dashes. Options of other programs are refused, with a
    fix that names our option. Commands that take overrides pass `check`, which raises an error for
    invalid overrides.
    """

    def __init__(
        self,
        command: str,
        description: str,
        hint: str,
        check: Callable[[list[str]], object] | None = None,
    ):
        super().__init__(
            command, description=description, formatter_class=HelpFormatter, allow_abbrev=False
        )
        self.hint = hint
        self.check = check

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        errors.flush(sys.stdout)  # the reader of the help text may have exited
        with suppress(OSError):  # of a full standard error, which Python 3.11.2 does not ignore
            super().exit(status, message)
        raise SystemExit(status)

    def error(self, message: str, fix: str | None = None) -> NoReturn:
        fix = fix or f"{self.prog} --help; {self.hint}"
        # The user may have typed an option as an override of train.py: temperature=0.5.
        key, equals, value = message.removeprefix("unrecognized arguments: ").partition("=")
        option = f"--{key.replace('_', '-')}"
        required = message.removeprefix("the following arguments are required: ")
        if required in self._option_string_actions:
            fix = f"{required} {self._option_string_actions[required].metavar}"
        if message.startswith("one of the arguments "):
            fix = " or ".join(self.choices())
        if equals and option in self._option_string_actions:
            fix = f"{option} {value}"
        self.exit(2, f"error: {message}. fix: {fix}\n")

    def choices(self) -> Iterator[str]:
        """Return the arguments of which one is required, as the user would type them."""
        for group in self._mutually_exclusive_groups:
            for action in group._group_actions if group.required else ():
                words = action.option_strings[:1]
                if not words or action.nargs != 0:
                    words.append(action.metavar or action.dest.upper())
                yield " ".join(words)

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if not {"-h", "--help"} & set(words):
            for index, word in enumerate(words):
                if word == "--":  # no options follow
                    break
                if word.startswith("--"):
                    words[index] = self.known_option(word, words, index)
            self.check_positionals(words)
        return super().parse_known_args(words, namespace)

    def known_option(self, word: str, words: list[str], index: int) -> str:
        """Return `words[index]`, the option `word` (--NAME or --NAME=VALUE), in our spelling.

        Exits with an error and a fix if the option is mistyped or belongs to another program.
        """
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        following = words[index + 1 : index + 2]
        known = [option for option in self._option_string_actions if option.startswith("--")]
        problem = f"unrecognized arguments: {word}"
        if name in known:
            is_switch = self._option_string_actions[name].nargs == 0
            if equals and is_switch:
                fix = name if value.lower() in ON else f"leave {name} out"
                self.error(f"this option takes no value ({word})", fix)
            return f"{name}{equals}{value}"
        self.check_switch(name, (value or "".join(following)).lower(), problem)
        ours = OTHER_OPTIONS.get(name)
        has_prompt = any(action.dest == "prompt" for action in self._actions)
        if ours == "prompt" and has_prompt:
            text = shlex.quote(value or " ".join(following))
            self.error(problem, f"pass the prompt without an option: {text}")
        is_model = "--run" in (name, ours) and "--run" not in known
        if is_model and any(action.dest in ("model", "folder") for action in self._actions):
            text = shlex.quote(value or " ".join(following))
            self.error(problem, f"pass the folder without an option: {text}")
        if ours not in known:
            ours = errors.suggest(name, known)
            if self.check is not None and is_key(name):
                ours = None
        if ours is not None:
            fix = ours
            if ours == "--run":
                run = holding_run(value or "".join(following))
                following = following if run is None else [str(run)]
                value = value if run is None else ""
            if self._option_string_actions[ours].nargs != 0:
                fix += f" {shlex.quote(value or ' '.join(following) or 'VALUE')}"
            self.error(problem, fix)
        if self.check is not None and name != "--run":
            self.refuse_options(words)
        return word

    def check_switch(self, name: str, value: str, problem: str) -> None:
        """Exit with an error for a switch in OTHER_SWITCHES if its fix is one of our options."""
        is_on = value not in OFF
        if name.startswith("--no-") and name not in OTHER_SWITCHES:
            name = f"--{name.removeprefix('--no-')}"
            is_on = not is_on
        fixes = OTHER_SWITCHES.get(name, (None, None))
        options = [fix.split()[0] for fix in fixes if fix is not None]
        if name not in OTHER_SWITCHES or not set(options) <= self._option_string_actions.keys():
            return
        fix = fixes[0] if is_on else fixes[1]
        self.error(problem, fix or f"leave it out: {self.prog} always does this")

    def refuse_options(self, words: list[str]) -> NoReturn:
        """Exit with an error for options that should be overrides, such as --attention gqa,mha."""
        # Imported only here, because this import takes longer than the rest of a command's --help.
        from run.options import options_problem, split_options

        ours = []
        others = []
        current = ours
        for word in words:
            name = word.partition("=")[0]
            if word.startswith("-"):
                current = ours if name in self._option_string_actions else others
            elif "=" in word:
                current = ours
            current.append(word)
        overrides = [word for word in ours if re.match(r"[\w.+~/]+=", word)]
        _, options = split_options(others)
        problem, _, fix = options_problem(overrides, options, self.check).partition(". fix: ")
        self.error(problem, fix)

    def check_positionals(self, words: list[str]) -> None:
        """Exit with an error if a run is given without --run, or a new folder without --out.

        The fix includes all missing options.
        """
        positionals = [action for action in self._actions if not action.option_strings]
        if any(action.nargs in ("*", "+") for action in positionals):
            return
        free, given = self.split_words(words)
        wanted = ({"--run", "--out"} & self._option_string_actions.keys()) - given
        # A prompt may equal the name of a run, but is unlikely to equal its path.
        has_prompt = bool(positionals) and positionals[0].dest == "prompt"
        runs = [word for word in free if is_run(word) and ("/" in word or not has_prompt)]
        options = {}
        if "--run" in wanted and runs:
            options["--run"] = runs[0]
            free.remove(runs[0])
        surplus = free[len(positionals) :]
        if "--out" in wanted and surplus:
            options["--out"] = surplus[0]
        if options:
            fixes = [f"{option} {shlex.quote(word)}" for option, word in options.items()]
            fixes += self.missing_options(given | options.keys())
            fixes += [action.dest.upper() for action in positionals[len(free) :]]
            self.error(f"unrecognized arguments: {' '.join(options.values())}", " ".join(fixes))

    def split_words(self, words: list[str]) -> tuple[list[str], set[str]]:
        """Return the positional arguments, and the names of the options."""
        free = []
        given = set()
        is_value = False
        for word in words:
            if word == "--":  # all arguments that follow are positional
                break
            name, equals, _ = word.partition("=")
            action = self._option_string_actions.get(name)
            if action is not None:
                given.add(name)
                is_value = action.nargs is None and not equals
                continue
            if not is_value and not word.startswith("-"):
                free.append(word)
            is_value = False
        return free, given

    def missing_options(self, given: set[str]) -> Iterator[str]:
        """Return the required options that are not in `given`, as the user would type them."""
        for action in self._actions:
            if action.required and action.option_strings and not given & {*action.option_strings}:
                yield f"{action.option_strings[0]} {action.metavar}"
        for group in self._mutually_exclusive_groups:
            switches = []
            is_given = False
            for action in group._group_actions:
                is_given = is_given or bool(given & {*action.option_strings})
                if action.nargs == 0:
                    switches += action.option_strings
            if group.required and not is_given:
                yield from switches[:1]


def is_key(option: str) -> bool:
    """Return whether an option is a key of train.py, such as --dim, in a command with overrides."""
    from run.settings import defaults, preset_keys  # imported here, because it imports pydantic

    key = option.lstrip("-").replace("-", "_")
    own = {known.rpartition(".")[2] for known in (*defaults(), *preset_keys())}
    return key in own or aliases.is_foreign(key)


def add_run_option(parser: Parser) -> None:
    """Add --run, the model to load."""
    parser.add_argument(
        "--run",
        type=user_path,
        help="run or checkpoint (default: the run in runs/ with the newest checkpoint)",
    )


def add_model_options(
    parser: Parser, auto_dtype: str = "bf16 on a CUDA GPU that computes it natively, else fp32"
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
        allowed = f"at least {minimum:g}"
        if maximum < sys.maxsize or number > maximum:
            allowed = f"from {minimum:g} to {maximum:g}"
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")

    parse.__name__ = number_type.__name__  # argparse names it in its own errors
    return parse
