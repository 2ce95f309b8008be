"""What a conversion of attentions is given and gives back, and how it refuses."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from model.attention.base import Attention

Weights = dict[str, Tensor]  # by their names in the module of a layer's attention


class Change(NamedTuple):
    """What a conversion does to a layer, and whether it computes the same as before."""

    text: str
    is_exact: bool


Converted = tuple[Weights, list[Change]]  # the new weights of a layer, and how it changes


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


def no_formula(layer: int, change: str, fix: str) -> ValueError:
    return ValueError(f"no formula for this conversion (layer {layer}: {change}). fix: {fix}")


def check_equal(layer: int, options: dict, needed: dict) -> None:
    """Raise ValueError unless these options have the values that the conversion needs."""
    for key, value in needed.items():
        if options[key] != value:
            fix = "null" if value is None else value
            raise no_formula(
                layer, f"{key} is {options[key]}, not {value}", f"attention.{key}={fix}"
            )


def check_all_used(layer: int, weights: Weights, used: Iterable[str]) -> None:
    """Raise ValueError if the new attention has no use for some weights."""
    lost = ", ".join(sorted(weights.keys() - set(used)))
    if lost:
        raise no_formula(layer, f"{lost} would be lost", f"an attention with {lost}")
