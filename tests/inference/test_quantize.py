"""Products for a few tokens match float64, and optimizing for decoding preserves the logits."""

from pathlib import Path
from types import SimpleNamespace

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


def random_layer(outputs: int, inputs: int, dtype: torch.dtype) -> tuple:
    """A weight, a bias and a function that draws tokens, in this dtype."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return draw(outputs, inputs), draw(outputs), draw


SHAPES = [(64, 48), (7, 21), (130, 96)]  # outputs and inputs
ERRORS = [(torch.float32, 1e-6), (torch.bfloat16, 1.2e-2)]


@pytest.mark.parametrize("outputs, inputs", SHAPES)
@pytest.mark.parametrize("dtype, error", ERRORS)
def test_products_match_float64(compiled, outputs, inputs, dtype, error, monkeypatch):
    weight, bias, draw = random_layer(outputs, inputs, dtype)
    layer = quantize.MatvecLinear(weight, bias)
    for tokens in (40, 16, 4, 1):
        if tokens <= quantize.MAX_FEW_TOKENS:
            monkeypatch.setattr(F, "linear", None)  # must not be called
        x = draw(tokens, 1, inputs)
        expected = x.double() @ weight.double().T + bias.double()
        y = layer(x)
        assert y.dtype == dtype and (y - expected).abs().max() <= error * expected.abs().max()


@pytest.mark.parametrize("outputs, inputs", SHAPES)
@pytest.mark.parametrize("dtype, error", ERRORS)
def test_int8_products_match_float64(compiled, outputs, inputs, dtype, error, monkeypatch):
    weight, bias, draw = random_layer(outputs, inputs, dtype)
    layer = quantize.Int8Linear(weight, bias)
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    # Half a quantization step, and the rounding of the scale.
    assert ((layer.weight - weight).abs() <= 0.5 * scale + 2 * error * scale * 127).all()
    # The product of the two scales is never rounded to the dtype.
    exact_weight = layer.levels.double() * layer.scale.double()[:, None]
    has_kernel = hasattr(torch.ops.attend, "matvec_int8")
    for tokens in (40, 16, 4, 1):
        x = draw(tokens, 1, inputs)
        if tokens <= quantize.MAX_FEW_TOKENS and has_kernel:
            monkeypatch.setattr(F, "linear", None)  # must not be called
            expected = round_to_int8(x.float()) @ exact_weight.T + bias.double()
        else:
            expected = x.double() @ layer.weight.double().T + bias.double()
        y = layer(x)
        assert y.dtype == dtype and (y - expected).abs().max() <= error * expected.abs().max()


def round_to_int8(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 vectors x (..., N) to 127 levels of either sign; return them in float64."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    levels = (x * (127 / largest)).round()
    return levels.double() * largest.double() / 127


@pytest.mark.parametrize(
    "x, expected",
    [
        (torch.zeros(70), 0.0),
        (torch.full((70,), -2.0), -140.0),  # the largest sum
        (torch.tensor([1.0, -1.0]).repeat(35), 0.0),
    ],
    ids=["zeros", "extremes", "cancelled"],
)
def test_int8_products_handle_extreme_inputs(compiled, x, expected):
    y = quantize.Int8Linear(torch.ones(3, 70), None)(x[None])
    close(y, torch.full((1, 3), expected))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_int8_products_do_not_hide_invalid_numbers(compiled, value):
    x = torch.zeros(1, 70)
    x[0, -1] = value
    assert not quantize.Int8Linear(torch.ones(3, 70), None)(x).isfinite().any()


def test_a_compiled_int8_product_equals_the_eager_product(compiled):
    few = quantize.Int8Linear(torch.randn(48, 32), None)
    x = torch.randn(3, 1, 32)
    compiled_few = torch.compile(few, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled_few(x), few(x))


@pytest.mark.parametrize("variant", ["gqa model.tied=true", "mla", "gdn"])
def test_optimizing_for_decoding_preserves_the_logits(compiled, variant):
    exact, plain, int8 = (redraw(instantiate(tree_of(*variant.split()))).eval() for _ in range(3))
    quantize.optimize_for_decoding(plain, int8=False)
    quantize.optimize_for_decoding(int8, int8=True)
    assert not any(type(module) is Linear for module in plain.modules())
    tokens = torch.randint(128, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = exact(tokens)
        close(plain(tokens), expected, rtol=1e-4, atol=1e-4)
        # With random weights; the cost in nats is tested below.
        assert 0 < (int8(tokens) - expected).std() < 0.2 * expected.std()


@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_projections_equal_separate_ones(compiled, variant, monkeypatch):
    tokens = torch.randint(128, (2, 7), generator=torch.Generator().manual_seed(1))
    logits = []
    for is_fused in (True, False):
        if not is_fused:
            monkeypatch.setattr(quantize, "fuse_projections", lambda *_: None)
        model = redraw(instantiate(tree_of(variant, "model.depth=1"))).eval()
        quantize.optimize_for_decoding(model, int8=False)
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
    "linears", [[Linear(8, 4), Linear(8, 4, bias=True)], [Linear(8, 4), Linear(6, 4)]]
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


def test_a_damaged_library_is_compiled_again(monkeypatch, tmp_path):
    """Simulates a dynamic linker that rejects an empty file, and a compiler."""
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nwhile [ $1 != -o ]; do shift; done; echo code > $2\n")
    compiler.chmod(0o755)

    def load_library(path: Path) -> None:
        if path.stat().st_size == 0:
            raise OSError("file too short")
        torch.ops.attend.matvec = None

    monkeypatch.setattr(torch.library, "register_fake", lambda *_: None)
    monkeypatch.setattr(torch.ops, "load_library", load_library)
    cache = tmp_path / "cache"
    for _ in range(2):
        monkeypatch.setattr(torch.ops, "attend", SimpleNamespace())
        assert quantize.load_matvec(cache, str(compiler))
        (library,) = cache.iterdir()  # no temporary file is left
        assert library.read_text() == "code\n"
        library.write_bytes(b"")


def test_products_fall_back_to_torch_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.ops, "attend", object())
    assert not quantize.load_matvec(tmp_path, "false")
    assert not quantize.load_matvec(tmp_path, None)
    model = instantiate(tree_of("gqa"))
    quantize.optimize_for_decoding(model, int8=False)
    assert not any(isinstance(module, quantize.MatvecLinear) for module in model.modules())


def test_int8_weights_cost_less_than_a_hundredth_of_a_nat(run_of):
    run = run_of("steps=15", "schedule.warmup=2")
    learn_by_heart(run, 15)
    inputs, targets = run.trainer.loader(0)
    model = run.trainer.model
    with torch.no_grad():
        exact = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
        quantize.optimize_for_decoding(model, int8=True)
        rounded = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    # Over 5 seeds, trained in fp32 and bf16: 0.25 to 0.38 nats, changed by at most 0.0002.
    assert exact < 1 and rounded != exact and abs(rounded - exact) < 0.01


@pytest.mark.parametrize("inputs", [quantize.MAX_INT8_INPUTS, quantize.MAX_INT8_INPUTS + 16])
def test_int8_products_of_many_inputs_do_not_overflow(compiled, inputs):
    """The kernel's sums of 32 bits are used only up to MAX_INT8_INPUTS."""
    linear = quantize.Int8Linear(torch.ones(4, inputs), None)
    close(linear(torch.ones(1, inputs)), torch.full((1, 4), float(inputs)), rtol=1e-3, atol=0)
