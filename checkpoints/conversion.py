"""Pretrained models with another attention: what it is to be, and its weights."""

import json
import re
from collections import defaultdict
from copy import deepcopy
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from checkpoints import checkpoint
from checkpoints.huggingface.mapping import HYBRID, attention_knobs, with_defaults
from checkpoints.weights import Weights
from common import config
from common.sharding import shard_like
from model.conversion import Change, Layers, convert_layer
from model.materialize import build_model
from model.transformer import Transformer

ATTENTION_KEY = re.compile(r"attention[.=]")
# Knobs that a preset may set and no formula changes: they stay unless an override names them.
KEPT = ("qk_norm", "rope_fraction", "head_dim", "bias")


def convert_config(tree: dict, overrides: list[str]) -> dict:
    """The config of a model with the attention that these overrides of `attention` choose.

    Raises ValueError where they change nothing or do not fit, and HydraException for a preset that
    there is not.
    """
    words = [word for word in overrides if ATTENTION_KEY.match(word)]
    if not words:
        return tree
    presets = [word.partition("=")[2] for word in words if word.startswith("attention=")]
    named = {}
    for word in words:
        key = word.partition("=")[0].removeprefix("attention.")
        if key != "attention":
            named[key] = config.override_value(word)
    if presets:
        sizes = [f"model.{key}={tree[key]}" for key in ("dim", "depth", "heads")]
        chosen = config.compose([*sizes, *words])["attention"]
        attention = inherit(tree, chosen, named.keys() | own_keys(presets[-1]))
    else:
        attention = edit(tree["attention"], named)
    if attention == tree["attention"]:
        raise ValueError(f"nothing changes ({' '.join(words)}). fix: leave out what the model has")
    return tree | {"attention": attention}


def own_keys(preset: str) -> set[str]:
    """The knobs that a preset itself sets, of those that a conversion may change."""
    content = config.preset_file("attention", preset)
    keys = {key for key, _ in config.flatten(content)}
    if preset == "gqa":
        return {"kv_heads"}
    # Another mechanism has some knobs of the same meaning, such as the base of RoPE.
    if "defaults" not in content:
        keys -= config.preset_file("attention", "gqa").keys()
    return {key for key in keys if key.rpartition(".")[2] not in KEPT}


def edit(attention: dict, named: dict) -> dict:
    """The same attention with the knobs `named`, in each of its kinds that has them."""
    attention = deepcopy(attention)
    is_hybrid = attention["_target_"] == HYBRID
    kinds = attention["kinds"] if is_hybrid else {"": attention}
    for key, value in named.items():
        chosen = kinds
        knob = key
        if key.startswith("kinds."):
            kind, _, knob = key.removeprefix("kinds.").partition(".")
            chosen = {kind: kinds.get(kind, {})}
        fitting = [knobs for knobs in chosen.values() if knob in with_defaults(knobs)]
        if not fitting:
            raise ValueError(f"no such option (attention.{key}). fix: attention=PRESET")
        for knobs in fitting:
            knobs[knob] = value
    return attention


def inherit(tree: dict, chosen: dict, named: set[str]) -> dict:
    """The attention `chosen`, whose knobs are those of the model `tree` where they are not `named`.

    Raises ValueError where layers that become alike have several values of a knob.
    """
    kinds = {"": chosen}
    pattern = [""]
    if chosen["_target_"] == HYBRID:
        kinds = chosen["kinds"]
        pattern = chosen["pattern"]
    layers_of = defaultdict(list)
    for layer, old in enumerate(attention_knobs(tree)):
        layers_of[pattern[(layer - tree["depth"]) % len(pattern)]].append(old)

    made = {}
    for kind, knobs in kinds.items():
        prefix = f"kinds.{kind}." if kind else ""
        made[kind] = dict(knobs)
        for key in knobs:
            olds = [old for old in layers_of[kind] if key in old]
            values = {json.dumps(old[key]): old[key] for old in olds}
            if prefix + key in named or key.startswith("_") or not values:
                continue
            if len(values) > 1:
                raise ValueError(
                    f"layers that become alike differ ({key}: {', '.join(values)}). "
                    f"fix: attention.{prefix}{key}=VALUE"
                )
            (made[kind][key],) = values.values()
    if chosen["_target_"] == HYBRID:
        return chosen | {"kinds": made}
    return made[""]


@torch.no_grad()
def load_converted(
    model: Transformer, tree: dict, path: Path, moments: list[Tensor] | None = None
) -> list[list[Change]]:
    """Load the weights at `path` into a model with another attention -> the changes of each layer.

    `tree` is the config of `model`. Parameters that no formula makes keep their values. Where the
    model is on the meta device, no weights are read, and only the changes are computed. `moments`
    (D, D) are the means of x x^T over inputs x of each layer's attention, by default of inputs that
    a norm with its weights makes of white noise. Weights are read layer by layer, so that memory
    holds little more than the model. Raises ValueError where there is no formula, or the models
    differ in more than attention.
    """
    old_tree = checkpoint.load_config(path)["model"] | {"context": model.context}
    source = build_model(old_tree)
    check_same_around_attention(source, model)
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
        if old_knobs == new_knobs:
            attention_weights, layer_changes = layers.read(layer), []
        else:
            attention_weights, layer_changes = convert_layer(layers, layer)
        changes.append(layer_changes)
        for name, tensor in attention_weights.items():
            copy_weight(weights, f"blocks.{layer}.attention.{name}", tensor)
        del attention_weights, tensor  # before the next layer is read
    for name in filter(is_around_attention, weights):
        copy_weight(weights, name, read(name)[""])
    return changes


def is_around_attention(name: str) -> bool:
    return ".attention." not in name


def check_same_around_attention(old: Transformer, new: Transformer) -> None:
    """Raise ValueError unless all that is not attention has the same names and shapes."""
    old_shapes, new_shapes = (
        {
            name: tensor.shape
            for name, tensor in model.state_dict().items()
            if is_around_attention(name)
        }
        for model in (old, new)
    )
    if old_shapes != new_shapes:
        raise ValueError("models differ in more than attention. fix: leave out model.KEY=VALUE")


def describe(changes: list[list[Change]]) -> list[str]:
    """A line for each run of layers with the same changes, and whether they are exact."""
    lines = []
    for texts, run in groupby(enumerate(changes), key=lambda pair: pair[1]):
        layers = [layer for layer, _ in run]
        if texts:
            parts = [f"{text} ({'exact' if exact else 'approximate'})" for text, exact in texts]
            lines.append(f"layers {layers[0]} to {layers[-1]}: {'; '.join(parts)}")
    return lines


def copy_weight(weights: Weights, name: str, tensor: Tensor) -> None:
    """Copy a tensor into the parameter `name` of the same shape, which may be sharded."""
    if tensor.shape != weights[name].shape:
        raise ValueError(
            f"weights of another shape ({name}: {list(tensor.shape)}, "
            f"{list(weights[name].shape)}). fix: another attention"
        )
    weights[name].copy_(shard_like(tensor.to(weights[name].dtype), weights[name]))
