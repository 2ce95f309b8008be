"""Expand the overrides of a comparison into its variants. This module does not import torch."""

import re
from itertools import product
from typing import TYPE_CHECKING

from run.errors import OverrideError
from run.settings import (
    GROUPS,
    as_text,
    check_choices,
    compose,
    is_one_number,
    nearest_choices,
    parse_overrides,
    sweep_of,
)

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

Sweep = dict[str, list[str]]  # the overrides (KEY=VALUE) of each key, one per value
Variants = dict[str, list[str]]  # the overrides of each variant, by its name; the baseline first
OWN_KEYS = {  # keys that a comparison sets in each run -> what to type instead
    "run_dir": "--dir FOLDER",
    "resume": "run the same command again, which resumes interrupted runs",
}


def expand_sweep(overrides: list[str]) -> Sweep:
    """Expand Hydra sweeps (A,B or range or glob).

    Raises OverrideError for an unknown key or choice, and ValueError if the first variant has a
    value that train.py does not accept.
    """
    sweep = {}
    # Runs on different texts cannot be compared, so a comma in data.path is part of the path.
    typed = [word.lstrip("+") for word in overrides]
    parsed = [as_text(word) if word.startswith("data.path=") else word for word in typed]
    for word, override in zip(typed, parse_overrides(parsed), strict=True):
        key = override.get_key_element()
        check_sweep(override)
        sweep[key] = [word]
        if override.is_discrete_sweep():
            sweep[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]

    for key, words in sweep.items():
        if key in OWN_KEYS:
            raise ValueError(
                f"this key cannot be set in a comparison ({words[0]}). fix: {OWN_KEYS[key]}"
            )
        if key in GROUPS:
            check_choices(key, [word.partition("=")[2] for word in words])
    compose([words[0] for key, words in sweep.items() if key != "seed"], typed)
    return sweep


def check_sweep(override: "Override") -> None:
    """Raise OverrideError for a list in place of several values, and for commas in a number."""
    word = override.input_line
    key, _, value = word.partition("=")
    sweep = sweep_of(override)
    if is_one_number(value):
        fix = f"{key}={value.replace(',', '')}"
        raise OverrideError(f"numbers must not contain commas (got {word}). fix: {fix}")
    if sweep is not None and sweep != word:
        names = sweep.partition("=")[2].split(",")
        if key in GROUPS:
            names = nearest_choices(key, names)
        fix = f"{key}={','.join(names)}"
        raise OverrideError(f"write several values without brackets (got {word}). fix: {fix}")


def name_variants(sweep: Sweep) -> Variants:
    """Name each combination after the values of the swept keys, such as mla-lr-0.01.

    Raises ValueError if two combinations have the same name.
    """
    # A single variant is named after its attention, followed by the attention's own settings.
    named_keys = [key for key, values in sweep.items() if len(values) > 1 or key == "name"]
    if not named_keys or any(key.startswith("attention.") for key in named_keys):
        named_keys.append("attention")
    variants = {}
    for combination in product(*sweep.values()):
        # A config group adds only its value to the name; any other key also adds its last part.
        parts = []
        for override in combination:
            key, _, value = override.partition("=")
            if key in named_keys:
                if key not in (*GROUPS, "name"):
                    parts.append(key.rpartition(".")[2])
                parts.append(value)

        # A name is also a folder name: letters, digits, dots and dashes.
        name = re.sub(r"[^\w.]+", "-", "-".join(parts), flags=re.ASCII).strip("-.") or "run"
        if name in variants:
            raise ValueError(f"two variants have the same name ({name}). fix: leave one out")
        # All runs are judged on the same data: all held-out text, or all held-out rows of a task.
        variants[name] = ["eval_tokens=99999999", *combination, f"name={name}"]
    return variants
