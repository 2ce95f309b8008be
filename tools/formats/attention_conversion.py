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
from model.layers import apply_rope

Weights = dict[str, Tensor]
# The logit of a new sink: beside a score above -9 its weight is below 2e-5, yet it has a gradient.
NO_SINK = -20.0
# The weights of softmax attention without the optional ones, which MLA and the delta rule lack.
PROJECTIONS_AND_NORMS = {
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
    "q_norm.weight",
    "k_norm.weight",
}


class Change(NamedTuple):
    """What a conversion does to a layer, and whether it computes the same as before."""

    text: str
    is_exact: bool


# The new weights of a layer, and how it changes.
Converted = tuple[Weights, list[Change]]


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


def convert_layer(layers: Layers, index: int, weights: Weights) -> Converted:
    """Convert the old weights of a layer. Those that are missing keep their initial values.

    Raises ValueError where there is no formula.
    """
    old = type(layers.old[index])
    new = type(layers.new[index])
    if (old, new) not in CONVERSIONS:
        fix = "train the new attention anew"
        if old is SoftmaxAttention:
            fix = "attention=gqa, shared_kv, value_residual, mla or delta"
        raise no_formula(index, f"{old.__name__} to {new.__name__}", fix)
    return CONVERSIONS[old, new](layers, index, weights)


def no_formula(index: int, change: str, fix: str) -> ValueError:
    return ValueError(f"no formula for this conversion (layer {index}: {change}). fix: {fix}")


def check_unchanged(index: int, old: dict, new: dict) -> None:
    """Raise ValueError unless these options, which no conversion can change, are the same."""
    for key, value in old.items():
        if new[key] != value:
            fix = "null" if value is None else value
            raise no_formula(index, f"{key} {value} -> {new[key]}", f"attention.{key}={fix}")


def check_all_used(index: int, weights: Weights, used: Iterable[str]) -> None:
    """Raise ValueError if the new attention has no use for some weights."""
    lost = sorted(weights.keys() - set(used))
    if lost:
        names = ", ".join(lost)
        raise no_formula(index, f"{names} would be lost", f"an attention with {names}")


def softmax_to_softmax(layers: Layers, index: int, weights: Weights) -> Converted:
    """Change the number of key-value heads, the mask, positions, gate, sink, biases or `share`.

    Fewer key-value heads are means over groups: Ainslie et al., 2305.13245. A new gate outputs 1/2
    for every input, so `o_proj` is doubled. A longer context needs RoPE scaled (model/rope.py) or
    left out.
    """
    old = layers.old[index]
    new = layers.new[index]
    check_unchanged(index, fixed_options(old), fixed_options(new))
    if old.rope_base is None:
        check_unchanged(index, {"rope_base": None}, vars(new))
    shapes = {name: tensor.shape for name, tensor in new.state_dict().items()}
    check_all_used(index, weights, shapes)
    changes = []

    # Heads of keys and values: repeated, or averaged over groups of neighbours.
    if max(old.kv_heads, new.kv_heads) % min(old.kv_heads, new.kv_heads):
        check_unchanged(index, {"kv_heads": old.kv_heads}, vars(new))
    if new.kv_heads != old.kv_heads:
        change_kv_heads(weights, old.kv_heads, new.kv_heads)
        is_exact = new.kv_heads > old.kv_heads
        verb = "repeated" if is_exact else "averaged"
        text = f"key-value heads {old.kv_heads} -> {new.kv_heads}, {verb}"
        changes.append(Change(text, is_exact))

    # New parts start with values that leave the output unchanged: zeros, except for a sink.
    o_proj = weights["o_proj.weight"]
    added = shapes.keys() - weights.keys()
    for name in added:
        weights[name] = o_proj.new_zeros(shapes[name])
    if "gate_proj.weight" in added:
        weights["o_proj.weight"] = 2 * o_proj
        changes.append(Change("an output gate of one half, doubled", True))
    if "sink" in added:
        weights["sink"] += NO_SINK
        changes.append(Change(f"a sink of {NO_SINK:g}", True))
    if any(name.endswith(".bias") for name in added):
        changes.append(Change("biases of zero", True))
    if "share" in added:
        changes.append(Change("a share of 0 of the first layer's values", True))

    # Masks and positions, which have no weights.
    for name in ("window", "chunk"):
        before = getattr(old, name)
        after = getattr(new, name)
        if before != after:
            changes.append(Change(f"{name} {before} -> {after}", False))
    if new.rotary != old.rotary:
        text = "no positions"
        if new.rope_base is not None:
            _, old_base, old_scaling = old.rotary
            _, new_base, new_scaling = new.rotary
            text = f"RoPE: base {old_base:g}, {old_scaling} -> base {new_base:g}, {new_scaling}"
        changes.append(Change(text, False))
    return weights, changes


def fixed_options(attention: SoftmaxAttention) -> dict:
    """The options that no conversion can change."""
    return {
        "head_dim": attention.head_dim,
        "qk_norm": attention.qk_norm,
        "softcap": attention.kernel.softcap,
        "rope_fraction": attention.rotary[0] / attention.head_dim,
    }


def change_kv_heads(weights: Weights, old: int, new: int) -> None:
    """Change the projections of keys and values from `old` heads to `new`, in place.

    One of the numbers divides the other.
    """
    for name in weights:
        if name.startswith(("k_proj", "v_proj")):
            heads = weights[name].unflatten(0, (old, -1))
            if new > old:
                heads = heads.repeat_interleave(new // old, dim=0)
            else:
                heads = heads.unflatten(0, (new, -1)).mean(dim=1)
            weights[name] = heads.flatten(0, 1)


def softmax_to_shared(layers: Layers, index: int, weights: Weights) -> Converted:
    """Let layers share keys and values, whose projections are the mean over those layers."""
    kv_names = [name for name in weights if name.startswith(("k_", "v_"))]
    sharing = []
    if layers.new[index].reuses_kv:
        for name in kv_names:
            del weights[name]
        sharing = [Change("keys and values of an earlier layer", False)]
    else:
        # The weights of this layer, and of those after it that reuse its keys and values.
        members = [weights]
        for later in range(index + 1, len(layers.new)):
            if not getattr(layers.new[later], "reuses_kv", False):
                break
            members.append(layers.read(later))
        if len(members) > 1:
            for name in kv_names:
                weights[name] = torch.stack([member[name] for member in members]).mean(dim=0)
            sharing = [Change(f"keys and values are the mean of {len(members)} layers", False)]
    weights, changes = softmax_to_softmax(layers, index, weights)
    return weights, changes + sharing


def softmax_to_latent(layers: Layers, index: int, weights: Weights) -> Converted:
    """Factorize keys and values into one latent of low rank: TransMLA, 2502.07864.

    Of the pairs that RoPE rotates, every s-th keeps its rotation, in one key for all heads. These
    have the frequencies of RoPE with R = E / s features. The other pairs get the mean of their
    rotations over a context. QK-norm is replaced by its mean scale.
    """
    old = layers.old[index]
    new = layers.new[index]
    check_latent(old, new, index)
    check_all_used(index, weights, PROJECTIONS_AND_NORMS)
    weights = {name: weight.double() for name, weight in weights.items()}
    moment = layers.moment(index).double()

    # The projections of each head: q (H, E, D), k and v (K, E, D). QK-norm is folded into them.
    q = weights["q_proj.weight"].unflatten(0, (old.heads, -1))
    k = weights["k_proj.weight"].unflatten(0, (old.kv_heads, -1))
    v = weights["v_proj.weight"].unflatten(0, (old.kv_heads, -1))
    if old.q_norm is not None:
        q = fold_norm(q, weights["q_norm.weight"], moment)
        k = fold_norm(k, weights["k_norm.weight"], moment)

    # Features that keep their rotation. The two features of a pair are half a head apart.
    pairs = torch.arange(old.head_dim // 2)
    is_rotated = pairs % (old.head_dim // new.rope_dim) == 0
    is_rotated = is_rotated.repeat(2)

    # All heads share one rotated key: scale queries (H, R, D) by its weight in their head.
    group = old.heads // old.kv_heads
    rotated_k, head_weights = share_rotated_key(k[:, is_rotated], moment)
    head_weights = head_weights.repeat(1, 2).repeat_interleave(group, dim=0)
    rotated_q = q[:, is_rotated] * head_weights[:, :, None]
    plain_q = rotate_on_average(q, old, layers.context)[:, ~is_rotated]

    # Keys without a rotation and values come out of the latent.
    plain_k = k[:, ~is_rotated]
    down, up_k, up_v = factorize_jointly(plain_k, v, moment, new.rank)
    # If `rank` exceeds the rank of the factorization, the other latent features are zero. They
    # lower the mean square in the latent's norm, for which this weight makes up.
    latent_scale = (len(down) / new.rank) ** 0.5

    # The rows of kv_proj: keys and values of each query head, padded with zeros.
    up_k = pad_to(up_k, new.head_dim)
    up_v = pad_to(up_v, new.value_dim)
    up = torch.cat((up_k, up_v), dim=1).repeat_interleave(group, dim=0)
    # Scores are divided by the square root of the key width, which changes: undo that in q.
    scale = (new.value_dim / old.head_dim) ** 0.5
    plain_q = pad_to(plain_q, new.head_dim)
    new_q = scale * torch.cat((plain_q, rotated_q), dim=1)
    out = weights["o_proj.weight"].unflatten(1, (old.heads, -1))

    new_weights = {
        "q_proj.weight": new_q.flatten(0, 1),
        "latent_proj.weight": pad_to(down, new.rank, dim=0),
        "latent_norm.weight": down.new_full((new.rank,), latent_scale),
        "rope_proj.weight": rotated_k,
        "kv_proj.weight": pad_to(up.flatten(0, 1), new.rank),
        "o_proj.weight": pad_to(out, new.value_dim, dim=2).flatten(1),
    }
    rotated = f"{new.rope_dim} of {old.head_dim} features of a key keep their rotation"
    return new_weights, [Change(f"a latent of rank {new.rank}; {rotated}", False)]


def check_latent(old: SoftmaxAttention, new: LatentAttention, index: int) -> None:
    """Raise ValueError for options of `old` that MLA cannot express."""
    if old.rope_base is None:
        raise no_formula(index, "no RoPE -> a latent", "a model with RoPE")
    none = {"window": None, "chunk": None, "softcap": None, "rope_fraction": 1.0}
    check_unchanged(index, none, vars(old) | fixed_options(old))
    check_unchanged(index, {"rope_base": old.rope_base}, {"rope_base": new.rotary[1]})
    check_unchanged(index, {"rope_scaling": old.rotary[2]}, {"rope_scaling": new.rotary[2]})
    if old.head_dim % new.rope_dim or new.head_dim < old.head_dim - new.rope_dim:
        change = f"heads of {old.head_dim} -> {new.head_dim} + {new.rope_dim}"
        fix = f"attention.head_dim={old.head_dim} attention.rope_dim={old.head_dim // 2}"
        raise no_formula(index, change, fix)
    if old.qk_norm == "after_rope":
        raise no_formula(index, "QK-norm after RoPE -> a latent", "QK-norm before RoPE, or none")
    if new.q_down_proj is not None:
        raise no_formula(index, "queries -> a latent", "attention.query_rank=null")


def fold_norm(heads: Tensor, weight: Tensor, moment: Tensor) -> Tensor:
    """heads (K, E, D) followed by an RMSNorm of `weight` (E,) -> heads times its mean scale."""
    mean_square = squared_norms(heads, moment) / heads.shape[1]
    rms = mean_square.sqrt()
    return heads * weight[:, None] / rms[:, None, None]


def squared_norms(heads: Tensor, moment: Tensor) -> Tensor:
    """heads (K, E, D) -> the mean squared norm (K,) of the outputs of each."""
    return torch.einsum("ked,df,kef->k", heads, moment, heads)


def share_rotated_key(keys: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
    """keys (K, R, D) -> one key (R, D) for all heads, and its weight (K, R / 2) in each head.

    Mixing heads commutes with RoPE if both features of a pair have the same weights. For each pair,
    the first principal component over heads is nearest to their keys: RoRoPE, 2502.07864.
    """
    pairs = keys.unflatten(1, (2, -1))  # (K, 2, R / 2, D)
    gram = torch.einsum("kapd,de,lape->pkl", pairs, moment, pairs)
    _, vectors = torch.linalg.eigh(gram)
    head_weights = vectors[..., -1].mT
    key = torch.einsum("kp,kapd->apd", head_weights, pairs).flatten(0, 1)
    return key, head_weights


def rotate_on_average(q: Tensor, attention: SoftmaxAttention, context: int) -> Tensor:
    """Apply the mean rotation of RoPE over all query-key pairs of a context to q (H, E, D).

    Of all maps that ignore positions, it gives the scores nearest to those with RoPE.
    """
    # Scores depend on the distance alone; a context has `context - d` pairs at distance d.
    distances = torch.arange(context, device=q.device)
    counts = (context - distances).double()
    cos, sin = ForwardContext(distances[None], None, None, None).rotary(*attention.rotary)
    # YaRN multiplies both queries and keys by cos(0); the tables have it once.
    weights = cos[0, 0, 0, 0] * counts / counts.sum()
    mean_cos = weights @ cos[0, :, 0].double()  # (E / 2,)
    mean_sin = weights @ sin[0, :, 0].double()
    return apply_rope(q.mT, mean_cos, mean_sin).mT


def factorize_jointly(
    keys: Tensor, values: Tensor, moment: Tensor, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """keys (K, E, D), values (K, F, D) -> down (R, D), and up (K, E, R) and (K, F, R) of both.

    Keys are first scaled to the mean square of the values, so that neither dominates the latent.
    """
    ratio = squared_norms(values, moment).sum() / squared_norms(keys, moment).sum()
    balance = ratio.sqrt()
    heads = torch.cat((balance * keys, values), dim=1)
    down, up = factorize(heads.flatten(0, 1), moment, rank)
    up = up.unflatten(0, heads.shape[:2])
    up_keys, up_values = up.tensor_split([keys.shape[1]], dim=1)
    return down, up_keys / balance, up_values


def factorize(weight: Tensor, moment: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factorize weight (N, D) into up (N, R) @ down (R, D) -> (down, up).

    For inputs x with second moments `moment` (D, D), no other product of rank R is closer to
    weight @ x in mean square. R is the smallest of `rank`, N and D. down @ x has second moments I.
    """
    # Whiten the inputs, x = root z. Over z, the best factorization is a truncated SVD (Eckart and
    # Young).
    eigenvalues, vectors = torch.linalg.eigh(moment)
    roots = eigenvalues.clamp(min=1e-6 * eigenvalues.max()).sqrt()
    outputs_of_z = weight @ (vectors * roots)
    inverse_root = (vectors / roots).mT
    # The right singular vectors, by ascending singular value. This takes half the memory of an SVD.
    _, right = torch.linalg.eigh(outputs_of_z.mT @ outputs_of_z)
    rank = min(rank, *weight.shape)
    right = right[:, -rank:]
    return right.mT @ inverse_root, outputs_of_z @ right


def pad_to(tensor: Tensor, length: int, dim: int = 1) -> Tensor:
    """Fill an axis up to `length` with zeros."""
    shape = list(tensor.shape)
    shape[dim] = length - shape[dim]
    return torch.cat((tensor, tensor.new_zeros(shape)), dim=dim)


def softmax_to_delta(layers: Layers, index: int, weights: Weights) -> Converted:
    """Keep the projections, initialize the rest: The Mamba in the Llama, 2408.15237."""
    old = layers.old[index]
    new = layers.new[index]
    check_unchanged(index, {"head_dim": old.head_dim}, vars(new))
    # QK-norm is dropped: the delta rule normalizes queries and keys, without a weight.
    check_all_used(index, weights, PROJECTIONS_AND_NORMS)
    new_weights = {name: weights[name] for name in weights if name.endswith("_proj.weight")}
    change_kv_heads(new_weights, old.kv_heads, new.heads)
    return new_weights, [Change("a delta rule with these projections; all else is new", False)]


# (old, new): the function that changes the old weights of a layer to those of the new.
CONVERSIONS = {
    (SoftmaxAttention, SoftmaxAttention): softmax_to_softmax,
    (SoftmaxAttention, SharedAttention): softmax_to_shared,
    (SoftmaxAttention, ValueResidualAttention): softmax_to_softmax,
    (SoftmaxAttention, LatentAttention): softmax_to_latent,
    (SoftmaxAttention, GatedDelta): softmax_to_delta,
}
