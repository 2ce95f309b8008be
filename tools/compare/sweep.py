"""Expand the overrides of a comparison into its variants."""

import re
from itertools import product

from run.compose import GROUPS, check_choice, compose, parse_overrides

Sweep = dict[str, list[str]]  # the overrides (KEY=VALUE) of each key, one per value
Variants = dict[str, list[str]]  # the overrides of each variant, by its name; the baseline first
OWN_KEYS = ("run_dir", "resume")  # keys that a comparison sets in each run
TOKENIZERS = ("data.vocab_size", "data.tokenizer")  # the keys of the data that may be swept


def expand_sweep(overrides: list[str]) -> Sweep:
    """Expand Hydra sweeps (A,B or range or glob).

    Raises OverrideError for an unknown key or preset, and ValueError for OWN_KEYS, several values
    of eval_tokens or a data key not in TOKENIZERS, or a value of the first variant that train.py
    does not accept.
    """
    sweep = {}
    for word, override in zip(overrides, parse_overrides(overrides), strict=True):
        key = override.key_or_group
        if key in OWN_KEYS:
            raise ValueError(f"a comparison sets this key itself ({word})")
        sweep[key] = [word.lstrip("+")]
        if override.is_discrete_sweep():
            sweep[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        for each in sweep[key]:
            check_choice(each)
        is_data = key.partition(".")[0] == "data" or key == "eval_tokens"
        if is_data and key not in TOKENIZERS and len(sweep[key]) > 1:
            raise ValueError(f"losses on different data are not comparable. fix: {sweep[key][0]}")
    compose([words[0] for key, words in sweep.items() if key != "seed"])
    return sweep


def name_variants(sweep: Sweep) -> Variants:
    """Name each combination after the values of the swept keys, such as mla-lr-0.01.

    Raises ValueError if two combinations have the same name.
    """
    # A single variant is named after its attention, if one is given. A name with an option of the
    # attention also contains the attention.
    named_keys = [key for key, values in sweep.items() if len(values) > 1 or key == "name"]
    if not named_keys or any(key.startswith("attention.") for key in named_keys):
        named_keys.append("attention")
    variants = {}
    for combination in product(*sweep.values()):
        # A config group adds only its value to the name; other keys also add their last part.
        parts = []
        for override in combination:
            key, _, value = override.partition("=")
            if key in named_keys:
                if key not in (*GROUPS, "name"):
                    parts.append(key.rpartition(".")[2])
                parts.append(value)

        # A name is also a folder name: letters, digits, underscores, dots and dashes.
        name = re.sub(r"[^\w.]+", "-", "-".join(parts), flags=re.ASCII).strip("-.") or "run"
        if name in variants:
            raise ValueError(f"two variants have the same name ({name}). fix: leave one out")
        # By default, runs are judged on all held-out text, or on all held-out rows of a task.
        variants[name] = ["eval_tokens=99999999", *combination, f"name={name}"]
    return variants
