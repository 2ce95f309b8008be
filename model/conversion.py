"""The weights of an attention made from those of another: one function for a pair of mechanisms.

A conversion is exact where both compute the same function, and approximate where more training has
to heal it. Weights are named as in the module of a layer's attention.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from model.attention.base import Attention
from model.attention.cross_layer import SharedAttention, ValueResidualAttention
from model.attention.gated_delta import GatedDelta
from model.attention.mla import LatentAttention
from model.attention.softmax import SoftmaxAttention
from model.context import ForwardContext

Weights = dict[str, Tensor]
# A sink that weighs less than rounding beside a score above -9, and that still has a gradient.
NO_SINK = -20.0
# What may be left of an attention, where another mechanism has no gate, sink or bias.
PROJECTIONS_AND_NORMS = {f"{name}_proj.weight" for name in "qkvo"} | {
    "q_norm.weight",
    "k_norm.weight",
}


class Change(NamedTuple):
    """What a conversion does to a layer, and whether it computes the same as before."""

    text: str
    is_exact: bool


class Layers(NamedTuple):
    """All layers of both models, of `context` tokens.

    `read` reads the old weights of a layer; `moment` gives the mean (D, D) of x x^T over its
    inputs x.
    """

    old: list[Attention]
    new: list[Attention]
    read: Callable[[int], Weights]
    moment: Callable[[int], Tensor]
    context: int


def convert_layer(layers: Layers, index: int) -> tuple[Weights, list[Change]]:
    """Make the weights of a layer. Those that are missing keep their initial values.

    Raises ValueError where there is no formula.
    """
    old = type(layers.old[index])
    new = type(layers.new[index])
    if (old, new) not in CONVERSIONS:
        known = [f"{a.__name__} to {b.__name__}" for a, b in CONVERSIONS if a is old]
        fix = ", ".join(known) or "train the new attention anew"
        raise no_formula(index, f"{old.__name__} to {new.__name__}", fix)
    return CONVERSIONS[old, new](layers, index)


def no_formula(index: int, change: str, fix: str) -> ValueError:
    return ValueError(f"no formula for this conversion (layer {index}: {change}). fix: {fix}")


def check_kept(index: int, old: dict, new: dict) -> None:
    """Raise ValueError unless these settings, which no formula changes, are the same."""
    for key, value in old.items():
        if new[key] != value:
            fix = "null" if value is None else value
            raise no_formula(index, f"{key} {value} -> {new[key]}", f"attention.{key}={fix}")


def check_used(index: int, weights: Weights, used: Iterable[str]) -> None:
    """Raise ValueError if there are weights that the new attention has no place for."""
    lost = sorted(weights.keys() - set(used))
    if lost:
        names = ", ".join(lost)
        raise no_formula(index, f"{names} would be lost", f"an attention with {names}")


def softmax_to_softmax(layers: Layers, index: int) -> tuple[Weights, list[Change]]:
    """Other heads for keys and values, masks, positions, a gate, a sink, biases.

    To fewer heads, each is the mean of a group: Ainslie et al., 2305.13245. A gate of one half is
    doubled behind it. For a longer context RoPE is scaled (model/rope.py) or left out.
    """
    old = layers.old[index]
    new = layers.new[index]
    check_kept(index, settings(old), settings(new))
    if old.rope_base is None:
        check_kept(index, {"rope_base": None}, vars(new))
    weights = dict(layers.read(index))
    # A layer that uses the keys and values of another has none of its own.
    of_keys_and_values = {name for name in weights if name.startswith(("k_", "v_"))}
    check_used(index, weights, of_keys_and_values | shapes(new).keys())
    changes = []

    # Heads of keys and values: repeated, or averaged over groups of neighbours.
    if max(old.kv_heads, new.kv_heads) % min(old.kv_heads, new.kv_heads):
        check_kept(index, {"kv_heads": old.kv_heads}, vars(new))
    if new.kv_heads != old.kv_heads:
        for name in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"):
            if name in weights:
                weights[name] = change_kv_heads(weights[name], old.kv_heads, new.kv_heads)
        verb = "repeated" if new.kv_heads > old.kv_heads else "averaged"
        text = f"key-value heads {old.kv_heads} -> {new.kv_heads}, {verb}"
        changes.append(Change(text, new.kv_heads > old.kv_heads))

    # Parts that begin without an effect.
    like = weights["o_proj.weight"]
    zeros = {name: like.new_zeros(shape) for name, shape in shapes(new).items()}
    if new.gate_proj is not None and old.gate_proj is None:
        weights["gate_proj.weight"] = zeros["gate_proj.weight"]
        weights["o_proj.weight"] = 2 * like
        changes.append(Change("an output gate of one half, doubled", True))
    if new.sink is not None and old.sink is None:
        weights["sink"] = zeros["sink"] + NO_SINK
        changes.append(Change(f"a sink of {NO_SINK:g}", True))
    added = [name for name in zeros if name.endswith(".bias") and name not in weights]
    weights |= {name: zeros[name] for name in added}
    if added:
        changes.append(Change("biases of zero", True))

    # Masks and positions, which have no weights.
    for name in ("window", "chunk"):
        before = getattr(old, name)
        after = getattr(new, name)
        if before != after:
            changes.append(Change(f"{name} {before} -> {after}", False))
    if new.rope_base is None and old.rope_base is not None:
        changes.append(Change("no positions", False))
    elif new.rotary != old.rotary:
        before, after = (f"base {a.rotary[1]:g}, {a.rotary[2]}" for a in (old, new))
        changes.append(Change(f"RoPE: {before} -> {after}", False))
    return {name: weights[name] for name in zeros if name in weights}, changes


def shapes(attention: Attention) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in attention.state_dict().items()}


def settings(attention: SoftmaxAttention) -> dict:
    """What no formula changes."""
    return {
        "head_dim": attention.head_dim,
        "qk_norm": attention.qk_norm,
        "softcap": attention.kernel.softcap,
        "rope_fraction": attention.rotary[0] / attention.head_dim,
    }


def change_kv_heads(weight: Tensor, old: int, new: int) -> Tensor:
    """weight (K E, ...) of `old` heads -> that of `new`; one of the numbers divides the other."""
    heads = weight.unflatten(0, (old, -1))
    if new > old:
        return heads.repeat_interleave(new // old, dim=0).flatten(0, 1)
    return heads.unflatten(0, (new, -1)).mean(dim=1).flatten(0, 1)


def softmax_to_shared(layers: Layers, index: int) -> tuple[Weights, list[Change]]:
    """Keys and values of several layers become those of the first, which has the mean of all."""
    if layers.new[index].reuses_kv:
        weights, changes = softmax_to_softmax(layers, index)
        return weights, [*changes, Change("keys and values of an earlier layer", False)]
    members = [index]
    for later in range(index + 1, len(layers.new)):
        if not getattr(layers.new[later], "reuses_kv", False):
            break
        members.append(later)
    if len(members) == 1:
        return softmax_to_softmax(layers, index)
    read = [layers.read(member) for member in members]
    mean = dict(read[0])
    for name in mean:
        if name.startswith(("k_", "v_")):
            mean[name] = torch.stack([weights[name] for weights in read]).mean(dim=0)
    weights, changes = softmax_to_softmax(layers._replace(read=lambda _: mean), index)
    text = f"keys and values are the mean of {len(members)} layers"
    return weights, [*changes, Change(text, False)]


def softmax_to_value_residual(layers: Layers, index: int) -> tuple[Weights, list[Change]]:
    """No share of the first layer's values at the beginning."""
    weights, changes = softmax_to_softmax(layers, index)
    if layers.new[index].share is not None:
        weights["share"] = torch.zeros(1).to(weights["o_proj.weight"])
        changes.append(Change("a share of 0 of the first layer's values", True))
    return weights, changes


def softmax_to_latent(layers: Layers, index: int) -> tuple[Weights, list[Change]]:
    """Keys and values come out of one latent, a factorization of low rank: TransMLA, 2502.07864.

    Of the pairs of features that RoPE rotates, every s-th keeps its rotation and has one key for
    all heads; with R = E / s, their frequencies are those of R features. All other pairs have the
    mean of their rotations. A norm in front of keys or queries becomes its mean factor.
    """
    old = layers.old[index]
    new = layers.new[index]
    weights = layers.read(index)
    check_latent(old, new, index)
    check_used(index, weights, PROJECTIONS_AND_NORMS)
    dtype = weights["o_proj.weight"].dtype
    moment = layers.moment(index).double()

    # Heads (K, E, D) and (H, E, D), with the mean factor of their norm.
    q = weights["q_proj.weight"].double().unflatten(0, (old.heads, -1))
    k = weights["k_proj.weight"].double().unflatten(0, (old.kv_heads, -1))
    v = weights["v_proj.weight"].double().unflatten(0, (old.kv_heads, -1))
    if old.q_norm is not None:
        q = fold_norm(q, weights["q_norm.weight"].double(), moment)
        k = fold_norm(k, weights["k_norm.weight"].double(), moment)

    # Which features keep their rotation: pairs are half a head apart.
    half = old.head_dim // 2
    is_rotated = torch.zeros(half, dtype=torch.bool)
    is_rotated[:: old.head_dim // new.rope_dim] = True
    is_rotated = is_rotated.repeat(2)

    # Rotated queries (H, 2, R / 2, D) have their head's share of the one rotated key.
    group = old.heads // old.kv_heads
    rotated_k, shares = share_rotated_key(k[:, is_rotated], moment)
    shares = shares.repeat_interleave(group, dim=0)
    rotated_q = q[:, is_rotated].unflatten(1, (2, -1)) * shares[:, None, :, None]
    plain_q = rotate_on_average(q, old, layers.context)[:, ~is_rotated]

    # Keys without a rotation and values come out of the latent.
    plain_k = k[:, ~is_rotated]
    down, up_k, up_v = factorize_jointly(plain_k, v, moment, new.rank)
    # If the latent is wider than their rank, the rest of it is zero and makes its norm smaller.
    latent_norm = down.new_full((new.rank,), (len(down) / new.rank) ** 0.5)

    # For each query head, the rows of keys and of values, filled up with zeros.
    up = torch.cat((pad_to(up_k, new.head_dim), pad_to(up_v, new.value_dim)), dim=1)
    up = up.repeat_interleave(group, dim=0)
    # Scores are divided by the root of the width of a key, which is another one now.
    scale = (new.value_dim / old.head_dim) ** 0.5
    new_q = scale * torch.cat((pad_to(plain_q, new.head_dim), rotated_q.flatten(1, 2)), dim=1)
    out = weights["o_proj.weight"].double().unflatten(1, (old.heads, -1))

    new_weights = {
        "q_proj.weight": new_q.flatten(0, 1),
        "latent_proj.weight": pad_to(down, new.rank, dim=0),
        "latent_norm.weight": latent_norm,
        "rope_proj.weight": rotated_k,
        "kv_proj.weight": pad_to(up.flatten(0, 1), new.rank),
        "o_proj.weight": pad_to(out, new.value_dim, dim=2).flatten(1),
    }
    rotated = f"{new.rope_dim} of {old.head_dim} features of a key keep their rotation"
    change = Change(f"a latent of rank {new.rank}; {rotated}", False)
    return {name: weight.to(dtype) for name, weight in new_weights.items()}, [change]


def check_latent(old: SoftmaxAttention, new: LatentAttention, index: int) -> None:
    """Raise ValueError for what a latent has no place for."""
    none = {"window": None, "chunk": None, "softcap": None, "rope_fraction": 1.0}
    check_kept(index, none, vars(old) | settings(old))
    check_kept(index, {"rope_base": old.rope_base}, {"rope_base": new.rotary[1]})
    check_kept(index, {"rope_scaling": old.rotary[2]}, {"rope_scaling": new.rotary[2]})
    if old.head_dim % new.rope_dim or new.head_dim < old.head_dim - new.rope_dim:
        change = f"heads of {old.head_dim} -> {new.head_dim} + {new.rope_dim}"
        fix = f"attention.head_dim={old.head_dim} attention.rope_dim={old.head_dim // 2}"
        raise no_formula(index, change, fix)
    if old.rope_base is None or old.qk_norm == "after_rope" or new.q_down_proj is not None:
        change = "no positions, a norm after them, or a latent of queries"
        raise no_formula(index, change, "RoPE, attention.query_rank=null")


def fold_norm(heads: Tensor, weight: Tensor, moment: Tensor) -> Tensor:
    """heads (K, E, D), the weight (E,) of an RMSNorm behind them -> heads with its mean factor."""
    mean_square = torch.einsum("ked,df,kef->k", heads, moment, heads) / heads.shape[1]
    return heads * weight[:, None] / mean_square.sqrt()[:, None, None]


def share_rotated_key(keys: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
    """keys (K, R, D) -> one key (R, D) for all heads, and the share (K, R / 2) of it in each head.

    Heads may be mixed before RoPE rather than after it, if both features of a pair are mixed alike.
    For each pair this is the mix whose shares come nearest to the keys: RoRoPE, 2502.07864.
    """
    pairs = keys.unflatten(1, (2, -1))  # (K, 2, R / 2, D)
    products = torch.einsum("kapd,de,lape->pkl", pairs, moment, pairs)
    _, vectors = torch.linalg.eigh(products)
    shares = vectors[..., -1].mT
    return torch.einsum("kp,kapd->apd", shares, pairs).flatten(0, 1), shares


def rotate_on_average(q: Tensor, attention: SoftmaxAttention, context: int) -> Tensor:
    """q (H, E, D) -> the mean of its rotations relative to a key, over all pairs in a context.

    Of all constant maps, it gives the scores that are nearest to those with RoPE.
    """
    # Behind a key at position 0, a query at position d stands for all pairs d apart.
    positions = torch.arange(context)
    cos, sin = ForwardContext(positions[None], None, None, None).rotary(*attention.rotary)
    scale = cos[0, 0, 0, 0]  # of both queries and keys, where positions are scaled by YaRN
    weights = (context - positions).double() / (context - positions).sum()
    cos, sin = (scale * weights @ table[0, :, 0].double() for table in (cos, sin))
    cos, sin = (table[:, None].to(q.device) for table in (cos, sin))
    a, b = q.chunk(2, dim=1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=1)


def factorize_jointly(
    keys: Tensor, values: Tensor, moment: Tensor, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """keys (K, E, D), values (K, F, D) -> down (R, D), and up (K, E, R) and (K, F, R) of both.

    Before they share a latent they are made equally large, by the sums of their mean squares.
    """

    def mean_square(heads: Tensor) -> Tensor:
        return torch.einsum("ked,df,kef->", heads, moment, heads)

    balance = (mean_square(values) / mean_square(keys)).sqrt()
    heads = torch.cat((balance * keys, values), dim=1)
    down, up = factorize(heads.flatten(0, 1), moment, rank)
    up_keys, up_values = up.unflatten(0, heads.shape[:2]).split(
        [keys.shape[1], values.shape[1]], dim=1
    )
    return down, up_keys / balance, up_values


def factorize(weight: Tensor, moment: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """weight (N, D) -> down (R, D) and up (N, R), whose product has the nearest outputs of rank R.

    R is the least of `rank`, N and D. The inputs have the second moments `moment` (D, D); what
    `down` makes of them has the identity.
    """
    # With inputs x = root z, where z has the identity, this is a truncated SVD: Eckart and Young.
    eigenvalues, vectors = torch.linalg.eigh(moment)
    eigenvalues = eigenvalues.clamp(min=1e-6 * eigenvalues.max())
    outputs_of_z = weight @ (vectors * eigenvalues.sqrt())
    inverse_root = (vectors / eigenvalues.sqrt()).mT
    # The right singular vectors, by ascending value: in half of the memory of an SVD.
    _, right = torch.linalg.eigh(outputs_of_z.mT @ outputs_of_z)
    right = right[:, -min(rank, *weight.shape) :]
    return right.mT @ inverse_root, outputs_of_z @ right


def pad_to(tensor: Tensor, length: int, dim: int = 1) -> Tensor:
    """Fill an axis up to `length` with zeros."""
    shape = list(tensor.shape)
    shape[dim] = length - shape[dim]
    return torch.cat((tensor, tensor.new_zeros(shape)), dim=dim)


def softmax_to_delta(layers: Layers, index: int) -> tuple[Weights, list[Change]]:
    """Projections stay, the rest is new: The Mamba in the Llama, 2408.15237."""
    old = layers.old[index]
    new = layers.new[index]
    check_kept(index, {"head_dim": old.head_dim}, vars(new))
    weights = layers.read(index)
    # Its queries and keys are normalized without a weight.
    check_used(index, weights, PROJECTIONS_AND_NORMS)
    new_weights = {name: weights[name] for name in ("q_proj.weight", "o_proj.weight")}
    for name in ("k_proj.weight", "v_proj.weight"):
        new_weights[name] = change_kv_heads(weights[name], old.kv_heads, new.heads)
    return new_weights, [Change("a delta rule with these projections; all else is new", False)]


# (old, new): the function that makes the weights of a layer.
CONVERSIONS = {
    (SoftmaxAttention, SoftmaxAttention): softmax_to_softmax,
    (SoftmaxAttention, SharedAttention): softmax_to_shared,
    (SoftmaxAttention, ValueResidualAttention): softmax_to_value_residual,
    (SoftmaxAttention, LatentAttention): softmax_to_latent,
    (SoftmaxAttention, GatedDelta): softmax_to_delta,
}
