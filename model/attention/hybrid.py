"""Different attention per layer, such as 5 local layers to 1 global layer (Gemma 3)."""

from collections.abc import Callable

from model.attention.base import Attention, LayerSpec


def hybrid(
    spec: LayerSpec, *, kinds: dict[str, Callable[..., Attention]], pattern: list[str]
) -> Attention:
    """Build the attention of a layer; `pattern` repeats over depth and ends with the last layer.

    Raises ValueError for a kind that is not in `kinds`.
    """
    kind = pattern[(spec.layer - spec.depth) % len(pattern)]
    if kind not in kinds:
        raise ValueError(
            f"attention.pattern has an unknown kind ({kind!r} of {sorted(kinds)}). "
            f"fix: attention.pattern=[{','.join(kinds)}]"
        )
    return kinds[kind](spec)
