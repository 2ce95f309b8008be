"""Arguments, results and errors of conversions from one attention variant to another."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model.attention.base import Attention
from run.settings import as_typed

Weights = dict[str, Tensor]  # by their names in the module of a layer's attention


class Change(NamedTuple):
    """A change to a layer in a conversion, and whether it preserves the layer's function."""

    text: str
    is_exact: bool


Converted = tuple[Weights, list[Change]]  # the new weights of a layer, and its changes


@dataclass(frozen=True)
class Layers:
    """The attention of every layer in both models, their `context`, and the old weights."""

    old: list[Attention]
    new: list[Attention]
    stored: dict[str, Tensor]  # by their names in the old model
    context: int

    def read(self, layer: int) -> Weights:
        """Return the old weights of a layer's attention in fp32, the dtype used for averaging."""
        prefix = f"blocks.{layer}.attention."
        weights = {}
        for name, weight in self.stored.items():
            if name.startswith(prefix):
                weights[name.removeprefix(prefix)] = weight.float()
        return weights

    def moment(self, layer: int) -> Tensor:
        """Return the mean (D, D) of x x^T over the inputs x of a layer's attention.

        The inputs are assumed to be white noise, scaled and shifted by the preceding norm.
        """
        norm = f"blocks.{layer}.attention_norm."
        weight = self.stored[norm + "weight"].float()  # (D,)
        bias = self.stored.get(norm + "bias", torch.zeros_like(weight))
        assert weight.ndim == 1 and bias.shape == weight.shape
        return weight.square().diag() + bias.outer(bias)


def no_formula(layer: int, change: str, fix: str) -> ValueError:
    return ValueError(f"no formula for this conversion (layer {layer}: {change}). fix: {fix}")


def check_equal(layer: int, options: dict, needed: dict) -> None:
    """Raise ValueError unless these options have the values that the conversion needs."""
    changes = []
    fixes = []
    for key, value in needed.items():
        if options[key] != value:
            changes.append(f"{key} is {as_typed(options[key])}, not {as_typed(value)}")
            fixes.append(f"attention.{key}={as_typed(value)}")
    if changes:
        raise no_formula(layer, ", ".join(changes), " ".join(fixes))


def check_all_used(layer: int, weights: Weights, used: Iterable[str]) -> None:
    """Raise ValueError if the new attention leaves any of the weights unused."""
    lost = ", ".join(sorted(weights.keys() - set(used)))
    if lost:
        raise no_formula(layer, f"{lost} would be lost", f"choose an attention variant with {lost}")
