"""The command line of train.py: overrides, --help, --cfg job, and errors for other options.

torch takes seconds to import, so it is imported only if both run_dir and resume are given.
"""

import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import NoReturn

from omegaconf import OmegaConf

from run import aliases, errors
from run.errors import OverrideError
from run.paths import is_run, run_path
from run.settings import (
    CHOSEN,
    CONFIGS,
    COPIES,
    GROUPS,
    HELP,
    ONE_CONFIG,
    PARTS,
    Settings,
    choices,
    compose,
    defaults,
    has_several_values,
    key_of,
    named_choice,
)

EXAMPLES = """Train a language model.

  python train.py attention=mha max_minutes=10
  python train.py data=text data.path=my/stories.txt model=15m
  python train.py run_dir=runs/NAME resume=true
  torchrun --nproc_per_node=2 train.py model=124m

Each key is shown with its default."""
# The keys of train.py, grouped by the headings of --help.
SECTIONS = {
    "Presets (configs/GROUP/NAME.yaml); GROUP=NAME --help lists the keys of a preset": CHOSEN,
    "The run": ("name", "run_dir", "resume", "init_from", "seed"),
    "Length": ("steps", "tokens_per_parameter", "max_minutes", "max_epochs"),
    "Batches": ("context", "batch_tokens", "micro_batch", "document_mask"),
    "Loss and gradients": ("clip", "z_loss", "distill", "distill_weight"),
    "Device": ("device", "precision", "compile", "sharded", "activation_checkpointing"),
    "Evaluation, checkpoints and logs": (
        "eval_every",
        "eval_tokens",
        "save_every",
        "sample_every",
        "log_every",
        "profile",
        "wandb",
    ),
}


# Short names of Hydra's options.
SHORT = {
    "-c": "--cfg",
    "-cd": "--config-dir",
    "-cn": "--config-name",
    "-cp": "--config-path",
    "-h": "--help",
    "-i": "--info",
    "-m": "--multirun",
    "-p": "--package",
    "-r": "--run",
}
CONFIG_FILES = ("--config", "--config-file", "--config-name", "--config-path", "--config-dir")
WITH_VALUE = (*CONFIG_FILES, "--cfg", "--package", "--info")
PRINTED = "--cfg job prints the whole resolved config"
# Hydra options that have no effect here -> the reason, and a command that takes the overrides.
HYDRA_OPTIONS = {
    "--cfg": (PRINTED, "python train.py --cfg job"),
    "--multirun": ("tools.compare trains several runs", "python -m tools.compare"),
    **dict.fromkeys(CONFIG_FILES, (ONE_CONFIG, "python train.py")),
    "--info": (PRINTED, "python train.py --cfg job"),
    "--package": (PRINTED, "python train.py --cfg job"),
    "--resolve": (PRINTED, "python train.py --cfg job"),
    "--run": ("train.py trains a single run", "python train.py"),
    "--hydra-help": ("--help lists all keys", "python train.py --help"),
    "--shell-completion": ("--help lists all keys", "python train.py --help"),
}


def read_command_line(arguments: list[str]) -> tuple[Settings, list[str]]:
    """Return the settings of `python train.py ARGUMENTS`, and the overrides that they come from.

    Exits after --help and --cfg job. Raises the errors of `compose`, and ValueError for other
    options.
    """
    overrides, options = split_options(arguments)
    if "--help" in options:
        print_and_exit(help_text(overrides))
    # The printed config is always resolved, so --resolve changes nothing.
    is_printed = options.get("--cfg") == "job" and options.keys() <= {"--cfg", "--resolve"}
    if options and not is_printed:
        raise ValueError(options_problem(overrides, options))
    for word in overrides:
        if "=" not in word and is_run(word):
            resumed = shlex.join([f"run_dir={run_path(word)}", "resume=true"])
            fix = f"{resumed}; or, to start from its weights, {shlex.quote(f'init_from={word}')}"
            raise ValueError(f"a run is not an override ({word}). fix: {fix}")

    # torch is needed only to resume the run in run_dir, whose saved overrides are prepended.
    if {"run_dir", "resume"} <= {key_of(word) for word in overrides}:
        from run.folder import add_saved_overrides

        overrides = add_saved_overrides(overrides)
    settings = compose(overrides)
    if is_printed:
        print_and_exit(OmegaConf.to_yaml(settings.model_dump()))
    return settings, overrides


def split_options(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Split arguments into overrides, and options (which begin with a dash) with their values.

    Several values of an option, as in --seed 0 1, are joined by commas.
    """
    overrides = []
    options = {}
    waiting = list(reversed(arguments))
    while waiting:
        word = waiting.pop()
        if not word.startswith("-"):
            overrides.append(word)
            continue
        option, _, value = word.partition("=")
        option = SHORT.get(option, option).replace("_", "-")
        takes_value = option in WITH_VALUE or option not in HYDRA_OPTIONS
        values = [value] if value else []
        if not value and takes_value:
            while waiting and not re.match("-|[^=]+=", waiting[-1]):
                values.append(waiting.pop())
        # In Hydra, -c is short for --cfg; in other programs it names a settings file.
        if option == "--cfg" and re.search(r"\.ya?ml$", value or "".join(values)):
            option = "--config"
        options[option] = ",".join(word.rstrip(",") for word in values)
    return overrides, options


def options_problem(
    overrides: list[str], options: dict[str, str], check: Callable[[list[str]], object] = compose
) -> str:
    """Return an error line, with a fix, for Hydra options and for options that should be overrides.

    `check` raises for overrides that the command does not accept.
    """
    hydra_options = {}
    typed = []
    words = []
    for option, value in options.items():
        if option in HYDRA_OPTIONS:
            hydra_options[option] = value
            continue
        # An option without a value is a switch.
        key = option.lstrip("-").replace("-", "_")
        switch = "true"
        if key.startswith("no_") and not value:
            key = key.removeprefix("no_")
            switch = "false"
        words.append(f"{key}={aliases.our_value(key, value or switch)}")
        typed.append(f"{option} {value}".rstrip())

    if not words:
        option, value = next(iter(hydra_options.items()))
        reason, _ = HYDRA_OPTIONS[option]
        fix = hydra_call(option, value, overrides)
        return f"{reason} ({f'{option} {value}'.rstrip()}). fix: {fix}"

    # Options of other programs, such as --lr 1e-3, possibly together with a Hydra option.
    fix = as_overrides(overrides, words, check)
    told, semicolon, remark = fix.partition("; ")
    if hydra_options and all("=" in word for word in shlex.split(told)):
        option, value = next(iter(hydra_options.items()))
        fix = hydra_call(option, value, [*overrides, *shlex.split(told)]) + semicolon + remark
    return f"overrides have the form KEY=VALUE, without dashes (got {', '.join(typed)}). fix: {fix}"


def as_overrides(
    overrides: list[str], words: list[str], check: Callable[[list[str]], object]
) -> str:
    """Return the fix for options that should have been given as overrides.

    `words` are these options as overrides; `overrides` are the ones already given.
    """
    try:
        check([*overrides, *words])
    except (ValueError, OverrideError) as error:
        problem, _, fix = str(error).splitlines()[0].partition(". fix: ")
        if fix.startswith("python -m "):  # a complete command
            return fix
        # Keep the correct overrides.
        named = problem.partition("(")[2].rstrip(")").split(", ")
        wrong = {problem.split()[0], *named}
        right = [word for word in words if not wrong & {word, key_of(word)}]
        return f"{shlex.join(right)} {fix}".strip()
    return shlex.join(words)


def hydra_call(option: str, value: str, overrides: list[str]) -> str:
    """Return the command that replaces a Hydra option, with these overrides."""
    _, call = HYDRA_OPTIONS[option]
    words = [word for word in overrides if not re.match("hydra[./]", word)]
    choice = named_choice(value)
    if option in CONFIG_FILES and choice is not None:
        words.append(choice)
    elif option in ("--config", "--config-file") and not words:
        return HELP
    is_sweep = any(has_several_values(word) for word in words)
    if option == "--multirun" and not is_sweep:
        words.insert(0, "attention=gqa,mha")
    if call.startswith("python train.py"):  # this command trains a single run
        words = [word.partition(",")[0] if has_several_values(word) else word for word in words]
    return shlex.join([*call.split(), *words])


def print_and_exit(text: str) -> NoReturn:
    print(text.rstrip())
    errors.flush(sys.stdout)
    raise SystemExit(0)


def help_text(overrides: list[str]) -> str:
    """Return the text of `python train.py OVERRIDES --help`.

    It shows examples, each group and key with its default, and the preset keys of each group that
    is named in the overrides.
    """
    schemas = Settings.model_json_schema()["properties"]
    values = defaults()
    lines = [EXAMPLES]
    for title, keys in SECTIONS.items():
        lines.append(f"\n{title}:\n")
        for key in keys:
            schema = schemas.get(key, {})
            text = schema.get("description", PARTS.get(key, "sets several keys at once"))
            types = []
            for alternative in schema.get("anyOf", [schema]):
                kinds = alternative.get("enum", [alternative.get("type")])
                types += [errors.as_typed(kind) for kind in kinds]
            presets = choices(key)
            if presets:
                names = ", ".join(word.partition("=")[2] for word in presets)
                lines.append(f"  {key}={values[key]}")
                lines += wrap(f"{text}: {names}")
            else:
                lines.append(f"  {key}={values[key]}  ({', '.join(types)})")
                lines += wrap(text)
    return "\n".join([*lines, *preset_help(overrides)])


def wrap(text: str) -> list[str]:
    """Wrap text to the terminal's width, indented below a key."""
    width = shutil.get_terminal_size().columns
    indent = 6 * " "
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)


def preset_help(overrides: list[str]) -> Iterator[str]:
    """Yield lines about the keys of all groups in the overrides, with the keys' values."""
    named = {key_of(word).partition(".")[0] for word in overrides}
    groups = [group for group in GROUPS if group in named]
    if not groups:
        return
    settings = compose(overrides).model_dump()
    for group in groups:
        tree = settings["model"][group] if group in PARTS else settings[group]
        yield f"\nKeys of {group}, with these overrides:\n"
        yield from key_lines(tree, group, preset_comments(group))


def key_lines(tree: dict, path: str, comments: dict[tuple[str, str], str]) -> Iterator[str]:
    """Yield a line for each overridable key of nested dicts, with its value and its comment."""
    target = tree.get("_target_", "")
    for name, value in tree.items():
        key = f"{path}.{name}"
        if name.startswith("_") or key in COPIES:
            continue
        if isinstance(value, dict):
            yield from key_lines(value, key, comments)
            continue
        comment = comments.get((target, name)) or comments.get(("", name), "")
        yield f"  {key}={errors.as_typed(value)}  {comment}".rstrip()


def preset_comments(group: str) -> dict[tuple[str, str], str]:
    """Return the comments on the keys in a group's presets, by the _target_ and name of the key.

    The empty _target_ has the comments of the default preset, whose keys other presets inherit.
    """
    comments = {}
    default = f"{group}={defaults()[group]}"
    for choice in sorted(choices(group), key=lambda choice: choice != default):
        targets = {}  # by their indentation
        text = (CONFIGS / f"{choice.replace('=', '/')}.yaml").read_text(encoding="utf-8")
        for line in text.splitlines():
            match = re.match(r"( *)(\w+): *(.*?)( +# (?P<comment>.*))?$", line)
            if match is None:
                continue
            indentation, name, value, *_ = match.groups()
            if name == "_target_":
                targets[indentation] = value
            elif match["comment"]:
                target = targets.get(indentation, "")
                comments.setdefault((target, name), match["comment"])
                comments.setdefault(("", name), match["comment"])
    return comments
