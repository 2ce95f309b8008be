"""What a configuration must be before anything is built: all that is wrong with it, at once."""

import math
import re
from collections.abc import Callable, Iterator

from omegaconf import DictConfig, OmegaConf

from common.instantiate import ROOT

LARGEST = 2**24  # of a size
Rule = tuple[Callable[[object], bool], str]


def whole(least: int) -> Rule:
    return lambda value: type(value) is int and value >= least, f"a whole number from {least}"


def number_above_zero(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def is_rate(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def is_size(value: object) -> bool:
    return type(value) is bool or (type(value) is int and 0 < value <= LARGEST)


def is_no_bad_number(value: object) -> bool:
    return type(value) not in (int, float) or 0 <= value < math.inf


def flatten_group(group: object) -> list[tuple[str, object]]:
    """(key, value) of all that a group sets, lists taken apart. A model's attention, soft-cap and epsilon are apart."""
    named = flatten(group if isinstance(group, dict) else {})
    named = [
        (key, value)
        for key, value in named
        if not re.search(r"^(attention|softcap|norm_eps)|_target_|_partial_", key)
    ]
    return [
        (key, each)
        for key, value in named
        for each in (value if isinstance(value, list) else [value])
    ]


def one_of(*words: object) -> Rule:
    def holds(value: object) -> bool:
        return any(value == word and type(value) is type(word) for word in words)

    return holds, " or ".join(map(str, words)).lower()


def optional(rule: Rule) -> Rule:
    return lambda value: value is None or rule[0](value), f"null or {rule[1]}"


TEXT: Rule = (lambda value: isinstance(value, str) and value.strip() != "", "text")
FLAG = one_of(True, False)
GROUPS = ("model", "attention", "data", "optimizer", "schedule")
RULES: dict[str, Rule] = {
    "name": (
        lambda value: (
            isinstance(value, str) and re.fullmatch(r"\w[\w.-]*", value, re.ASCII) is not None
        ),
        "letters, digits, dots and dashes",
    ),
    "run_dir": optional(TEXT),
    "seed": whole(0),
    "device": one_of("auto", "cpu", "cuda", "mps"),
    "precision": one_of("auto", "fp32", "bf16", "fp16"),
    "compile": one_of("auto", True, False),
    "steps": optional(whole(1)),
    "max_minutes": optional((number_above_zero, "a number above 0")),
    "context": whole(2),
    "batch_tokens": whole(1),
    "micro_batch": whole(1),
    "clip": optional((number_above_zero, "a number above 0")),
    "sharded": FLAG,
    "activation_checkpointing": FLAG,
    "z_loss": (is_rate, "a number from 0"),
    "eval_every": whole(1),
    "save_every": whole(1),
    "sample_every": whole(1),
    "log_every": whole(1),
    "resume": FLAG,
    "document_mask": FLAG,
    "init_from": optional(TEXT),
    "wandb": one_of("disabled", "offline", "online"),
}
NUMBERS: dict[str, Rule] = {
    "model": (is_size, f"a whole number from 1 to {LARGEST}"),
    "attention": (is_no_bad_number, "from 0"),
    "data": (is_no_bad_number, "from 0"),
    "optimizer": (is_no_bad_number, "a number from 0"),  # flags, words and null are options too
    "schedule": (is_rate, "a number from 0"),
}


def find_problems(config: dict, world: int) -> list[str]:
    """A sentence for each key that is unknown, missing or out of range. `config` is resolved."""
    found = [
        f"unknown key ({key}). fix: remove it"
        for key in config
        if key not in RULES and key not in GROUPS
    ]
    found += [
        f"{key} is missing. fix: give it back" for key in (*RULES, *GROUPS) if key not in config
    ]
    for key, (holds, wanted) in RULES.items():
        if key in config and not holds(config[key]):
            found.append(f"{key} must be {wanted} (got {config[key]!r}). fix: change it")
    for group in GROUPS:
        if group in config and not isinstance(config[group], dict):
            found.append(f"{group} must be a group (got {config[group]!r}). fix: {group}=NAME")
    for group, (holds, wanted) in NUMBERS.items():
        wrong = [
            (key, value) for key, value in flatten_group(config.get(group)) if not holds(value)
        ]
        found += [
            f"{group}.{key} must be {wanted} (got {value!r}). fix: change it"
            for key, value in wrong
        ]
    if not found and config["steps"] is None and config["max_minutes"] is None:
        found.append("the run has no end (steps=null, max_minutes=null). fix: give one of them")
    if not found and config["sharded"] and world == 1:
        found.append(
            "one process has nobody to share with (sharded=true). fix: torchrun --nproc_per_node=N"
        )
    if not found:
        found += batch_problems(
            config["batch_tokens"], config["micro_batch"], config["context"] * world, world
        )
    return found


def batch_problems(tokens: int, micro: int, unit: int, world: int) -> list[str]:
    """`unit`: tokens of one sequence for every process."""
    share = tokens // unit
    if tokens % unit == 0 and (share < micro or share % micro == 0):
        return []
    every = 1 if tokens < micro * unit else micro
    near = [n * unit for n in (share // every * every, (share // every + 1) * every) if n > 0]
    fixes = [f"batch_tokens={' or '.join(map(str, near))}"]
    if tokens % unit == 0:
        fixes.append(f"micro_batch={max(n for n in range(1, micro) if share % n == 0)}")
    given = f"batch_tokens={tokens} micro_batch={micro} context={unit // world} processes={world}"
    return [
        f"a batch must be whole micro-batches for every process ({given}). fix: {', or '.join(fixes)}"
    ]


def is_long_run(config: dict) -> bool:
    """Long enough for compilation to pay."""
    return (config["steps"] or math.inf) >= 200 and (config["max_minutes"] or math.inf) >= 3


def resolve(cfg: DictConfig) -> dict:
    """Plain dicts. Raises ValueError for an interpolation that leads nowhere."""
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


def flatten(tree: dict, path: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        yield from (
            flatten(value, f"{path}{key}.")
            if isinstance(value, dict)
            else [(f"{path}{key}", value)]
        )


def micro_batch_size(config: dict, world: int) -> int:
    """Sequences per device and forward."""
    return min(config["micro_batch"], config["batch_tokens"] // config["context"] // world)


def compose(words: list[str]) -> DictConfig:
    """What these words make of the configs, for other commands."""
    import hydra  # takes a quarter of a second, which only commands that compose should take
    from hydra.errors import HydraException, MissingConfigException

    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        try:
            return hydra.compose("train", words)
        except MissingConfigException as error:  # which would pass for a missing file
            raise HydraException(str(error)) from None
