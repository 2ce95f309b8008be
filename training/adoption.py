"""Start training from the weights of another model, whose attention may be different.

A weight is copied if its name and shape are the same in both models. If only the number of
key-value heads differs, and one number divides the other, heads are averaged (Ainslie et al.,
2305.13245) or repeated; repeating does not change the logits. All other weights of the new model
keep their initial values.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from model.build import build_model
from run import checkpoint
from run.distributed import shard_like
from run.progress import print0


@torch.no_grad()
def adopt_weights(model: nn.Module, path: Path) -> None:
    """Copy the weights that fit from the checkpoint `path` into an initialized model.

    The model may be sharded. Prints the names of the other weights. Raises IntegrityError if the
    checkpoint's config is invalid or does not match its weights.
    """
    source = build_model(checkpoint.load_model_config(path), "meta")
    checkpoint.check_weights(source, path)
    stored = source.state_dict()  # without values
    weights = model.state_dict()
    copied = set()
    for name in stored:
        if name not in weights:
            continue
        # Reopen the file for each tensor, so that memory holds little more than the model.
        with safe_open(path / "model.safetensors", "pt") as file:
            weight = file.get_tensor(name)
        if weight.shape != weights[name].shape:
            weight = change_heads(name, weight, source, model)
        if weight is not None:
            weights[name].copy_(shard_like(weight, weights[name]))
            copied.add(name)

    num_copied = sum(weights[name].numel() for name in copied)
    share = num_copied / sum(weight.numel() for weight in weights.values())
    print0(f"starting from the weights of {path}: {share:.1%} of the parameters are copied")
    if new := weights.keys() - copied:
        print0(f"new weights {by_layers(new)}")
    if left_out := stored.keys() - copied:
        print0(f"weights left out {by_layers(left_out)}")
    if changed := changed_options(source, model):
        print0(f"changed options {by_layers(changed)}")


def change_heads(name: str, weight: Tensor, source: nn.Module, model: nn.Module) -> Tensor | None:
    """Convert a key or value projection (K E, ...) to the number of heads K in `model`.

    Returns None for other weights, and if more than K differs or neither K divides the other.
    """
    projection = re.fullmatch(r"(blocks\.\d+\.attention)\.[kv]_proj\.(weight|bias)", name)
    if projection is None:
        return None
    old = source.get_submodule(projection[1])
    new = model.get_submodule(projection[1])
    old_heads = key_heads(old)
    new_heads = key_heads(new)
    head_dim = getattr(old, "head_dim", 0)
    new_shape = (new_heads * head_dim, *weight.shape[1:])
    if len(weight) != old_heads * head_dim or model.get_parameter(name).shape != new_shape:
        return None
    heads = weight.unflatten(0, (old_heads, head_dim))
    if new_heads % old_heads == 0:
        heads = heads.repeat_interleave(new_heads // old_heads, dim=0)
    elif old_heads % new_heads == 0:
        heads = heads.unflatten(0, (new_heads, -1)).mean(dim=1)
    else:
        return None
    return heads.flatten(0, 1)


def key_heads(attention: nn.Module) -> int:
    """Return the number of key-value heads, or 0 for a mechanism without heads."""
    # A recurrence has as many key heads as query heads.
    return getattr(attention, "kv_heads", getattr(attention, "heads", 0))


def changed_options(source: nn.Module, model: nn.Module) -> list[str]:
    """Describe the attention options that both models have, but with different values."""
    changes = []
    for layer, (old, new) in enumerate(zip(source.blocks, model.blocks, strict=True)):
        before = vars(old.attention)
        after = vars(new.attention)
        for key in before.keys() & after.keys():
            if not key.startswith("_") and before[key] != after[key]:
                changes.append(f"blocks.{layer}.attention.{key} {before[key]} -> {after[key]}")
    return changes


def by_layers(names: Iterable[str]) -> str:
    """Describe names of weights or options, such as "in 2 layers: k_norm.weight, q_norm.weight"."""
    counts = Counter(re.sub(r"^blocks\.\d+\.(attention\.)?", "", name) for name in names)
    texts = []
    for count in sorted({*counts.values()}):
        same = sorted(name for name in counts if counts[name] == count)
        texts.append(f"in {count} layer{'s' * (count != 1)}: {', '.join(same)}")
    return "; ".join(texts)
