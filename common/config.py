"""The configuration: composing it from configs/, and checking it before anything is built."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common import errors
from common.instantiate import ROOT

LARGEST = 2**24  # of a size


class Rule(NamedTuple):
    """What the value of a key must be: a test of it, and how an error describes it."""

    is_valid: Callable[[object], bool]
    wanted: str


def is_nonnegative(value: object) -> bool:
    """Whether a value is a finite number from 0. A flag is no number."""
    return type(value) in (int, float) and 0 <= value < math.inf


def is_positive(value: object) -> bool:
    return is_nonnegative(value) and value > 0


def is_no_bad_number(value: object) -> bool:
    """Whether a value is no number, such as a name or null, or is one from 0."""
    return type(value) not in (int, float) or is_nonnegative(value)


def is_flag_or_size(value: object) -> bool:
    return type(value) is bool or (type(value) is int and 0 < value <= LARGEST)


def is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


def is_name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\w[\w.-]*", value, re.ASCII) is not None


def integer_from(minimum: int) -> Rule:
    """A rule for integers of at least the minimum."""
    wanted = f"a whole number from {minimum}"
    return Rule(lambda value: type(value) is int and value >= minimum, wanted)


def one_of(*choices: object) -> Rule:
    """A rule for some values. 1 is not true, although Python takes them for equal."""

    def is_valid(value: object) -> bool:
        return any(value == choice and type(value) is type(choice) for choice in choices)

    return Rule(is_valid, " or ".join(map(str, choices)).lower())


def optional(rule: Rule) -> Rule:
    """A rule that allows null too."""
    wanted = f"null or {rule.wanted}"
    return Rule(lambda value: value is None or rule.is_valid(value), wanted)


# Rules that several keys have.
POSITIVE = Rule(is_positive, "a number above 0")
NONNEGATIVE = Rule(is_nonnegative, "a number from 0")
TEXT = Rule(is_text, "text")
FLAG = one_of(True, False)

# Rules for the keys at the top of configs/train.yaml.
RULES: dict[str, Rule] = {
    "name": Rule(is_name, "letters, digits, dots and dashes"),
    "run_dir": optional(TEXT),
    "seed": integer_from(0),
    "device": one_of("auto", "cpu", "cuda", "mps"),
    "precision": one_of("auto", "fp32", "bf16", "fp16"),
    "compile": one_of("auto", True, False),
    "steps": optional(integer_from(1)),
    "max_minutes": optional(POSITIVE),
    "context": integer_from(2),
    "batch_tokens": integer_from(1),
    "micro_batch": integer_from(1),
    "clip": optional(POSITIVE),
    "sharded": FLAG,
    "activation_checkpointing": FLAG,
    "z_loss": NONNEGATIVE,
    "eval_every": integer_from(1),
    "save_every": integer_from(1),
    "sample_every": integer_from(1),
    "log_every": integer_from(1),
    "resume": FLAG,
    "document_mask": FLAG,
    "init_from": optional(TEXT),
    "wandb": one_of("disabled", "offline", "online"),
}

# Rules for every value of a group. Constructors check types and what goes together.
GROUP_RULES: dict[str, Rule] = {
    "model": Rule(is_flag_or_size, f"a whole number from 1 to {LARGEST}"),
    "attention": Rule(is_no_bad_number, "from 0"),
    "ffn": Rule(is_no_bad_number, "from 0"),
    "norm": Rule(is_no_bad_number, "from 0"),
    "data": Rule(is_no_bad_number, "from 0"),
    "optimizer": Rule(is_no_bad_number, "a number from 0"),
    "schedule": NONNEGATIVE,
}
GROUPS = tuple(GROUP_RULES)
CHECKED_BY_CONSTRUCTORS = ("attention", "ffn", "norm", "softcap")


def find_problems(config: dict, world: int) -> list[str]:
    """Return a line for each key of a resolved config that is unknown, missing or out of range.

    `world` is the number of processes that train together.
    """
    problems = []
    # Check that the keys are those of configs/train.yaml.
    for key in config:
        if key not in RULES and key not in GROUPS:
            problems.append(f"unknown key ({key}). fix: remove it")
    for key in (*RULES, *GROUPS):
        if key not in config:
            problems.append(f"{key} is missing. fix: give it back")

    # Check values one by one.
    for key, rule in RULES.items():
        if key in config and not rule.is_valid(config[key]):
            problems.append(f"{key} must be {rule.wanted} (got {config[key]!r}). fix: change it")
    for group, rule in GROUP_RULES.items():
        values = config.get(group, {})
        if not isinstance(values, dict):
            problems.append(f"{group} must be a group (got {values!r}). fix: {group}=NAME")
            continue
        for key, value in group_values(values):
            if not rule.is_valid(value):
                problem = f"{group}.{key} must be {rule.wanted} (got {value!r})"
                problems.append(f"{problem}. fix: change it")
    if problems:
        return problems

    # Check what goes together.
    if config["steps"] is None and config["max_minutes"] is None:
        problems.append("the run has no end (steps=null, max_minutes=null). fix: set one of them")
    if config["sharded"] and world == 1:
        fix = "torchrun --nproc_per_node=N"
        problems.append(f"one process has nothing to shard over (sharded=true). fix: {fix}")
    batch_problem = find_batch_problem(config, world)
    if batch_problem is not None:
        problems.append(batch_problem)
    return problems


def group_values(group: dict) -> Iterator[tuple[str, object]]:
    """Yield (key, value) for what a group's rule applies to: numbers, and items of lists."""
    for key, value in flatten(group):
        if key.startswith(CHECKED_BY_CONSTRUCTORS) or "_target_" in key or "_partial_" in key:
            continue
        items = value if isinstance(value, list) else [value]
        for item in items:
            yield key, item


def find_batch_problem(config: dict, world: int) -> str | None:
    """Return a line if a batch is not a whole number of micro-batches on every process.

    A batch smaller than one micro-batch a process is fine: it is a smaller micro-batch.
    """
    batch_tokens = config["batch_tokens"]
    micro_batch = config["micro_batch"]
    context = config["context"]
    unit = context * world  # tokens of one sequence on every process
    sequences = batch_tokens // unit  # on each process
    is_whole = batch_tokens % unit == 0
    if is_whole and (sequences < micro_batch or sequences % micro_batch == 0):
        return None

    # Propose the nearest batches below and above, and the largest micro-batch that would do.
    step = micro_batch if sequences >= micro_batch else 1
    below = sequences // step * step
    above = below + step
    fix = f"batch_tokens={above * unit}"
    if below > 0:
        fix = f"batch_tokens={below * unit} or {above * unit}"
    if is_whole:
        divisors = [n for n in range(1, micro_batch) if sequences % n == 0]
        fix += f", or micro_batch={max(divisors)}"
    values = f"{batch_tokens=} {micro_batch=} {context=} processes={world}"
    return f"a batch must be whole micro-batches for every process ({values}). fix: {fix}"


def micro_batch_size(config: dict, world: int) -> int:
    """Sequences per device and forward."""
    return min(config["micro_batch"], config["batch_tokens"] // config["context"] // world)


def is_long_run(config: dict) -> bool:
    """Whether a run is long enough for compilation to pay."""
    steps = config["steps"] or math.inf
    minutes = config["max_minutes"] or math.inf
    return steps >= 200 and minutes >= 3


def flatten(tree: dict, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (key, value) for each leaf of nested dicts; keys are joined by dots."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def compose(overrides: list[str]) -> DictConfig:
    """The config of `python train.py OVERRIDES`, for other commands. Raises HydraException."""
    import hydra  # takes a quarter of a second, which only commands that compose should spend
    from hydra.errors import HydraException, MissingConfigException

    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        try:
            return hydra.compose("train", overrides)
        except MissingConfigException as error:  # an OSError, which would pass for a missing file
            raise HydraException(str(error)) from None


def resolve(cfg: DictConfig) -> dict:
    """Plain dicts. Raises ValueError for an interpolation that leads nowhere."""
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


@contextmanager
def report_errors() -> Iterator[None]:
    """As errors.report_errors, and Hydra's errors of composing with exit code 1."""
    from hydra.errors import HydraException

    try:
        with errors.report_errors():
            yield
    except (HydraException, OmegaConfBaseException) as error:
        errors.exit_with(errors.BUG, composing_problem(error))


def composing_problem(error: Exception) -> str:
    """What an error of Hydra says, without its advice, and a fix of ours."""
    text = re.split(r"\nTo append|\nConfig search path|\nSee https", str(error))[0]
    if "Could not override 'data.path'" in text:
        fix = "data=text or data=tokens, which have one"
    elif "Could not override" in text:
        fix = "configs/ lists the keys of each choice"
        fix += "; a kind of layer has its own: attention.kinds.NAME.KEY"
    else:
        fix = "configs/ has the keys; a value with spaces or commas is quoted twice: 'key=\"a b\"'"
    return f"{text.rstrip('.')}. fix: {fix}"
