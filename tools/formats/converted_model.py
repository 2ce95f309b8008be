"""Convert the config and the weights of a checkpoint to a different attention variant."""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from model.build import build_model
from model.transformer import Transformer
from run import checkpoint
from run.compose import CONFIGS, compose, parse_overrides
from run.settings import as_typed, flatten
from tools.formats.attention_conversion import convert_layer
from tools.formats.layer_change import Change, Layers, Weights
from tools.formats.layer_knobs import attention_kinds, attention_knobs

# Options that presets set but a conversion cannot change: the model keeps its own values, unless
# an override names them.
PRESERVED_OPTIONS = ("qk_norm", "rope_fraction", "head_dim", "bias")


def convert_config(tree: dict, overrides: list[str]) -> dict:
    """Return a model's config after its attention is changed by overrides as in train.py.

    Raises ValueError for overrides that change nothing or do not fit the model, and OverrideError
    for an unknown preset.
    """
    # attention=PRESET selects a preset, attention.KEY=VALUE sets an option.
    options = parse_options(overrides)
    preset = options.pop("", None)
    if preset is None:
        attention = set_options(tree, options)
    else:
        sizes = [f"model.{key}={tree[key]}" for key in ("dim", "depth", "heads")]
        composed = compose([*sizes, f"attention={preset}"])
        kinds, _ = attention_kinds(composed.model["attention"], tree["depth"])
        words = in_kinds(overrides, kinds)
        options = parse_options(words)
        options.pop("")
        composed = compose([*sizes, *words])
        explicit = options.keys() | preset_options(preset)
        attention = inherit_options(tree, composed.model["attention"], explicit)
    if attention == tree["attention"]:
        raise ValueError(
            f"the overrides change nothing ({' '.join(overrides)}). fix: choose a different "
            "preset or different values"
        )
    converted = tree | {"attention": attention}
    try:
        checkpoint.dry_run(converted)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"invalid attention ({' '.join(overrides)}: {error})") from None
    return converted


def parse_options(overrides: list[str]) -> dict:
    """Return option values by key; the key of a preset is "". Raises like convert_config()."""
    options = {}
    for parsed in parse_overrides(overrides):
        group, _, key = parsed.key_or_group.partition(".")
        if group != "attention":
            raise ValueError(
                f"only attention can be converted ({parsed.input_line}). "
                "fix: attention=PRESET or attention.KEY=VALUE"
            )
        options[key] = parsed.value()
    return options


def in_kinds(overrides: list[str], kinds: dict[str, dict]) -> list[str]:
    """Return the overrides, with each hybrid option set in every kind of layer that has it."""
    words = []
    for word in overrides:
        key, _, value = word.partition("=")
        option = key.removeprefix("attention.")
        holders = [kind for kind, knobs in kinds.items() if kind and option in knobs]
        words += [f"attention.kinds.{kind}.{option}={value}" for kind in holders] or [word]
    return words


def preset_options(preset: str) -> set[str]:
    """Return the options whose values a conversion takes from the preset, not from the model."""
    # gqa.yaml lists every option, because the other presets extend it; only kv_heads defines gqa.
    if preset == "gqa":
        return {"kv_heads"}
    keys = set(set_keys(preset))
    return {key for key in keys if key.rpartition(".")[2] not in PRESERVED_OPTIONS}


def set_keys(preset: str) -> Iterator[str]:
    """Yield the options set in a preset's file and in the presets that it extends, except gqa."""
    if preset == "gqa":
        return
    content = read_preset(preset)
    own_keys = {key for key, _ in flatten(content) if key != "defaults"}
    # A preset of another mechanism repeats options of gqa, such as rope_base: keep the model's.
    # The exception is `chunk`, which is a mask in gqa, but the number of tokens computed at once in
    # a recurrence.
    if "defaults" not in content:
        own_keys -= read_preset("gqa").keys() - {"chunk"}
    yield from own_keys

    # An entry is PRESET, PRESET@kinds.KIND or {/attention@kinds.KIND: PRESET}.
    for entry in content.get("defaults", []):
        if isinstance(entry, dict):
            ((group, parent),) = entry.items()
            kind = group.partition("@")[2]
        else:
            parent, _, kind = entry.partition("@")
        for key in set_keys(parent):
            yield f"{kind}.{key}" if kind else key


def read_preset(name: str) -> dict:
    """Read the YAML file of an attention preset."""
    return yaml.safe_load((CONFIGS / "attention" / f"{name}.yaml").read_text(encoding="utf-8"))


def set_options(tree: dict, options: dict) -> dict:
    """Return a model's attention config with these options set in each layer kind that has them."""
    attention = deepcopy(tree["attention"])
    kinds, _ = attention_kinds(attention, tree["depth"])
    for key, value in options.items():
        # kinds.KIND.OPTION sets one kind of layer, OPTION sets all kinds.
        is_known = False
        for kind, knobs in kinds.items():
            option = key.removeprefix(f"kinds.{kind}.")
            if option in knobs:
                knobs[option] = value
                is_known = True
        if not is_known:
            raise ValueError(f"unknown option (attention.{key}). fix: attention=PRESET")
    return attention


def inherit_options(tree: dict, preset: dict, explicit: set[str]) -> dict:
    """Return the attention `preset`, with the values in `tree` for options not in `explicit`.

    Raises ValueError if the model's layers have different values for one option of the preset.
    """
    # Group the model's layers by the kind that they have in the preset.
    attention = deepcopy(preset)
    kinds, kind_of_layer = attention_kinds(attention, tree["depth"])
    layers_by_kind = defaultdict(list)
    for kind, knobs in zip(kind_of_layer, attention_knobs(tree), strict=True):
        layers_by_kind[kind].append(knobs)

    # All layers of a kind have the same options, so their old values must agree.
    for kind, knobs in kinds.items():
        prefix = f"kinds.{kind}." if kind else ""
        for key in knobs:
            if prefix + key in explicit or key.startswith("_"):
                continue
            values = [layer[key] for layer in layers_by_kind[kind] if key in layer]
            if any(value != values[0] for value in values):
                fix = f"attention.{prefix}{key}=VALUE for all layers"
                # If the mechanism stays the same, the layers can keep their pattern.
                mechanisms = {layer["_target_"] for layer in layers_by_kind[kind]}
                if not kind and mechanisms == {knobs["_target_"]}:
                    words = [
                        f"attention.{name}={as_typed(knobs[name])}" for name in sorted(explicit)
                    ]
                    fix = f"{' '.join(words)}, which keeps the layers' pattern; or {fix}"
                raise ValueError(
                    f"layers have different values of an option ({key}: {values}). fix: {fix}"
                )
            if values:
                knobs[key] = values[0]
    return attention


@torch.no_grad()
def load_converted(model: Transformer, tree: dict, path: Path) -> list[list[Change]]:
    """Load a checkpoint into a model with a new attention variant; return each layer's changes.

    `tree` is the config of `model`. Parameters without a counterpart in the old model keep their
    values. Raises ValueError for a conversion without a formula.
    """
    old_tree = checkpoint.load_model_config(path)
    # The file is memory-mapped, so unused weights take no memory.
    stored = load_file(path / "model.safetensors")
    old_blocks = build_model(old_tree, "meta").blocks
    layers = Layers(
        old=[block.attention for block in old_blocks],
        new=[block.attention for block in model.blocks],
        stored=stored,
        context=model.context,
    )
    # First the weights outside attention, then the attention of each layer.
    parameters = model.state_dict()
    others = {name: tensor for name, tensor in stored.items() if ".attention." not in name}
    copy_weights(others, parameters)
    changes = []
    _, kind_of_layer = attention_kinds(tree["attention"], tree["depth"])
    knobs = zip(attention_knobs(old_tree), attention_knobs(tree), kind_of_layer, strict=True)
    for layer, (old_knobs, new_knobs, kind) in enumerate(knobs):
        weights = layers.read(layer)
        layer_changes = []
        if old_knobs != new_knobs:
            with fix_of_kind(kind):
                weights, layer_changes = convert_layer(layers, layer, weights)
        changes.append(layer_changes)
        copy_weights(weights, parameters, prefix=f"blocks.{layer}.attention.")
    return changes


@contextmanager
def fix_of_kind(kind: str) -> Iterator[None]:
    """Rewrite the fix of a ValueError raised in the block to use this layer kind's options."""
    try:
        yield
    except ValueError as error:
        problem, separator, fix = str(error).partition("fix: ")
        if kind:
            fix = re.sub(r"\battention\.(?=\w+=)", f"attention.kinds.{kind}.", fix)
        raise ValueError(problem + separator + fix) from None


def copy_weights(weights: Weights, parameters: Weights, prefix: str = "") -> None:
    """Copy each weight into the parameter whose name is `prefix` followed by the weight's name."""
    for name, weight in weights.items():
        parameter = parameters[prefix + name]
        assert weight.shape == parameter.shape  # else it would be broadcast
        parameter.copy_(weight)


def describe(changes: list[list[Change]]) -> list[str]:
    """Return a line for each change: the layers that it affects, and whether it is exact."""
    layers = defaultdict(list)
    for layer, layer_changes in enumerate(changes):
        for change in layer_changes:
            kind = "exact" if change.is_exact else "approximate"
            layers[f"{change.text} ({kind})"].append(layer)
    return [f"{text}: layers {numbers}" for text, numbers in layers.items()]
