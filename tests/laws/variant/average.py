"""A running average of values with a learned forget gate; the initial state is a buffer.

s_t = f_t s_{t-1} + (1 - f_t) v_t   with   f_t = sigmoid(forget(x_t)),   s_0 = initial_state
"""

import torch
from torch import Tensor

from model.attention.base import Attention, LayerSpec, Shared
from model.cache import LayerCache, Shape
from model.context import ForwardContext
from model.layers import Linear, fp32
from run.ranges import NonNegativeFloat


class RunningAverage(Attention):
    """The state before the first token ranges from -`offset` to `offset` over the features."""

    def __init__(self, spec: LayerSpec, *, offset: NonNegativeFloat):
        super().__init__()
        dim = spec.dim
        self.dim = dim
        self.v_proj = Linear(dim, dim)
        self.forget_proj = Linear(dim, dim)
        self.o_proj = Linear(dim, dim)
        self.register_buffer("initial_state", torch.linspace(-offset, offset, dim))

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        v = fp32(self.v_proj(x))
        forget = fp32(self.forget_proj(x)).sigmoid()
        initial = self.initial_state.type_as(v)
        state = initial if cache is None else cache.states["average"].type_as(v)

        # The first token of a row or a document resets the state.
        is_first = (ctx.positions == 0)[:, :, None]
        states = []
        for t in range(x.shape[1]):
            state = torch.where(is_first[:, t], initial, state)
            state = forget[:, t] * state + (1 - forget[:, t]) * v[:, t]
            states.append(state)
        if cache is not None:
            cache.states["average"].copy_(state)
        return self.o_proj(torch.stack(states, dim=1).type_as(x)), shared

    def state_shapes(self, capacity: int) -> dict[str, Shape]:
        return {"average": (self.dim,)}

    def attention_flops(self, context: int) -> float:
        return 5 * self.dim
