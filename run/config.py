"""The configuration: composing it from configs/, and checking it before anything is built."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from run import errors
from run.instantiate import ROOT

CONFIGS = ROOT / "configs"
LARGEST = 99_999_999  # of a size
CPU_MICRO_BATCH = 8  # sequences, at most; more of them are not faster on a CPU

# Alternatives of a rule, in the words of error messages, each with a regular expression that its
# value matches as JSON. An alternative that is not listed is a literal string, such as cpu.
PATTERNS = {
    "null": "null",
    "true": "true",
    "false": "false",
    "text": r'".*\S.*"',
    "letters, digits, dots and dashes": r'"\w[\w.-]*"',
    "a number of at least 0": r"\d[\d.e+-]*",
    "a number from 0 to 1": r"0(\.\d+)?|1(\.0)?|[\d.]+e-\d+",
    "a number above 0": r"(?!0(\.0)?$)\d[\d.e+-]*",
    "a whole number of at least 0": r"\d+",
    "a whole number of at least 1": r"[1-9]\d*",
    "a whole number of at least 2": r"[2-9]|[1-9]\d+",
    "a whole number from 1 to 99999999": r"[1-9]\d{0,7}",
}

# What the keys at the top of configs/train.yaml must be.
RULES = {
    "name": "letters, digits, dots and dashes",
    "run_dir": "null or text",
    "seed": "a whole number of at least 0",
    "device": "auto or cpu or cuda or mps",
    "precision": "auto or fp32 or bf16 or fp16",
    "compile": "auto or true or false",
    "steps": "null or a whole number of at least 1",
    "max_minutes": "null or a number above 0",
    "max_epochs": "null or a whole number of at least 1",
    "context": "a whole number of at least 2",
    "batch_tokens": "a whole number of at least 1",
    "micro_batch": "null or a whole number of at least 1",
    "clip": "null or a number above 0",
    "sharded": "true or false",
    "activation_checkpointing": "true or false",
    "z_loss": "a number of at least 0",
    "eval_every": "a whole number of at least 1",
    "eval_tokens": "null or a whole number of at least 2",
    "save_every": "a whole number of at least 1",
    "sample_every": "a whole number of at least 1",
    "log_every": "a whole number of at least 1",
    "resume": "true or false",
    "document_mask": "true or false",
    "init_from": "null or text",
    "distill": "null or text",
    "distill_weight": "a number from 0 to 1",
    "wandb": "disabled or offline or online",
}

# What the numbers in a group must be. instantiate() checks types, constructors what goes together.
GROUP_RULES = {
    "model": "a whole number from 1 to 99999999",
    "attention": "a number of at least 0",
    "ffn": "a number of at least 0",
    "norm": "a number of at least 0",
    "data": "a number of at least 0",
    "optimizer": "a number of at least 0",
    "schedule": "a number of at least 0",
}
GROUPS = tuple(GROUP_RULES)
# Not sizes of the model: groups of their own, and what the model's constructor checks.
NO_SIZES = ("model.attention.", "model.ffn.", "model.norm", "model.softcap")


def find_problems(config: dict, world_size: int) -> list[str]:
    """Return a line for each key of a resolved config that is unknown, missing or out of range.

    `world_size` is the number of processes that train together.
    """
    problems = []
    for key in config:
        if key not in RULES and key not in GROUPS:
            problems.append(unknown(key, sys.argv))
    for key, rule in RULES.items():
        if key not in config:
            problems.append(f"{key} is missing. fix: leave ~{key} out")
        elif not is_valid(config[key], rule):
            problems.append(bad_value(key, config[key], rule))

    # In groups, check numbers alone, and those in lists.
    for group, rule in GROUP_RULES.items():
        values = config.get(group)
        if not isinstance(values, dict):
            problems.append(unknown(f"{group}={values}", sys.argv))
            continue
        for key, value in flatten(values, f"{group}."):
            for item in value if isinstance(value, list) else [value]:
                is_number = type(item) in (int, float) and not key.startswith(NO_SIZES)
                if is_number and not is_valid(item, rule):
                    problems.append(bad_value(key, item, rule))
    if problems:
        return problems

    # Check what goes together.
    if config["steps"] is None and config["max_minutes"] is None and config["max_epochs"] is None:
        problems.append(
            "the run has no end (steps=null, max_minutes=null, max_epochs=null). fix: max_minutes=5"
        )
    if config["sharded"] and world_size == 1:
        problems.append(
            "one process has nothing to shard over (sharded=true). "
            "fix: torchrun --nproc_per_node=N train.py, or sharded=false"
        )
    batch_problem = find_batch_problem(config, world_size)
    if batch_problem is not None:
        problems.append(batch_problem)
    return problems


def is_valid(value: object, rule: str) -> bool:
    """Whether a value is one of the alternatives of a rule."""
    text = json.dumps(value)
    patterns = [PATTERNS.get(wanted, f'"{wanted}"') for wanted in rule.split(" or ")]
    return any(re.fullmatch(pattern, text) for pattern in patterns)


def bad_value(key: str, value: object, rule: str) -> str:
    """Describe a value that breaks its rule, with the nearest alternative or else the default."""
    default = json.dumps(defaults(sys.argv).get(key, 1), separators=(",", ":"))
    near = errors.suggest(str(value), rule.split(" or ")) or [default.strip('"')]
    return f"{key} must be {rule} (got {value!r}). fix: {key}={near[0]}"


def unknown(word: str, overrides: list[str]) -> str:
    """Describe a KEY or a GROUP=CHOICE that is not there, with those that it may stand for."""
    # A wrong choice of a group stands for another of that group; no choice at all, for any.
    start = word.partition("=")[0] + "="
    siblings = [choice for choice in choices() if choice.startswith(start)]
    near = []
    if word not in GROUPS:
        near = errors.suggest(word, siblings or [*GROUPS, *choices(), *defaults(overrides)])
    fix = " or ".join(near or siblings) or "python train.py --help, which lists all"
    return f"unknown ({word}). fix: {fix}"


def choices() -> list[str]:
    """List what the groups can be set to, as it is typed: attention=gqa."""
    return sorted(f"{file.parent.name}={file.stem}" for file in CONFIGS.glob("*/*.yaml"))


def defaults(overrides: list[str]) -> dict[str, object]:
    """The keys and values of the groups that are chosen; of a sweep, by its first choice."""
    firsts = [override.partition(",")[0] for override in overrides]
    settings = compose([choice for choice in firsts if choice in choices()])
    for group in ("attention", "ffn", "norm"):
        del settings["model"][group]  # which are groups of their own
    return dict(flatten(settings))


def find_batch_problem(config: dict, world_size: int) -> str | None:
    """Return a line if a batch is not a whole number of micro-batches on every process.

    A batch smaller than one micro-batch a process is fine: it is a smaller micro-batch. Where the
    micro-batch is chosen (null), any whole number of sequences is a whole number of them.
    """
    batch_tokens = config["batch_tokens"]
    micro_batch = 1 if config["micro_batch"] is None else config["micro_batch"]
    context = config["context"]
    unit = context * world_size  # tokens of one sequence on every process
    sequences, rest = divmod(batch_tokens, unit)  # on each process
    step = micro_batch if sequences >= micro_batch else 1
    if rest == 0 and sequences % step == 0:
        return None

    # Propose the nearest batches below and above, and the largest micro-batch that would do.
    below = sequences // step * step
    fixes = [f"batch_tokens={size * unit}" for size in (below, below + step) if size > 0]
    if rest == 0:
        divisors = [n for n in range(1, micro_batch) if sequences % n == 0]
        fixes.append(f"micro_batch={max(divisors)}")
    return (
        "a batch must be whole micro-batches for every process "
        f"({batch_tokens=} micro_batch={config['micro_batch']} {context=} processes={world_size}). "
        f"fix: {' or '.join(fixes)}"
    )


def micro_batch_size(config: dict, world_size: int) -> int:
    """Sequences per device and forward; where they are to be chosen (null), those of a CPU."""
    sequences = sequences_per_process(config, world_size)
    if config["micro_batch"] is not None:
        return min(config["micro_batch"], sequences)
    return max(size for size in range(1, CPU_MICRO_BATCH + 1) if sequences % size == 0)


def sequences_per_process(config: dict, world_size: int) -> int:
    """The sequences of a batch that each process computes."""
    return config["batch_tokens"] // config["context"] // world_size


def flatten(tree: dict, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (key, value) for each leaf of nested dicts; keys are joined by dots."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def compose(overrides: list[str]) -> dict:
    """The settings of `python train.py OVERRIDES`, for notebooks and other commands.

    Raises HydraException for overrides that do not fit, ValueError for an interpolation that leads
    nowhere.
    """
    import hydra  # takes a quarter of a second, which only commands that compose should spend
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    GlobalHydra.instance().clear()  # of train.py, or of a notebook
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        try:
            cfg = hydra.compose("train", overrides, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise HydraException(composing_problem(error, overrides)) from None
    # The name is made of the groups' choices, which are in Hydra's own part of the config.
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_struct(cfg, False)
    del cfg.hydra
    return resolve(cfg)


def preset_file(group: str, name: str) -> dict:
    """What a file of configs/ itself has, before it is composed with its defaults."""
    return OmegaConf.to_container(OmegaConf.load(CONFIGS / group / f"{name}.yaml"))


def override_value(override: str) -> object:
    """The value of `key=value`, as the command line has it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(override).value()


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
        errors.exit_with(errors.BUG, composing_problem(error, sys.argv))


def composing_problem(error: Exception, overrides: list[str]) -> str:
    """What an error of Hydra says, without its advice, and a fix of ours."""
    text = str(error)
    if "fix: " in text:  # compose() has said it
        return text
    refused = r"(?:In 'train': )?Could not (?:override|find|delete from config\.) '(.+?)'"
    if match := re.match(refused, text):
        return unknown(match[1].replace("/", "=", 1), overrides)
    if match := re.search(r"'([^']+?=.+)'(?:\n1\. | requires --multirun)", text):
        return (
            f"several values for one run ({match[1]}). "
            f"fix: python -m tools.compare {shlex.quote(match[1])} or, for a list, KEY=[A,B]"
        )
    text = re.split(r"\nTo append|\nConfig search path|\nSee https", text)[0]
    return (
        f"{text.rstrip('.')}. "
        "fix: KEY=VALUE; a value with spaces or commas is quoted twice: 'KEY=\"a b\"'"
    )
