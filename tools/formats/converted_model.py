"""Pretrained models with another attention: what it is to be, and its weights."""

import json
import re
from collections import defaultdict
from copy import deepcopy
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from model.build import build_model
from model.transformer import Transformer
from run import checkpoint, config
from run.sharding import shard_like
from tools.formats.attention_conversion import Change, Layers, convert_layer
from tools.formats.hf_config import attention_kinds, attention_knobs, with_defaults
from tools.formats.weights import Weights

ATTENTION_KEY = re.compile(r"attention[.=]")
# Options that presets set but a conversion cannot change: the model's own values are used, unless
# an override names them.
PRESERVED_OPTIONS = ("qk_norm", "rope_fraction", "head_dim", "bias")


def convert_config(tree: dict, overrides: list[str]) -> dict:
    """The config of a model whose attention is changed by the overrides of `attention`.

    Raises ValueError for overrides that change nothing or do not fit the model, and HydraException
    for an unknown preset.
    """
    overrides = [override for override in overrides if ATTENTION_KEY.match(override)]
    if not overrides:
        return tree

    # attention=PRESET selects a preset, attention.KEY=VALUE sets an option.
    preset = None
    options = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "attention":
            preset = value
        else:
            options[key.removeprefix("attention.")] = config.override_value(override)

    if preset is None:
        attention = set_options(tree, options)
    else:
        sizes = [f"model.{key}={tree[key]}" for key in ("dim", "depth", "heads")]
        composed = config.compose([*sizes, *overrides])
        explicit = options.keys() | preset_options(preset)
        attention = inherit_options(tree, composed["attention"], explicit)
    if attention == tree["attention"]:
        raise ValueError(
            f"nothing changes ({' '.join(overrides)}). fix: leave out what the model has"
        )
    return tree | {"attention": attention}


def preset_options(preset: str) -> set[str]:
    """The options for which a conversion takes the preset's value instead of the model's."""
    # gqa.yaml lists every option, because the other presets extend it; only one defines it.
    if preset == "gqa":
        return {"kv_heads"}
    content = config.preset_file("attention", preset)
    keys = {key for key, _ in config.flatten(content)}
    # A preset of another mechanism repeats options of gqa, such as rope_base: keep the model's.
    if "defaults" not in content:
        keys -= config.preset_file("attention", "gqa").keys()
    return {key for key in keys if key.rpartition(".")[2] not in PRESERVED_OPTIONS}


def set_options(tree: dict, options: dict) -> dict:
    """The attention of a model with these options set, in every kind of layers that has them."""
    attention = deepcopy(tree["attention"])
    kinds, _ = attention_kinds(attention, tree["depth"])
    for key, value in options.items():
        # kinds.KIND.OPTION addresses one kind, OPTION all of them.
        is_known = False
        for kind, knobs in kinds.items():
            option = key.removeprefix(f"kinds.{kind}.")
            if option in with_defaults(knobs):
                knobs[option] = value
                is_known = True
        if not is_known:
            raise ValueError(f"no such option (attention.{key}). fix: attention=PRESET")
    return attention


def inherit_options(tree: dict, preset: dict, explicit: set[str]) -> dict:
    """The attention `preset`, with the values of the model `tree` for options not in `explicit`.

    Raises ValueError where the model's layers have several values for one option of the preset.
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
                distinct = sorted({json.dumps(value) for value in values})
                raise ValueError(
                    f"layers have several values for one option ({key}: {', '.join(distinct)}). "
                    f"fix: attention.{prefix}{key}=VALUE"
                )
            if values:
                knobs[key] = values[0]
    return attention


@torch.no_grad()
def load_converted(
    model: Transformer, tree: dict, path: Path, moments: list[Tensor] | None = None
) -> list[list[Change]]:
    """Load the weights at `path` into a model with another attention -> the changes of each layer.

    `tree` is the config of `model`. Parameters without a counterpart in the old model keep their
    values. `moments` are, for each layer, the mean (D, D) of x x^T over the inputs x of its
    attention; by default x is white noise times the weights of the norm before.

    Weights are read layer by layer, so memory holds little more than the model. If the model is on
    the meta device, no weights are read, and only the changes are returned.
    Raises ValueError for a conversion without a formula, and for models that differ outside
    attention.
    """
    old_tree = checkpoint.load_config(path)["model"] | {"context": model.context}
    source = build_model(old_tree)
    outside_attention = shapes_outside_attention(model)
    if shapes_outside_attention(source) != outside_attention:
        raise ValueError("models differ in more than attention. fix: leave out model.KEY=VALUE")
    stored_tensors = checkpoint.check_weights(source, path)
    is_meta = next(model.parameters()).is_meta

    def read(prefix: str) -> Weights:
        """The old parameters whose names begin with `prefix`, by the rest of their names."""
        weights = {}
        for stored, lazy in stored_tensors:
            names = [name for name in stored.shapes if name.startswith(prefix)]
            if names:
                tensor = torch.empty(lazy.shape, device="meta") if is_meta else lazy.read()
                # Means are computed in fp32 at least; buffers may be of any type.
                if tensor.dtype in (torch.bfloat16, torch.float16):
                    tensor = tensor.float()
                parameters = stored.from_file(tensor)
                weights |= {name.removeprefix(prefix): parameters[name] for name in names}
        return weights

    def moment(layer: int) -> Tensor:
        if moments is not None:
            return moments[layer]
        norm = read(f"blocks.{layer}.attention_norm.")
        bias = norm.get("bias", torch.zeros_like(norm["weight"]))
        return norm["weight"].square().diag() + bias.outer(bias)

    layers = Layers(
        old=[block.attention for block in source.blocks],
        new=[block.attention for block in model.blocks],
        read=lambda layer: read(f"blocks.{layer}.attention."),
        moment=moment,
        context=model.context,
    )
    weights = model.state_dict()
    changes = []
    knobs = zip(attention_knobs(old_tree), attention_knobs(tree), strict=True)
    for layer, (old_knobs, new_knobs) in enumerate(knobs):
        attention_weights = layers.read(layer)
        layer_changes = []
        if old_knobs != new_knobs:
            attention_weights, layer_changes = convert_layer(layers, layer, attention_weights)
        changes.append(layer_changes)
        for name, tensor in attention_weights.items():
            copy_weight(weights, f"blocks.{layer}.attention.{name}", tensor)
        del attention_weights, tensor  # before the next layer is read
    for name in outside_attention:
        copy_weight(weights, name, read(name)[""])
    return changes


def shapes_outside_attention(model: Transformer) -> dict[str, torch.Size]:
    """The names and shapes of all that is not attention."""
    weights = model.state_dict()
    return {name: weights[name].shape for name in weights if ".attention." not in name}


def describe(changes: list[list[Change]]) -> list[str]:
    """A line for each run of layers with the same changes, and whether they are exact."""
    lines = []
    first = 0
    for layer_changes, run in groupby(changes):
        last = first + len(list(run)) - 1
        texts = []
        for text, is_exact in layer_changes:
            texts.append(f"{text} ({'exact' if is_exact else 'approximate'})")
        if texts:
            layers = f"layer {first}" if first == last else f"layers {first} to {last}"
            lines.append(f"{layers}: {'; '.join(texts)}")
        first = last + 1
    return lines


def copy_weight(weights: Weights, name: str, tensor: Tensor) -> None:
    """Copy a tensor into the parameter `name` of the same shape, which may be sharded."""
    if tensor.shape != weights[name].shape:
        raise ValueError(
            f"weights of another shape ({name}: {list(tensor.shape)}, "
            f"{list(weights[name].shape)}). fix: another attention"
        )
    weights[name].copy_(shard_like(tensor, weights[name]))
