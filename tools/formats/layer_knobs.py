"""The knobs of each layer's attention, from the config of a model."""

HYBRID = "model.attention.hybrid.hybrid"


def attention_kinds(attention: dict, depth: int) -> tuple[dict[str, dict], list[str]]:
    """Return the knobs of each kind of layer, and each layer's kind ("" if there is only one)."""
    if attention["_target_"] != HYBRID:
        return {"": attention}, [""] * depth
    # The pattern is repeated so that it ends with the last layer.
    pattern = attention["pattern"]
    kind_of_layer = [pattern[(layer - depth) % len(pattern)] for layer in range(depth)]
    return attention["kinds"], kind_of_layer


def attention_knobs(tree: dict) -> list[dict]:
    """Return the knobs of each layer's attention."""
    kinds, kind_of_layer = attention_kinds(tree["attention"], tree["depth"])
    return [dict(kinds[kind]) for kind in kind_of_layer]
