"""The gated delta rule in all of its forms against its recurrence, and what a step of it launches."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.instantiate import instantiate
from model.attention import gated_delta
from model.attention.gated_delta import FORGET_ALL, delta_rule
from tests.conftest import close, tree_of
from tests.test_layers import Operations

DIM = 8


def inputs_of(length: int, dim: int = DIM, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, beta, g and a state, with a document that starts within and a token of padding."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = torch.randn(3, 2, length, 3, dim, generator=generator, dtype=torch.float64)
    beta, g = torch.rand(2, 2, length, 3, generator=generator, dtype=torch.float64)
    g = -g
    g[0, length // 3] = FORGET_ALL
    g[1, length // 2] = beta[1, length // 2] = 0.0
    state = torch.randn(2, 3, dim, dim, generator=generator, dtype=torch.float64)
    inputs = (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta, g, state)
    return [x.to(dtype).requires_grad_() for x in inputs]


def recurrence(q, k, v, beta, g, state) -> tuple[Tensor, Tensor]:
    """S_t = a_t S_{t-1} + k_t u_t', u_t = b_t (v_t - a_t S_{t-1}' k_t), output S_t' q_t."""
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t, :, None, None].exp() * state
        error = v[:, t] - torch.einsum("bhij,bhi->bhj", state, k[:, t])
        u = beta[:, t, :, None] * error
        state = state + torch.einsum("bhi,bhj->bhij", k[:, t], u)
        outputs.append(torch.einsum("bhij,bhi->bhj", state, q[:, t]))
    return torch.stack(outputs, dim=1), state


def with_gradients(rule, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    y, state = rule(*inputs)
    loss = (y * y.detach().cos()).sum() + (state * state.detach().sin()).sum()
    return y, state, *torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("length, chunk", [(1, 4), (4, 4), (11, 4), (13, 1), (37, 4), (6, 64)])
def test_the_delta_rule_equals_its_recurrence(length, chunk, on_gpu, monkeypatch):
    monkeypatch.setattr(gated_delta, "on_gpu", lambda x: on_gpu)
    inputs = inputs_of(length)
    found = with_gradients(lambda *inputs: delta_rule(*inputs, chunk), inputs)
    close(found, with_gradients(recurrence, inputs))


def test_the_scan_of_a_gpu_is_exact_in_fp32(monkeypatch):
    monkeypatch.setattr(gated_delta, "on_gpu", lambda x: True)
    inputs = inputs_of(200, dim=32, dtype=torch.float32)
    y, state = delta_rule(*inputs, 8)
    expected_y, expected_state = recurrence(*(x.double() for x in inputs))
    close(y, expected_y.float())
    close(state, expected_state.float())


def products(length: int) -> int:
    """Batched products of a forward and backward over chunks of 2 tokens."""
    inputs = inputs_of(length)
    with Operations() as operations:
        with_gradients(lambda *inputs: delta_rule(*inputs, 2), inputs)
    return operations.names.count("aten::bmm")


def test_on_a_gpu_four_times_the_chunks_take_two_more_products(monkeypatch):
    monkeypatch.setattr(gated_delta, "on_gpu", lambda x: True)
    assert products(64) - products(16) == 2 * 3  # each has two in its backward


def test_a_step_of_one_token_solves_no_system():
    model = instantiate(tree_of("delta"))
    cache = model.new_cache(2, 8, torch.float32, "cpu")
    with torch.no_grad(), Operations() as operations:
        model(torch.ones(2, 3, dtype=torch.int64), cache)
        assert "aten::linalg_solve_triangular" in operations.names
        operations.names.clear()
        model(torch.ones(2, 1, dtype=torch.int64), cache)
    assert "aten::linalg_solve_triangular" not in operations.names
