"""Compose a config from the YAML files in configs/ and the user's overrides, with Hydra."""

import difflib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from run import ROOT
from run.errors import OverrideError
from run.paths import run_path
from run.settings import MIRRORED_KEYS, Settings, describe, flatten

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

CONFIGS = ROOT / "configs"
GROUPS = ("model", "attention", "ffn", "norm", "data", "optimizer", "schedule", "experiment")
MODEL_GROUPS = ("attention", "ffn", "norm")  # their presets become part of the model's config
# Keys with text values that may look like numbers or contain commas, such as file names.
DATA_PATHS = ("data.path", "data.validation")
TEXT_KEYS = ("name", "run_dir", "init_from", *DATA_PATHS, "data.tokenizer")
# Names in nanoGPT and transformers that mean the same as a key of ours.
OTHER_NAMES = {
    "n_layer": "model.depth",
    "num_hidden_layers": "model.depth",
    "n_embd": "model.dim",
    "hidden_size": "model.dim",
    "n_head": "model.heads",
    "num_attention_heads": "model.heads",
    "intermediate_size": "model.hidden",
    "tie_word_embeddings": "model.tied",
    "rms_norm_eps": "model.norm_eps",
    "num_key_value_heads": "attention.kv_heads",
    "rope_theta": "attention.rope_base",
    "sliding_window": "attention.window",
    "block_size": "context",
    "max_position_embeddings": "context",
    "max_iters": "steps",
    "max_steps": "steps",
    "num_train_epochs": "max_epochs",
    "grad_clip": "clip",
    "max_grad_norm": "clip",
    "eval_interval": "eval_every",
    "log_interval": "log_every",
    "save_steps": "save_every",
    "out_dir": "run_dir",
    "warmup_iters": "schedule.warmup",
    "gradient_checkpointing": "activation_checkpointing",
}


def compose(overrides: list[str]) -> Settings:
    """Compose the settings of `python train.py OVERRIDES`, also for notebooks and other commands.

    Raises OverrideError for an unknown key or preset and for a value that cannot be parsed, and
    ValueError, with a line for each problem, for values that are not allowed.
    """
    words = [literal(word) for word in overrides]
    for word in words:
        check_choice(word)
    with open_configs():
        try:
            keys = compose_tree(words)
        except (HydraException, OmegaConfBaseException) as error:
            raise OverrideError(composing_problem(error, words)) from None
    for part in MODEL_GROUPS:
        del keys[part]
    # By default, learning rates are scaled only for randomly initialized weights.
    names = [word.lstrip("+~") for word in overrides]
    gives_reference = any(name.startswith("optimizer.reference") for name in names)
    if keys["init_from"] is not None and "reference" in keys["optimizer"] and not gives_reference:
        keys["optimizer"]["reference"] = None
    # A run given by name is stored in the config as a path.
    source = keys["init_from"]
    if isinstance(source, str) and run_path(source) != Path(source):
        keys["init_from"] = str(run_path(source))
    try:
        return Settings(**keys)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            lines.append(describe(problem["loc"][0], problem["input"], problem["msg"]))
        raise ValueError("\n".join(lines)) from None


def size_words(model: dict) -> list[str]:
    """Return the overrides that give a model the sizes that an attention preset may refer to."""
    return [f"model.{key}={model[key]}" for key in ("dim", "depth", "heads")]


def literal(word: str, text_keys: tuple[str, ...] = TEXT_KEYS) -> str:
    """Return an override as Hydra must read it: text in quotes, and a number such as 1e3 as 1000.

    A + before the key is left out, because no key can be added. Raises ValueError for a word that
    is neither KEY=VALUE nor ~GROUP.KEY, for a key that mirrors another one, and for a text key with
    the value none. Raises OverrideError for a key of Hydra.
    """
    if re.fullmatch(r"~\w+\.[\w.]+", word):  # deletes an option that a new `_target_` lacks
        return word
    key, equals, value = word.lstrip("+").partition("=")
    if not equals or not re.fullmatch(r"[\w.]+", key):
        raise ValueError(
            f"overrides have the form KEY=VALUE (got {word}). fix: python train.py --help"
        )
    if original := original_of(key):
        raise ValueError(f"{key} is a copy of {original} (got {word}). fix: set {original}")
    if key.partition(".")[0] == "hydra":  # would be accepted, but has no effect
        raise OverrideError(f"unknown key ({key})")
    if key in text_keys and value.lower() == "none":
        raise ValueError(f"{word} is text, not null. fix: {key}=null")
    if key in text_keys and not re.match("""null$|$|["'[]""", value):
        # Hydra reads two backslashes in front of a quote as one.
        value = re.sub(r'(\\*)("|$)', r"\1\1\2", value).replace('"', r"\"")
        return f'{key}="{value}"'
    # An integer key accepts only digits; a float key accepts both forms.
    if re.fullmatch(r"\d+(\.\d*)?(e\+?\d+)?", value, re.IGNORECASE) and not value.isdigit():
        number = float(value)
        if number.is_integer() and 0 < number < 2**53:
            value = f"{number:.0f}"
    return f"{key}={value}"


def original_of(key: str) -> str | None:
    """Return the key that a key mirrors, or None."""
    for copy, original in MIRRORED_KEYS.items():
        if key == copy or key.startswith(f"{copy}."):
            return original + key.removeprefix(copy)
    return None


def check_choice(word: str) -> None:
    """Raise OverrideError if an override chooses a preset that does not exist in its group."""
    group, _, name = word.partition("=")
    if group not in GROUPS or name in choices(group):
        return
    names = name.strip("[]").split(",")
    if len(names) > 1 and {*names} <= {*choices(group)}:
        fix = f"python -m tools.compare {group}={','.join(names)} ..."
        raise OverrideError(f"a group takes one preset ({word}). fix: {fix}")
    nearest = difflib.get_close_matches(name, choices(group), 1) or choices(group)
    names = " or ".join(nearest)
    raise OverrideError(f"unknown preset ({word}). fix: {group}={names}")


def open_configs() -> hydra.initialize_config_dir:
    """Return the context in which Hydra reads configs/."""
    GlobalHydra.instance().clear()  # a notebook may have initialized Hydra
    return hydra.initialize_config_dir(str(CONFIGS), version_base="1.3")


def compose_tree(words: list[str]) -> dict:
    """Return the keys of train.yaml and of the chosen presets. Call it within `open_configs`."""
    cfg = hydra.compose("train", words, return_hydra_config=True)
    # The name is composed of the groups' choices, which are in Hydra's section of the config.
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_struct(cfg, False)
    del cfg.hydra
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


def parse_overrides(words: list[str]) -> list["Override"]:
    """Parse overrides, which may be sweeps, into Hydra's objects.

    Raises the same errors as `compose` for words that cannot be parsed.
    """
    with open_configs():
        # A sweep glob(...), which matches the files of configs/, needs the config loader.
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        try:
            # A comma in data.path is part of the path: losses on two texts cannot be compared.
            return parser.parse_overrides([literal(word, DATA_PATHS) for word in words])
        except HydraException as error:
            raise OverrideError(composing_problem(error, words)) from None


def composing_problem(error: Exception, words: list[str]) -> str:
    """Describe Hydra's error, with the nearest key, if any, as the fix. Call in `open_configs`."""
    if isinstance(error, OverrideParseException):
        return f"cannot parse the value ({error.override}); text may need quotes: 'KEY=\"TEXT\"'"
    text = str(error).strip()
    if "--multirun" in text:
        return f"a key takes one value ({text.splitlines()[0]}). fix: python -m tools.compare ..."
    unknown = re.match(r"Could not override '([\w.]+)'", text)
    if unknown is None:
        return text.splitlines()[0]
    problem = f"unknown key ({unknown[1]})"
    nearest = nearest_key(unknown[1], words)
    if nearest is not None:
        problem += f". fix: {nearest}"
    return problem


def nearest_key(key: str, words: list[str]) -> str | None:
    """Return the known keys that an unknown one may mean, such as "A or B", or None."""
    known = [*GROUPS]
    with suppress(HydraException, OmegaConfBaseException):
        choosing = [word for word in words if word.partition("=")[0] in GROUPS]
        known += [name for name, _ in flatten(compose_tree(choosing))]
    known = [name for name in known if original_of(name) is None]
    parent, _, last = key.rpartition(".")
    if OTHER_NAMES.get(last) in known:
        return OTHER_NAMES[last]
    # Prefer a similar sibling, then the same name elsewhere: model.head means model.heads, not
    # optimizer.reference.head, and attention.heads means model.heads, not attention.kv_heads.
    siblings = [name for name in known if name.rpartition(".")[0] == parent]
    for names, cutoff in ((siblings, 0.8), (known, 1.0), (known, 0.8)):
        last_parts = [name.rpartition(".")[2] for name in names]
        for nearest in difflib.get_close_matches(last, last_parts, 1, cutoff):
            return " or ".join(name for name in names if name.rpartition(".")[2] == nearest)
    return None


def choices(group: str) -> list[str]:
    """Return the names of a group's presets."""
    return sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))


def help_text(overrides: list[str]) -> str:
    """Return the text of `python train.py OVERRIDES --help`.

    It is configs/train.yaml, whose comments explain its keys, and the presets of each group. With
    overrides, the files of the presets that they choose follow, and then the whole config.
    """
    parts = [(CONFIGS / "train.yaml").read_text(encoding="utf-8")]
    parts += [f"{group}={' | '.join(choices(group))}" for group in GROUPS]
    for word in overrides:
        group, _, name = word.partition("=")
        if name in choices(group):
            parts += preset_files(group, name)
    if overrides:
        parts.append(f"\n# The whole config\n{OmegaConf.to_yaml(compose(overrides).model_dump())}")
    return "\n".join(parts).rstrip()


def preset_files(group: str, name: str) -> Iterator[str]:
    """Yield the text of a preset's file, and of each preset that it extends."""
    file = CONFIGS / group / f"{name}.yaml"
    yield f"\n# configs/{group}/{name}.yaml\n{file.read_text(encoding='utf-8')}"
    # An entry is PRESET, PRESET@kinds.KIND, or a dict such as {/GROUP@kinds.KIND: PRESET}.
    for entry in OmegaConf.load(file).get("defaults", []):
        parents = [str(entry).partition("@")[0]] if isinstance(entry, str) else entry.values()
        for parent in parents:
            if parent in choices(group):
                yield from preset_files(group, parent)
