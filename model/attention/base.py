"""The interface of an attention variant."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.types import Device

from model.cache import LayerCache, Shape
from model.context import AttentionMask, ForwardContext

# Values that a layer passes to later layers in the same forward pass, such as keys, by name. The
# entry "losses" is a dict of AuxLoss by name; `add_loss` adds to it.
Shared = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The model properties from which a layer is built."""

    dim: int  # features per token
    heads: int  # query heads
    context: int  # length of the longest training sequence, in tokens
    layer: int  # index of this layer, from 0
    depth: int  # number of layers
    norm_eps: float  # eps of the norms, except the norms of MLA's latents


class Attention(nn.Module, ABC):
    """Maps (B, T, D) to (B, T, D). Each output depends only on its own token and earlier ones.

    A subclass is constructed as `Subclass(spec, *, its own options)`. It must

    - end in a projection named `o_proj`, which starts at zero
    - have `norm` in the names of its norms
    - list in `losses` the names of the auxiliary losses that `forward` adds with `add_loss`
    - register tensors that are not parameters as buffers
    - cast values that it computes from buffers and its own one-dimensional parameters (`type_as`),
      because these are not converted to bf16 in a bf16 model
    """

    losses: tuple[str, ...] = ()
    window: int | None = None  # a token attends to at most this many tokens, itself included
    chunk: int | None = None  # a token attends only within its chunk of this many tokens
    keys_per_query: int = 0  # maximum number of keys that a decode step reads; 0: no limit
    low_precision_states: tuple[str, ...] = ()  # names of states that do not need fp32
    # Names of the linear layers that `forward` applies to x with `project`. If one is missing, they
    # are not fused for decoding.
    fused_projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")

    @abstractmethod
    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        """Map x (B, T, D) to the output (B, T, D), and return `shared` for the next layer.

        With a cache, the tokens of x follow the cached tokens and are added to the cache.
        """

    @abstractmethod
    def attention_flops(self, context: int) -> float:
        """Return forward FLOPs per token, excluding weight matmuls, averaged over a context."""

    def cache_shapes(self) -> dict[str, Shape]:
        """Return, by name, the shapes of the features that the cache stores for each token."""
        return {}

    def state_shapes(self, capacity: int) -> dict[str, Shape]:
        """Return, by name, the shapes of the states for a row of up to `capacity` tokens.

        The cache is allocated with zeros, and a reused row keeps its old state, so the token at
        position 0 must not depend on the state (see recurrent.py). A layer whose initial state is
        not zero sets it at that token.
        """
        return {}

    def new_cache(
        self, batch: int, capacity: int, dtype: torch.dtype, device: Device
    ) -> LayerCache:
        """Allocate an empty cache for `capacity` tokens in each of `batch` rows."""
        return LayerCache(
            batch,
            capacity,
            dtype,
            device,
            features=self.cache_shapes(),
            states=self.state_shapes(capacity),
            low_precision_states=self.low_precision_states,
            window=self.window,
            chunk=self.chunk,
        )

    def extend_cache(
        self, cache: LayerCache | None, ctx: ForwardContext, **new: Tensor
    ) -> tuple[dict[str, Tensor], AttentionMask]:
        """Add the new tokens' features (B, T, ...), passed by name, to the cache.

        Returns the features (B, S, ...) of the cached and the new tokens, and which of these tokens
        each new token attends to. Without a cache, these are only the new tokens.
        """
        if cache is None:
            return new, ctx.mask(self.window, self.chunk)
        return cache.update(ctx, **new)

    def init_param(self, name: str, generator: torch.Generator) -> Tensor:
        """Return the initial value of a parameter owned by this module; zeros by default."""
        return torch.zeros(getattr(self, name).shape)


class AuxLoss(NamedTuple):
    """A per-token auxiliary loss (B, T), summed over the layers so far."""

    objective: Tensor  # the weighted loss, which training minimizes
    value: Tensor  # the unweighted loss without a gradient, which training logs


def add_loss(shared: Shared, name: str, loss: Tensor, weight: float) -> Shared:
    """Return `shared` with a per-token auxiliary loss (B, T) added to the loss of earlier layers.

    Training sums the loss over the tokens that have a target, adds `weight` times this sum to the
    cross-entropy that it minimizes, and logs the unweighted loss under its name.
    """
    objective = weight * loss
    value = loss.detach()
    losses = shared.get("losses", {})
    if name in losses:
        objective = losses[name].objective + objective
        value = losses[name].value + value
    return shared | {"losses": losses | {name: AuxLoss(objective, value)}}
