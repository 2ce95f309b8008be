"""The gated delta rule by the kernels of flash-linear-attention 0.6: Triton, in half precision.

The package's own function disables torch.compile, so each call would be a graph break. Registered
as custom operators with known output shapes, its kernels stay inside the compiled graph.
"""

from typing import Any

import torch
from fla.ops.gated_delta_rule import chunk
from torch import Tensor


@torch.library.custom_op("attend::fla_delta_rule", mutates_args=())
def fla_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor
) -> list[Tensor]:
    """As `delta_rule`, for q, k, v in half precision and the rest in fp32, all contiguous.

    Returns output, next state, and for the backward: cumulative sums of g, inverses (B, T, H, 64).
    """
    g_sum, y, inverse, next_state, *_ = chunk.chunk_gated_delta_rule_fwd(
        q, k, v, g, beta, scale=1.0, initial_state=state, output_final_state=True
    )
    return [y, next_state, g_sum, inverse]


@fla_delta_rule.register_fake
def empty_outputs(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor
) -> list[Tensor]:
    """Tensors with the shapes of the outputs, for tracing."""
    return [v.clone(), state.clone(), g.clone(), q.new_empty(*g.shape, 64)]


@torch.library.custom_op("attend::fla_delta_rule_backward", mutates_args=())
def gradients(saved: list[Tensor], grad_y: Tensor, grad_state: Tensor) -> list[Tensor]:
    """The gradients of q, k, v, beta, g and state. `saved` has the cumulative sums of g, not g."""
    q, k, v, beta, g_sum, state, inverse = saved
    grads = chunk.chunk_gated_delta_rule_bwd(
        q, k, v, g_sum, beta, inverse, 1.0, state, grad_y.contiguous(), grad_state
    )
    return list(grads[:6])


@gradients.register_fake
def empty_gradients(saved: list[Tensor], grad_y: Tensor, grad_state: Tensor) -> list[Tensor]:
    """Tensors with the shapes of the gradients, for tracing."""
    return [x.clone() for x in saved[:6]]


def save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    q, k, v, beta, _, state = inputs
    _, _, g_sum, inverse = output
    ctx.save_for_backward(q, k, v, beta, g_sum, state, inverse)


def backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(gradients(ctx.saved_tensors, grads[0], grads[1]))


fla_delta_rule.register_autograd(backward, setup_context=save)
