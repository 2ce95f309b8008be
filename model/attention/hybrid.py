"""Different attentions over depth, by a pattern: Gemma 3 has 5 local to 1 global, Llama 4 has 3 chunked to 1 full."""

from collections.abc import Callable

from model.attention.base import Attention


def hybrid(
    dim: int,
    heads: int,
    context: int,
    layer: int,
    depth: int,
    *,
    kinds: dict[str, Callable[..., Attention]],
    pattern: list[str],
) -> Attention:
    """The pattern is repeated so that it ends with the last layer. Raises ValueError for a kind that is not there."""
    if not pattern:
        raise ValueError(
            f"attention.pattern is empty ({sorted(kinds)=}). fix: name the kind of some layers"
        )
    kind = pattern[(layer - depth) % len(pattern)]
    if kind not in kinds:
        raise ValueError(
            f"attention.pattern names no kind ({kind!r} of {sorted(kinds)}). fix: one of its kinds"
        )
    return kinds[kind](dim, heads, context, layer, depth)
