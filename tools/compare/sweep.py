"""Expand the overrides of a comparison to its variants. Nothing here imports torch."""

import re
from itertools import product

from run.errors import OverrideError
from run.settings import GROUPS, as_text, choices, compose, parse_overrides, unknown_choice

Sweep = dict[str, list[str]]  # the overrides (KEY=VALUE) that each key takes in turn
Variants = dict[str, list[str]]  # the overrides of each variant, by its name; the baseline first
OWN_KEYS = {  # which a comparison sets in each run, and what to type instead
    "run_dir": "--dir FOLDER",
    "resume": "the same call again, which continues what was cut off",
}


def expand_sweep(overrides: list[str]) -> Sweep:
    """Expand Hydra's sweeps (A,B or range or glob).

    Raises OverrideError for an unknown key or choice, and ValueError for a value that train.py does
    not take, as far as the first variant has it.
    """
    sweep = {}
    # Runs on several texts do not compare, so a comma in the path of a text is part of it.
    typed = [word.lstrip("+") for word in overrides]
    parsed = [as_text(word) if word.startswith("data.path=") else word for word in typed]
    for word, override in zip(typed, parse_overrides(parsed), strict=True):
        key = override.get_key_element()
        sweep[key] = [word]
        if override.is_discrete_sweep():
            sweep[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]

    for key, words in sweep.items():
        if key in OWN_KEYS:
            raise ValueError(f"a comparison sets it itself ({words[0]}). fix: {OWN_KEYS[key]}")
        for word in words:
            if key in GROUPS and word not in choices(key):
                raise OverrideError(unknown_choice(*word.split("=", 1)))
    compose([words[0] for key, words in sweep.items() if key != "seed"], typed)
    return sweep


def name_variants(sweep: Sweep) -> Variants:
    """Name each combination by the values of the keys that are swept, such as mla-lr-0.01.

    Raises ValueError if two combinations have one name.
    """
    # The attention names the only variant, and comes before its own settings.
    named_keys = [key for key, values in sweep.items() if len(values) > 1 or key == "name"]
    if not named_keys or any(key.startswith("attention.") for key in named_keys):
        named_keys.append("attention")
    variants = {}
    for combination in product(*sweep.values()):
        # Groups are named by their value, and other keys also by the last part of the key.
        parts = []
        for override in combination:
            key, _, value = override.partition("=")
            if key in named_keys:
                if key not in (*GROUPS, "name"):
                    parts.append(key.rpartition(".")[2])
                parts.append(value)

        # A name is a folder too: letters, digits, dots and dashes.
        name = re.sub(r"[^\w.]+", "-", "-".join(parts), flags=re.ASCII).strip("-.") or "run"
        if name in variants:
            raise ValueError(f"two variants of one name ({name}). fix: leave one out")
        # All runs are judged by the same text, or the same rows of a task: all that is held out.
        variants[name] = ["eval_tokens=99999999", *combination, f"name={name}"]
    return variants
