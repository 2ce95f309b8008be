"""Products for a few tokens match float64, and optimizing for decoding preserves the logits."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from inference import quantize
from model.layers import FusedPart, Linear, project
from run import hardware
from run.compilation import cpp_compiler
from run.instantiate import instantiate
from tests.conftest import ROOT, VARIANTS, close, learn_by_heart, redraw, tree_of


@pytest.fixture
def compiled():
    if not quantize.load_matvec(ROOT / ".cache", cpp_compiler()):
        pytest.skip("no C++ compiler")


@pytest.mark.parametrize("outputs, inputs", [(64, 48), (7, 21), (1, 5), (130, 96), (4, 300)])
@pytest.mark.parametrize("tokens", [1, 2, 4, 7, 16, 40])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.bfloat16, 1.2e-2)])
@pytest.mark.parametrize("int8", [False, True])
def test_products_match_float64(compiled, outputs, inputs, tokens, dtype, error, int8, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    linear = Linear(inputs, outputs, bias=True)
    for p in linear.parameters():
        torch.nn.init.normal_(p, generator=generator)
    x = torch.randn(tokens, 1, inputs, generator=generator).to(dtype)
    decoding = quantize.Int8Linear if int8 else quantize.MatvecLinear
    few = decoding(linear.weight.detach().to(dtype), linear.bias.detach().to(dtype))
    if int8:
        assert few.levels.dtype == torch.int8
        scale = (
            linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        )  # half a quantization step, and the rounding of the scale
        assert ((few.weight - linear.weight).abs() <= 0.5 * scale + 2 * error * scale * 127).all()
    weight = few.weight.double()
    rounded = x.double()
    has_kernel = not int8 or hasattr(torch.ops.attend, "matvec_int8")
    if tokens <= quantize.MAX_FEW_TOKENS and has_kernel:
        monkeypatch.setattr(F, "linear", None)  # must not be called
        if int8:
            # The product of the two scales is never rounded to the dtype.
            weight = few.levels.double() * few.scale.double()[:, None]
            rounded = round_to_int8(x.float())
    expected = (rounded @ weight.T) + few.bias.double()
    y = few(x)
    assert y.dtype == dtype and (y - expected).abs().max() <= error * expected.abs().max()


def round_to_int8(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 vectors x (..., N) to 127 levels of either sign; return them in float64."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    levels = (x * (127 / largest)).round()
    return levels.double() * largest.double() / 127


@pytest.mark.parametrize("case", ["zeros", "extremes", "cancelled", "infinite", "nan"])
@pytest.mark.parametrize("inputs", [70, 4096])
def test_int8_products_handle_extreme_inputs(compiled, case, inputs):
    """Tests zeros, the largest sums, sums that cancel out, and non-finite inputs."""
    x = torch.zeros(1, inputs)
    expected = torch.zeros(1, 3)
    if case == "extremes":
        x -= 2
        expected -= 2 * inputs
    elif case == "cancelled":
        x[:, ::2] = 1
        x[:, 1::2] = -1
    elif case == "infinite":
        x[:, 1] = torch.inf
    elif case == "nan":
        x[:, -1] = torch.nan
    y = quantize.Int8Linear(torch.ones(3, inputs), None)(x)
    if case in ("infinite", "nan"):
        assert not y.isfinite().any()
    else:
        torch.testing.assert_close(y, expected)


def test_a_compiled_int8_product_equals_the_eager_product(compiled):
    few = quantize.Int8Linear(torch.randn(48, 32), None)
    x = torch.randn(3, 1, 32)
    compiled_few = torch.compile(few, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled_few(x), few(x))


@pytest.mark.parametrize("variant", ["gqa", "mla", "gdn", "gated"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_optimizing_for_decoding_preserves_the_logits(compiled, variant, tied):
    model = redraw(instantiate(tree_of(variant, f"model.tied={tied}"))).eval()
    tokens = torch.randint(128, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = model(tokens)
        quantize.optimize_for_decoding(model, int8=False)
        close(model(tokens), exact, rtol=1e-4, atol=1e-4)
        quantize.optimize_for_decoding(
            rounded := redraw(instantiate(tree_of(variant, f"model.tied={tied}"))).eval(), int8=True
        )
        assert (
            0 < (rounded(tokens) - exact).std() < 0.2 * exact.std()
        )  # for random weights; the cost in nats is tested below
    assert not any(type(module) is Linear for module in model.modules())


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("variant", [*VARIANTS, "llama attention.bias=true"])
def test_fused_projections_equal_separate_ones(compiled, variant, int8, monkeypatch):
    tokens = torch.randint(128, (2, 7), generator=torch.Generator().manual_seed(1))
    logits = []
    for is_fused in (True, False):
        if not is_fused:
            monkeypatch.setattr(quantize, "fuse_projections", lambda *_: None)
        model = redraw(instantiate(tree_of(*variant.split()))).eval()
        quantize.optimize_for_decoding(model, int8)
        assert is_fused == any(isinstance(module, FusedPart) for module in model.modules())
        with torch.no_grad():
            logits.append(model(tokens))
    close(*logits, rtol=1e-5, atol=1e-5)


def test_a_fused_layer_is_multiplied_once_and_each_part_can_be_used_alone(compiled):
    model = redraw(instantiate(tree_of("gqa", "model.depth=1"))).eval()
    quantize.optimize_for_decoding(model, int8=True)
    layer = model.blocks[0]
    products = []
    for module in layer.modules():
        if isinstance(module, quantize.Int8Linear):
            module.register_forward_hook(lambda *_: products.append(1))
    model(torch.tensor([[1, 2]]))
    assert len(products) == 4  # q, k and v; o; gate and up; down
    x = torch.randn(3, model.embed.weight.shape[1])
    parts = (layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj)
    for some in (parts, parts[::-1], parts[:2]):
        for alone, together in zip([part(x) for part in some], project(x, *some), strict=True):
            assert torch.equal(alone, together)


@pytest.mark.parametrize(
    "linears",
    [
        [Linear(8, 4), Linear(8, 4, bias=True)],
        [Linear(8, 4, bias=True), Linear(8, 4)],
        [Linear(8, 4), Linear(6, 4)],
    ],
)
def test_projections_that_differ_in_bias_or_input_are_not_fused(linears):
    parent = torch.nn.Module()
    parent.fused_projections = ("a", "b")
    parent.a, parent.b = linears
    quantize.fuse_projections(parent, quantize.MatvecLinear)
    assert [parent.a, parent.b] == linears


@pytest.mark.parametrize("kind", [quantize.MatvecLinear, quantize.Int8Linear])
def test_a_bias_is_cast_with_its_layer(kind):
    layer = kind(torch.randn(4, 8).bfloat16(), torch.randn(4).bfloat16()).float()
    assert layer.bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("is_native", "dtype", "multiplied"),
    [
        (True, torch.bfloat16, torch.bfloat16),
        (False, torch.bfloat16, torch.float32),
        (False, torch.float32, torch.float32),
    ],
)
def test_long_products_are_in_fp32_if_bf16_is_emulated(monkeypatch, is_native, dtype, multiplied):
    monkeypatch.setattr(hardware, "multiplies_bf16", lambda device: is_native)
    product = F.linear
    dtypes = []

    def record(x, *more):
        dtypes.append(x.dtype)
        return product(x, *more)

    monkeypatch.setattr(F, "linear", record)
    weight = torch.randn(48, 32).to(dtype)
    bias = torch.randn(48).to(dtype)
    x = torch.randn(quantize.MAX_FEW_TOKENS + 1, 32).to(dtype)
    y = quantize.MatvecLinear(weight, bias)(x)
    assert dtypes == [multiplied] and y.dtype == dtype
    close(y.float(), x.float() @ weight.float().T + bias.float(), rtol=0.02, atol=0.1)


LOAD = """
import sys
from pathlib import Path
from inference import quantize
print(quantize.load_matvec(Path(sys.argv[1]), sys.argv[2]))
"""


def test_a_damaged_library_is_compiled_again(compiled, tmp_path):
    libraries = list((ROOT / ".cache").glob("matvec-*.so"))
    library = max(libraries, key=lambda path: path.stat().st_mtime)
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"#!/bin/sh\nwhile [ $1 != -o ]; do shift; done; cp '{library}' $2\n", encoding="utf-8"
    )
    compiler.chmod(0o755)
    cache = tmp_path / "cache"

    def load() -> str:
        command = [sys.executable, "-c", LOAD, cache, compiler]
        return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8").stdout

    assert load() == "True\n"
    (copy,) = cache.iterdir()  # no temporary file is left
    copy.write_bytes(b"")
    assert load() == "True\n"
    assert copy.stat().st_size == library.stat().st_size and list(cache.iterdir()) == [copy]


def test_products_fall_back_to_torch_without_a_compiler(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.ops, "attend", object())
    assert not quantize.load_matvec(tmp_path, "false")
    assert not quantize.load_matvec(tmp_path, None)
    *_, line = capsys.readouterr().err.splitlines()
    assert "decoding is slower (no C++ compiler. fix: install g++" in line
    model = instantiate(tree_of("gqa"))
    quantize.optimize_for_decoding(model, int8=False)
    assert not any(isinstance(module, quantize.MatvecLinear) for module in model.modules())


def test_int8_weights_cost_less_than_a_hundredth_of_a_nat(run_of):
    run = run_of("steps=15", "schedule.warmup=2")
    learn_by_heart(run, 15)
    inputs, targets = run.trainer.loader(0)
    nats = []
    with torch.no_grad():
        for int8 in (False, True):
            quantize.optimize_for_decoding(run.trainer.model, int8) if int8 else None
            nats.append(
                F.cross_entropy(run.trainer.model(inputs).flatten(0, 1), targets.flatten()).item()
            )
    # Over 5 seeds, trained in fp32 and bf16: 0.25 to 0.38 nats, changed by at most 0.0002.
    assert nats[0] < 1 and nats[0] != nats[1] and abs(nats[1] - nats[0]) < 0.01


@pytest.mark.parametrize("inputs", [quantize.MAX_INT8_INPUTS, quantize.MAX_INT8_INPUTS + 16])
def test_int8_products_of_many_inputs_do_not_overflow(compiled, inputs):
    """The kernel's sums of 32 bits are used only up to MAX_INT8_INPUTS."""
    linear = quantize.Int8Linear(torch.ones(4, inputs), None)
    close(linear(torch.ones(1, inputs)), torch.full((1, 4), float(inputs)), rtol=1e-3, atol=0)
