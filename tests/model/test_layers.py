"""Norms, feed-forward layers and RoPE match their formulas in fp64."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from model.context import ForwardContext, cos_and_sin
from model.layers import FeedForward, GatedFeedForward, LayerNorm, RMSNorm, apply_rope
from model.transformer import ResidualSum
from tests.conftest import close, redraw


def random(*shape: int) -> Tensor:
    """Normally distributed fp64 values that depend only on the shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("norm_class", [RMSNorm, LayerNorm])
def test_norms_match_their_formulas(norm_class):
    x = random(2, 5, 7)
    norm = redraw(norm_class(7, 1e-6).double())
    expected = torch.empty_like(x)
    for b, t in product(range(2), range(5)):
        row = x[b, t].tolist()
        mean = sum(row) / 7 if norm_class is LayerNorm else 0.0
        std = math.sqrt(sum((value - mean) ** 2 for value in row) / 7 + 1e-6)
        expected[b, t] = (x[b, t] - mean) / std * norm.weight
    if norm_class is LayerNorm:
        expected = expected + norm.bias
    close(norm(x), expected)


def test_rms_norm_accumulates_bf16_inputs_in_fp32():
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    norm = RMSNorm(4096, 1e-6).bfloat16()
    assert norm(x).eq(1).all()


def test_the_residual_sum_rounds_only_its_gradient():
    x = (1000 * random(3, 5)).float().requires_grad_()
    y = random(3, 5).bfloat16().requires_grad_()
    grad = random(5, 3).T.float()
    total = ResidualSum.apply(x, y)
    assert torch.equal(total, (x.double() + y.double()).float())
    total.backward(grad)
    assert torch.equal(x.grad, grad.bfloat16().float())
    assert torch.equal(y.grad, grad.bfloat16())


ACTIVATIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "relu2": lambda x: max(x, 0.0) ** 2,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_layers_match_their_formulas(activation):
    def activate(x: Tensor) -> Tensor:
        return x.detach().clone().apply_(ACTIVATIONS[activation])

    x = random(3, 4)
    ffn = redraw(FeedForward(4, 6, activation=activation).double())
    close(ffn(x), activate(x @ ffn.up_proj.weight.T) @ ffn.down_proj.weight.T)
    ffn = redraw(GatedFeedForward(4, 6, activation=activation).double())
    gate = activate(x @ ffn.gate_proj.weight.T)
    up = x @ ffn.up_proj.weight.T
    close(ffn(x), (gate * up) @ ffn.down_proj.weight.T)


def rotated(x: Tensor, base: float) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x (B, T, H, D) by their angles, as complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None, None] * base ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def test_rope_rotates_each_pair_by_its_angle():
    x = random(1, 5, 2, 6)
    y = apply_rope(x, *ForwardContext(torch.zeros(1, 5)).rotary(6, 100.0))
    close(y, rotated(x, 100.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cos_and_sin_is_a_valid_custom_operator(dtype):
    angle = random(2, 3, 1, 4).to(dtype)
    torch.library.opcheck(cos_and_sin, (angle,))
    cos, sin = cos_and_sin(angle)
    close(torch.complex(cos, sin), torch.exp(1j * angle))
