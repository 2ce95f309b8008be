"""The gated delta rule in all of its forms against its recurrence, and what a step of it launches."""

import os
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from model.attention import gated_delta
from model.attention.gated_delta import FORGET_ALL, delta_rule
from model.layers import no_autocast
from run.instantiate import instantiate
from tests.conftest import close, tree_of
from tests.model.test_layers import Operations

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


# Where flash-linear-attention is not installed, a stand-in lets the operators be defined.
@pytest.fixture
def fla_delta_rule(monkeypatch):
    if not gated_delta.HAS_FLA:
        rule = SimpleNamespace(chunk=None)
        for name, module in {
            "fla": None,
            "fla.ops": None,
            "fla.ops.gated_delta_rule": rule,
        }.items():
            monkeypatch.setitem(sys.modules, name, module or SimpleNamespace())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the package where there is no GPU
        from model.attention.fla_delta_rule import fla_delta_rule
    return fla_delta_rule


def test_fla_returns_the_shapes_of_the_delta_rule(fla_delta_rule):
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(x.detach().float()).requires_grad_() for x in inputs_of(70)]
        q, k, v, *others = inputs
        half = [x.bfloat16() for x in (q, k, v)]
        found = fla_delta_rule(*half, *others)[:2]
        expected = delta_rule(*inputs, 64)
        assert [x.shape for x in found] == [x.shape for x in expected]
        assert [x.dtype for x in found] == [torch.bfloat16, torch.float32]
        loss = found[0].float().sum() + found[1].sum()
        grads = torch.autograd.grad(loss, inputs)
        assert [x.shape for x in grads] == [x.shape for x in inputs]


def test_the_layer_uses_fla_in_half_precision(fla_delta_rule, monkeypatch):
    monkeypatch.setattr(gated_delta, "HAS_FLA", True)
    monkeypatch.setattr(gated_delta, "on_gpu", lambda x: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = instantiate(tree_of("delta"))
        tokens = torch.zeros(2, 9, dtype=torch.int64)
        for dtype in (torch.bfloat16, torch.float32):
            with (
                Operations() as operations,
                torch.autocast("cpu", dtype, enabled=dtype.itemsize == 2),
            ):
                model(tokens).sum().backward()
            uses_fla = "attend::fla_delta_rule_backward" in operations.names
            assert uses_fla == (dtype == torch.bfloat16)


class Index(int):
    """An index of a loop, which in Triton's interpreter is an int and lacks this method."""

    def to(self, dtype) -> "Index":
        return self


is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(not gated_delta.HAS_FLA, reason="needs flash-linear-attention")
@pytest.mark.skipif(
    not (is_interpreted or torch.cuda.is_available()), reason="needs a GPU or TRITON_INTERPRET=1"
)
@pytest.mark.filterwarnings("ignore")  # of the interpreter: it divides by the zeros of padding
@pytest.mark.parametrize("length", [2, 70, 130])
def test_fla_equals_the_delta_rule(length, monkeypatch):
    """In fp16, because the interpreter has no bf16."""
    from model.attention.fla_delta_rule import fla_delta_rule

    inputs = inputs_of(length, dim=32, dtype=torch.float32)
    if is_interpreted:
        from fla.ops.common import chunk_delta_h
        from triton.runtime.autotuner import Autotuner

        monkeypatch.setattr(Autotuner, "_bench", lambda *args, **kwargs: [1.0, 1.0, 1.0])
        monkeypatch.setattr(
            chunk_delta_h, "range", lambda *args: map(Index, range(*args)), raising=False
        )
    else:
        inputs = [x.detach().cuda().requires_grad_() for x in inputs]

    def in_half(q, k, v, *others):
        y, state, *_ = fla_delta_rule(q.half(), k.half(), v.half(), *others)
        return y.float(), state

    found = with_gradients(in_half, inputs)
    expected = with_gradients(lambda *inputs: delta_rule(*inputs, 64), inputs)
    for x, y in zip(found, expected, strict=True):
        assert (x - y).norm() < 5e-3 * y.norm()  # fp16 has 11 bits
