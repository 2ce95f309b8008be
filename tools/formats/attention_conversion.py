"""Convert weights from one attention mechanism to another: one function per pair of mechanisms.

A conversion is exact if both compute the same function, and approximate if the model needs more
training afterwards. Weights are named as in the module of a layer's attention.
"""

import torch

from model.attention.cross_layer import SharedAttention, ValueResidualAttention
from model.attention.mla import LatentAttention
from model.attention.recurrent import GatedRecurrence
from model.attention.retention import Retention
from model.attention.softmax import SoftmaxAttention
from tools.formats.latent_conversion import PROJECTIONS_AND_NORMS, fixed_options, softmax_to_latent
from tools.formats.layer_change import (
    Change,
    Converted,
    Layers,
    Weights,
    check_all_used,
    check_equal,
    no_formula,
)

# The logit of a new sink. If any score exceeds -9, the sink has a weight below 2e-5, but still gets
# a gradient.
NO_SINK = -20.0
# Parts that the old layer may lack -> initial values that leave the output unchanged.
NEW_PARTS = {
    "gate_proj.weight": "an output gate of 1/2, with o_proj doubled",
    "sink": f"a sink of {NO_SINK:g}",
    "share": "a weight of 0 for the first layer's values",
    "o_proj.bias": "biases of zero",
}


def convert_layer(layers: Layers, layer: int, weights: Weights) -> Converted:
    """Convert a layer's old weights; return the new weights and the changes to the layer.

    Weights that are missing keep their initial values. Raises ValueError if there is no formula.
    """
    old = type(layers.old[layer])
    new = type(layers.new[layer])
    if (old, new) not in CONVERSIONS:
        change = f"{old.__name__} to {new.__name__}"
        fix = "train the new attention variant from scratch"
        if new is Retention:
            change += ", whose values and gate are wider than any projection of the model"
        if old is SoftmaxAttention:
            fix = "attention=gqa, shared_kv, value_residual, mla, gdn or mamba2"
        raise no_formula(layer, change, fix)
    return CONVERSIONS[old, new](layers, layer, weights)


def softmax_to_softmax(layers: Layers, layer: int, weights: Weights) -> Converted:
    """Change the number of key-value heads, the mask, positions, gate, sink, biases or `share`.

    If the number of key-value heads falls, each new head is the mean over a group: Ainslie et al.,
    2305.13245. A new gate outputs 1/2 for every input, so `o_proj` is doubled. For a longer
    context, RoPE must be scaled (model/rope.py) or left out.
    """
    old = layers.old[layer]
    new = layers.new[layer]
    check_equal(layer, fixed_options(new), fixed_options(old))
    if old.rope_base is None:
        check_equal(layer, vars(new), {"rope_base": None})
    initial = new.state_dict()
    check_all_used(layer, weights, initial)
    changes = []
    if new.kv_heads != old.kv_heads:
        changes.append(change_kv_heads(layer, weights, old.kv_heads, new.kv_heads))

    # New parts start with values that leave the output unchanged: zeros, except for a sink.
    added = initial.keys() - weights.keys()
    for name in added:
        weights[name] = torch.zeros(initial[name].shape)
    if "gate_proj.weight" in added:
        weights["o_proj.weight"] = 2 * weights["o_proj.weight"]
    if "sink" in added:
        weights["sink"] += NO_SINK
    for name, text in NEW_PARTS.items():
        if name in added:
            changes.append(Change(text, is_exact=True))

    # Masks and positions, which have no weights.
    for name in ("window", "chunk"):
        before = getattr(old, name)
        after = getattr(new, name)
        if before != after:
            changes.append(Change(f"{name} {before} -> {after}", is_exact=False))
    old_rope = (old.rotary_dim, old.rope_base, old.rope_scaling)
    new_rope = (new.rotary_dim, new.rope_base, new.rope_scaling)
    if new_rope != old_rope:
        text = "no positions"
        if new.rope_base is not None:
            before = f"base {old.rope_base:g}, {old.rope_scaling}"
            after = f"base {new.rope_base:g}, {new.rope_scaling}"
            text = f"RoPE: {before} -> {after}"
        changes.append(Change(text, is_exact=False))
    return weights, changes


def change_kv_heads(layer: int, weights: Weights, old: int, new: int) -> Change:
    """Repeat the projections of keys and values, or average them over groups of adjacent heads.

    Changes `weights` in place. Raises ValueError unless one of the numbers divides the other.
    """
    if max(old, new) % min(old, new):
        raise no_formula(layer, f"kv_heads {old} -> {new}", f"attention.kv_heads={old}")
    for name in weights:
        if not name.startswith(("k_proj", "v_proj")):
            continue
        heads = weights[name].unflatten(0, (old, -1))
        if new > old:
            heads = heads.repeat_interleave(new // old, dim=0)
        else:
            heads = heads.unflatten(0, (new, -1)).mean(dim=1)
        weights[name] = heads.flatten(0, 1)
    verb = "repeated" if new > old else "averaged"
    return Change(f"key-value heads {old} -> {new}, {verb}", is_exact=new > old)


def softmax_to_shared(layers: Layers, layer: int, weights: Weights) -> Converted:
    """Let layers share keys and values; the projections become the mean over the sharing layers."""
    kv_names = [name for name in weights if name.startswith(("k_", "v_"))]
    # This layer, and the later layers that reuse its keys and values.
    members = [weights]
    for later in range(layer + 1, len(layers.new)):
        attention = layers.new[later]
        if not isinstance(attention, SharedAttention) or not attention.reuses_kv:
            break
        members.append(layers.read(later))

    text = ""
    if layers.new[layer].reuses_kv:
        text = "keys and values of an earlier layer"
        for name in kv_names:
            del weights[name]
    elif len(members) > 1:
        text = f"keys and values are the mean of {len(members)} layers"
        for name in kv_names:
            weights[name] = torch.stack([member[name] for member in members]).mean(dim=0)
    weights, changes = softmax_to_softmax(layers, layer, weights)
    if text:
        changes.append(Change(text, is_exact=False))
    return weights, changes


def softmax_to_recurrence(layers: Layers, layer: int, weights: Weights) -> Converted:
    """Keep the projections, and initialize the rest (The Mamba in the Llama, 2408.15237)."""
    old = layers.old[layer]
    new = layers.new[layer]
    check_equal(layer, vars(new), {"head_dim": old.head_dim})
    # QK-norm is dropped, because the recurrence has its own normalization, without a weight.
    check_all_used(layer, weights, PROJECTIONS_AND_NORMS)
    kept = {name: weights[name] for name in weights if name.endswith("_proj.weight")}
    if new.heads != old.kv_heads:
        change_kv_heads(layer, kept, old.kv_heads, new.heads)
    return kept, [
        Change("a recurrence with the old projections; everything else is new", is_exact=False)
    ]


# (old, new) -> the function that converts a layer's weights.
CONVERSIONS = {
    (SoftmaxAttention, SoftmaxAttention): softmax_to_softmax,
    (SoftmaxAttention, SharedAttention): softmax_to_shared,
    (SoftmaxAttention, ValueResidualAttention): softmax_to_softmax,
    (SoftmaxAttention, LatentAttention): softmax_to_latent,
    (SoftmaxAttention, GatedRecurrence): softmax_to_recurrence,
}
