"""Chunked gated linear recurrences match their definition with few, large products per chunk.

The definitions are from fla-core. Importing the package requires a GPU, so tests load single files.
"""

from collections.abc import Callable
from importlib import util
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.recurrent import FORGET_ALL, UnitTriangularSolve, recurrence
from model.context import ForwardContext
from model.layers import no_autocast
from tests.conftest import close, drawn, tree_of
from tests.training.test_optimizers import Operations
from training.parallel import compile_model

DIM = 8
# Presets and their files in fla/ops.
FLA = {"gdn": "gated_delta_rule", "kda": "kda", "mamba2": "simple_gla"}


def inputs_of(length: int, preset: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, beta, g and a state, with document starts inside the rows and one padding token.

    Queries and keys have length 1, and decays range from 1 to e^-50 per token.
    """
    generator = torch.Generator().manual_seed(length)
    num_decays = DIM if preset == "kda" else 1
    q, k, v = torch.randn(3, 2, length, 3, DIM, generator=generator, dtype=torch.float64)
    beta = torch.rand(2, length, 3, 1, generator=generator, dtype=torch.float64)
    g = -50 * torch.rand(2, length, 3, num_decays, generator=generator, dtype=torch.float64) ** 8
    g[0, [length // 3, length // 2]] = FORGET_ALL
    g[1, length // 2] = beta[1, length // 2] = 0.0
    state = torch.randn(2, 3, DIM, DIM, generator=generator, dtype=torch.float64)
    inputs = (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta, g, state)
    return [x.to(dtype).requires_grad_() for x in inputs]


def chunked(preset: str, chunk: int) -> Callable:
    def rule(q, k, v, beta, g, state):
        erase = None if preset == "mamba2" else beta
        return recurrence(q, k, beta * v, erase, g, state, chunk)

    return rule


def token_by_token(q, k, v, beta, g, state, erases: bool = True) -> tuple[Tensor, Tensor]:
    """S_t = Diag(a_t) S_{t-1} + b_t k_t u_t', u_t = v_t - S_{t-1}' Diag(a_t) k_t, or u_t = v_t."""
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t, :, :, None].exp() * state
        u = v[:, t] - erases * torch.einsum("bhij,bhi->bhj", state, k[:, t])
        state = state + torch.einsum("bhi,bhj->bhij", k[:, t], beta[:, t] * u)
        outputs.append(torch.einsum("bhij,bhi->bhj", state, q[:, t]))
    return torch.stack(outputs, dim=1), state


def with_gradients(rule, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    y, state = rule(*inputs)
    loss = (y * y.detach().cos()).sum() + (state * state.detach().sin()).sum()
    return y, state, *torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("length, chunk", [(1, 4), (11, 4), (37, 5), (6, 64)])
@pytest.mark.parametrize("preset", FLA)
def test_chunked_outputs_and_gradients_match_the_recurrence(preset, length, chunk):
    inputs = inputs_of(length, preset)
    expected = with_gradients(lambda *x: token_by_token(*x, preset != "mamba2"), inputs)
    close(with_gradients(chunked(preset, chunk), inputs), expected)


@pytest.mark.parametrize("preset", FLA)
def test_products_in_bf16_have_only_rounding_errors(preset):
    """The state and the decays stay in fp32, so errors do not grow with the length."""
    for length in (64, 512):
        inputs = inputs_of(length, preset)
        for x in inputs[:3]:
            x.data = x.data.bfloat16().double()
        expected = with_gradients(chunked(preset, 64), inputs)
        low = [x.detach().bfloat16().requires_grad_() for x in inputs[:3]]
        wide = [x.detach().float().requires_grad_() for x in inputs[3:]]
        results = with_gradients(chunked(preset, 64), [*low, *wide])
        assert results[1].dtype == torch.float32
        for result, right in zip(results, expected, strict=True):
            assert (result - right).norm() < 0.005 * right.norm()


def naive(operation: str, function: str) -> Callable:
    """A function of fla-core, loaded from its file because the package requires Triton."""
    (folder,) = util.find_spec("fla").submodule_search_locations
    spec = util.spec_from_file_location(operation, f"{folder}/ops/{operation}/naive.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


def compare(preset: str) -> float:
    """The largest difference from fla-core's outputs in fp32."""
    q, k, v, beta, g, state = inputs_of(100, preset, dtype=torch.float32)
    y, _ = chunked(preset, 64)(q, k, v, beta, g, state)
    inputs = {"q": q, "k": k, "v": v, "g": g.squeeze(-1), "beta": beta[..., 0]}
    if preset == "mamba2":
        inputs["v"] = inputs.pop("beta")[..., None] * v
    expected, _ = naive(FLA[preset], f"naive_recurrent_{FLA[preset]}")(
        **inputs, scale=1.0, initial_state=state
    )
    return (y - expected).abs().max().item()


@pytest.mark.parametrize("preset", FLA)
def test_recurrences_match_fla(preset):
    assert compare(preset) < 1e-4


def test_mamba2_writes_nothing_for_a_token_without_decay():
    layer = drawn(tree_of("mamba2")).blocks[0].attention
    x = torch.randn(2, 9, 64)
    ctx = ForwardContext(x[..., 0])
    layer.decay_bias.data.fill_(-200.0)
    assert not layer(x, ctx, None, {})[0].any()


@pytest.mark.parametrize("preset", FLA)
def test_products_are_few_and_no_system_is_solved(preset):
    generator = torch.Generator().manual_seed(0)
    num_decays = 32 if preset == "kda" else 1
    q, k, v = torch.randn(3, 1, 256, 2, 32, generator=generator)
    beta = torch.rand(1, 256, 2, 1, generator=generator)
    g = -torch.rand(1, 256, 2, num_decays, generator=generator)
    inputs = [x.requires_grad_() for x in (q, k, v, beta, g, torch.zeros(1, 2, 32, 32))]
    with Operations() as operations:
        with_gradients(chunked(preset, 64), inputs)
    assert not [name for name in operations.names if "linalg" in name or "triangular" in name]
    # Each product has two gradients. In each of the four chunks, two products use the state.
    in_chunks = 0 if preset == "mamba2" else 4 * 2 * 3
    products = [name for name in operations.names if name in ("aten::bmm", "aten::baddbmm")]
    assert len(products) <= in_chunks + 20


@pytest.mark.parametrize("correlation, sign", [(1.0, 1), (1.0, -1), (0.9, -1)])
def test_the_triangular_solve_is_accurate_for_any_keys(correlation, sign):
    """With equal keys, powers of A have elements up to 1e18, but its inverse has none above 1."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(64, 16, generator=generator, dtype=torch.float64)
    k[1:] = correlation * k[:1] + (1 - correlation**2) ** 0.5 * k[1:]
    k[1::2] *= sign
    k = F.normalize(k, dim=-1)
    system = (k @ k.mT).tril(-1)
    y = torch.randn(64, 8, generator=generator, dtype=torch.float64)

    def solve(dtype: torch.dtype) -> tuple[Tensor, ...]:
        a = system.to(dtype).requires_grad_()
        b = y.to(dtype).requires_grad_()
        x = UnitTriangularSolve.apply(a, b)
        return x, *torch.autograd.grad(x.square().sum(), (a, b))

    a = system.clone().requires_grad_()
    b = y.clone().requires_grad_()
    x = torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)
    expected = (x, *torch.autograd.grad(x.square().sum(), (a, b)))
    expected = (expected[0], expected[1].tril(-1), expected[2])
    close(solve(torch.float64), expected)
    for result, right in zip(solve(torch.float32), expected, strict=True):
        error = (result - right).abs().max() / right.abs().max()
        assert error < 1e-5


def test_a_single_token_step_solves_no_triangular_system(monkeypatch):
    solve = mock.Mock(wraps=UnitTriangularSolve.apply)
    monkeypatch.setattr(UnitTriangularSolve, "apply", solve)
    model = drawn(tree_of("gdn"))
    cache = model.new_cache(2, 8, torch.float32, "cpu")
    with torch.no_grad():
        model(torch.ones(2, 3, dtype=torch.int64), cache)
        assert solve.called
        solve.reset_mock()
        model(torch.ones(2, 1, dtype=torch.int64), cache)
    assert not solve.called


def test_a_compiled_backward_stays_in_fp32_under_autocast(run_of):
    """Autocast is disabled in the recurrence and must stay disabled in its backward."""
    run = run_of()
    compile_model(run.trainer.loss_module, run.env.settings, run.env.ranks)

    def in_fp32(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        with no_autocast(inputs[0].device):
            return chunked("gdn", 4)(*inputs)

    inputs = inputs_of(11, "gdn", dtype=torch.float32)
    expected = with_gradients(in_fp32, inputs)
    compiled = torch.compile(in_fp32, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        y, state = compiled(*inputs)
    close(with_gradients(lambda *inputs: (y, state), inputs), expected)


if __name__ == "__main__":  # python -m tests.model.test_recurrence prints a table
    print("| attention= | file in fla/ops | largest difference |\n|---|---|---|")
    for preset, name in FLA.items():
        print(f"| `{preset}` | {name}/naive.py | {compare(preset):.0e} |")
