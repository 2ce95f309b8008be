"""Convert softmax attention to multi-head latent attention: TransMLA, 2502.07864."""

import torch
from torch import Tensor

from model.attention.mla import LatentAttention
from model.attention.softmax import SoftmaxAttention
from model.context import ForwardContext
from model.layers import apply_rope
from tools.formats.layer_change import (
    Change,
    Converted,
    Layers,
    Weights,
    check_all_used,
    check_equal,
    no_formula,
)

# The required weights of softmax attention. MLA and recurrences have none of the optional weights.
PROJECTIONS_AND_NORMS = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
    "q_norm.weight",
    "k_norm.weight",
)


def softmax_to_latent(layers: Layers, layer: int, weights: Weights) -> Converted:
    """Factorize keys and values into one low-rank latent.

    Every s-th pair that RoPE rotates keeps its rotation, in one key shared by all heads. These
    pairs have the frequencies of RoPE with R = E / s features. The other pairs get the mean of
    their rotations over a context. QK-norm is replaced by its mean scale.
    """
    old = layers.old[layer]
    new = layers.new[layer]
    check_latent(old, new, layer)
    check_all_used(layer, weights, PROJECTIONS_AND_NORMS)
    moment = layers.moment(layer).double()  # (D, D)

    # The projections of each head: q (H, E, D), k and v (K, E, D). QK-norm is folded into them.
    weights = {name: weight.double() for name, weight in weights.items()}
    q = weights["q_proj.weight"].unflatten(0, (old.heads, -1))
    k = weights["k_proj.weight"].unflatten(0, (old.kv_heads, -1))
    v = weights["v_proj.weight"].unflatten(0, (old.kv_heads, -1))
    if old.q_norm is not None:
        q = fold_norm(q, weights["q_norm.weight"], moment)
        k = fold_norm(k, weights["k_norm.weight"], moment)

    # Features that keep their rotation. The two features of a pair are half a head apart.
    pairs = torch.arange(old.head_dim // 2)
    is_rotated = (pairs % (old.head_dim // new.rope_dim) == 0).repeat(2)

    # All heads share one rotated key. Its weight in a head scales the head's queries (H, R, D).
    group = old.heads // old.kv_heads
    rotated_k, head_weights = share_rotated_key(k[:, is_rotated], moment)
    head_weights = head_weights.repeat(1, 2).repeat_interleave(group, dim=0)
    rotated_q = q[:, is_rotated] * head_weights[:, :, None]
    plain_q = rotate_on_average(q, old, layers.context)[:, ~is_rotated]

    # The latent produces the keys without a rotation, and the values.
    down, up_k, up_v = factorize_jointly(k[:, ~is_rotated], v, moment, new.rank)
    # If `rank` exceeds the rank of the factorization, the remaining latent features are zero. They
    # lower the mean square in the latent's norm; this weight compensates for that.
    latent_scale = (len(down) / new.rank) ** 0.5

    # The rows of kv_proj: keys and values of each query head, padded with zeros.
    up = torch.cat((pad_to(up_k, new.head_dim), pad_to(up_v, new.value_dim)), dim=1)
    up = up.repeat_interleave(group, dim=0)
    # Scores are divided by the square root of the key width, which changes: undo this change in q.
    new_q = torch.cat((pad_to(plain_q, new.head_dim), rotated_q), dim=1)
    new_q *= (new.value_dim / old.head_dim) ** 0.5
    out = weights["o_proj.weight"].unflatten(1, (old.heads, -1))

    new_weights = {
        "q_proj.weight": new_q.flatten(0, 1),
        "latent_proj.weight": pad_to(down, new.rank, dim=0),
        "latent_norm.weight": down.new_full((new.rank,), latent_scale),
        "rope_proj.weight": rotated_k,
        "kv_proj.weight": pad_to(up.flatten(0, 1), new.rank),
        "o_proj.weight": pad_to(out, new.value_dim, dim=2).flatten(1),
    }
    rotated = f"{new.rope_dim} of {old.head_dim} features per key keep their rotation"
    return new_weights, [Change(f"a latent of rank {new.rank}; {rotated}", is_exact=False)]


def fixed_options(attention: SoftmaxAttention) -> dict:
    """Return the options of softmax attention that no conversion can change."""
    return {
        "head_dim": attention.head_dim,
        "qk_norm": attention.qk_norm,
        "softcap": attention.kernel.softcap,
        "rope_fraction": attention.rotary_dim / attention.head_dim,
    }


def check_latent(old: SoftmaxAttention, new: LatentAttention, layer: int) -> None:
    """Raise ValueError for options of `old` that MLA cannot express."""
    if old.rope_base is None or old.qk_norm == "after_rope":
        raise no_formula(layer, "keys, values -> a latent", "use RoPE without QK-norm after it")
    if old.kernel.softcap is not None or old.rotary_dim < old.head_dim:
        change = "a soft-cap or a partial RoPE -> a latent"
        raise no_formula(layer, change, "train the new attention variant from scratch")
    for option in ("window", "chunk"):
        if getattr(old, option) is not None:
            fix = f"set attention.{option} to null in a separate conversion, and convert its result"
            raise no_formula(layer, f"a {option} -> a latent", fix)
    positions = {"rope_base": old.rope_base, "rope_scaling": old.rope_scaling}
    check_equal(layer, vars(new), positions)
    if new.q_down_proj is not None:
        raise no_formula(layer, "queries -> a latent", "attention.query_rank=null")
    if old.head_dim % new.rope_dim or new.head_dim < old.head_dim - new.rope_dim:
        change = f"heads of {old.head_dim} -> {new.head_dim} + {new.rope_dim}"
        fix = f"attention.head_dim={old.head_dim} attention.rope_dim={old.head_dim // 2}"
        raise no_formula(layer, change, fix)


def fold_norm(heads: Tensor, weight: Tensor, moment: Tensor) -> Tensor:
    """Multiply heads (K, E, D) by the mean scale of the RMSNorm after them, with `weight` (E,)."""
    assert weight.shape == heads.shape[1:2]  # else it would be broadcast
    mean_square = squared_norms(heads, moment) / heads.shape[1]
    return heads * weight[:, None] / mean_square.sqrt()[:, None, None]


def squared_norms(heads: Tensor, moment: Tensor) -> Tensor:
    """Return the mean squared norm (K,) of each head's outputs, for heads (K, E, D)."""
    return torch.einsum("ked,df,kef->k", heads, moment, heads)


def share_rotated_key(keys: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
    """Replace keys (K, R, D) with one key (R, D), and its weight (K, R / 2) in each head.

    Mixing heads commutes with RoPE if both features of a pair have the same weights. For each pair,
    the first principal component over heads is closest to the heads' keys: RoRoPE, 2502.07864.
    """
    pairs = keys.unflatten(1, (2, -1))  # (K, 2, R / 2, D)
    gram = torch.einsum("kapd,de,lape->pkl", pairs, moment, pairs)
    _, vectors = torch.linalg.eigh(gram)
    head_weights = vectors[..., -1].mT
    key = torch.einsum("kp,kapd->apd", head_weights, pairs)
    return key.flatten(0, 1), head_weights


def rotate_on_average(q: Tensor, attention: SoftmaxAttention, context: int) -> Tensor:
    """Apply the mean rotation of RoPE over all query-key pairs of a context to q (H, E, D).

    Among maps that ignore positions, this map gives the scores closest to the scores with RoPE.
    """
    # Scores depend only on the distance; a context has `context - d` pairs at distance d.
    distances = torch.arange(context, device=q.device)
    counts = (context - distances).double()
    ctx = ForwardContext(distances[None])
    cos, sin = ctx.rotary(attention.rotary_dim, attention.rope_base, attention.rope_scaling)
    # YaRN multiplies both queries and keys by cos(0); the tables include this factor once.
    weights = cos[0, 0, 0, 0] * counts / counts.sum()
    mean_cos = weights @ cos[0, :, 0].double()  # (E / 2,)
    mean_sin = weights @ sin[0, :, 0].double()
    return apply_rope(q.mT, mean_cos, mean_sin).mT


def factorize_jointly(
    keys: Tensor, values: Tensor, moment: Tensor, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Factorize keys (K, E, D) and values (K, F, D) with a shared down projection (R, D).

    Returns it, followed by the up projections of keys (K, E, R) and of values (K, F, R). Keys are
    first scaled to the mean square of the values, so that neither dominates the latent.
    """
    ratio = squared_norms(values, moment).sum() / squared_norms(keys, moment).sum()
    balance = ratio.sqrt()
    heads = torch.cat((balance * keys, values), dim=1)
    down, up = factorize(heads.flatten(0, 1), moment, rank)
    up = up.unflatten(0, heads.shape[:2])
    up_keys, up_values = up.tensor_split([keys.shape[1]], dim=1)
    return down, up_keys / balance, up_values


def factorize(weight: Tensor, moment: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factorize weight (N, D) into up (N, R) @ down (R, D), and return (down, up).

    For inputs x with second moments `moment` (D, D), no other product of rank R is closer to
    weight @ x in mean square. R is the smallest of `rank`, N and D. down @ x has second moments I.
    """
    # Whiten the inputs, x = root z. Over z, the best factorization is a truncated SVD (Eckart and
    # Young).
    eigenvalues, vectors = torch.linalg.eigh(moment)
    roots = eigenvalues.clamp(min=1e-6 * eigenvalues.max()).sqrt()
    outputs_of_z = weight @ (vectors * roots)
    inverse_root = (vectors / roots).mT
    # The right singular vectors, by ascending singular value, in half the memory of an SVD.
    _, right = torch.linalg.eigh(outputs_of_z.mT @ outputs_of_z)
    right = right[:, -min(rank, *weight.shape) :]
    return right.mT @ inverse_root, outputs_of_z @ right


def pad_to(tensor: Tensor, length: int, dim: int = 1) -> Tensor:
    """Pad an axis with zeros to `length`."""
    shape = list(tensor.shape)
    shape[dim] = length - shape[dim]
    return torch.cat((tensor, tensor.new_zeros(shape)), dim=dim)
