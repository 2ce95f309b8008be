"""Attention variants that differ by layer, such as 5 local layers per global layer (Gemma 3)."""

from collections.abc import Callable

from model.attention.base import Attention, LayerSpec


def hybrid(
    spec: LayerSpec, *, kinds: dict[str, Callable[..., Attention]], pattern: list[str]
) -> Attention:
    """Build a layer's attention; `pattern` is repeated so that it ends at the last layer.

    Raises ValueError for an empty pattern, and if the layer's kind is not in `kinds`.
    """
    fix = f"fix: attention.pattern=[{','.join(kinds)}]"
    if not pattern:
        raise ValueError(f"attention.pattern is empty. {fix}")
    kind = pattern[(spec.layer - spec.depth) % len(pattern)]
    if kind not in kinds:
        raise ValueError(
            f"attention.pattern has an unknown kind ({kind!r}, not one of {sorted(kinds)}). {fix}"
        )
    return kinds[kind](spec)
