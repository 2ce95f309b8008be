"""The gated delta rule in chunks against its recurrence, and what a step of it computes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.gated_delta import delta_rule
from model.attention.recurrent import FORGET_ALL, no_autocast
from tests.conftest import close, drawn, tree_of
from tests.training.test_optimizers import Operations

DIM = 8


def inputs_of(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, beta, g and a state, with a document that starts within and a token of padding."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = torch.randn(3, 2, length, 3, DIM, generator=generator, dtype=torch.float64)
    beta, g = torch.rand(2, 2, length, 3, generator=generator, dtype=torch.float64)
    g = -g
    g[0, length // 3] = FORGET_ALL
    g[1, length // 2] = beta[1, length // 2] = 0.0
    state = torch.randn(2, 3, DIM, DIM, generator=generator, dtype=torch.float64)
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


@pytest.mark.parametrize("length, chunk", [(1, 4), (4, 4), (11, 4), (13, 1), (37, 4), (6, 64)])
def test_the_delta_rule_equals_its_recurrence(length, chunk):
    inputs = inputs_of(length)
    chunked = with_gradients(lambda *inputs: delta_rule(*inputs, chunk), inputs)
    close(chunked, with_gradients(recurrence, inputs))


def test_a_step_of_one_token_solves_no_system():
    model = drawn(tree_of("delta"))
    cache = model.new_cache(2, 8, torch.float32, "cpu")
    with torch.no_grad(), Operations() as operations:
        model(torch.ones(2, 3, dtype=torch.int64), cache)
        assert "aten::linalg_solve_triangular" in operations.names
        operations.names.clear()
        model(torch.ones(2, 1, dtype=torch.int64), cache)
    assert "aten::linalg_solve_triangular" not in operations.names


def test_a_compiled_backward_is_as_precise_as_the_forward(trainer_of):
    """Autocast is off in the recurrence, and must stay off in its gradients."""
    trainer_of().compile()

    def in_fp32(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        with no_autocast(inputs[0].device):
            return delta_rule(*inputs, 4)

    inputs = inputs_of(11, dtype=torch.float32)
    expected = with_gradients(in_fp32, inputs)
    compiled = torch.compile(in_fp32, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        y, state = compiled(*inputs)
    close(with_gradients(lambda *inputs: (y, state), inputs), expected)
