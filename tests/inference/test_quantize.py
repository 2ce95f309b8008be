"""Products for a few tokens match float64, and optimizing for decoding preserves the logits."""

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from inference import quantize
from model.layers import FusedPart, Linear, project
from run import hardware
from run.compilation import cpp_compiler
from run.instantiate import instantiate
from tests.conftest import ROOT, VARIANTS, close, redraw, tree_of


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


SHAPES = [(7, 21), (130, 96)]  # outputs and inputs
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


def test_int8_products_of_zeros_are_zero(compiled):
    assert not quantize.Int8Linear(torch.ones(3, 70), None)(torch.zeros(1, 70)).any()


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


@pytest.mark.parametrize("variant", [*VARIANTS, "llama model.tied=true attention.bias=true"])
def test_optimizing_for_decoding_preserves_the_logits(compiled, variant):
    exact = redraw(instantiate(tree_of(*variant.split()))).eval()
    plain = deepcopy(exact)
    int8 = deepcopy(exact)
    quantize.optimize_for_decoding(plain, int8=False)
    quantize.optimize_for_decoding(int8, int8=True)
    modules = {type(module) for module in plain.modules()}
    assert FusedPart in modules and Linear not in modules
    tokens = torch.randint(128, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = exact(tokens)
        close(plain(tokens), expected, rtol=1e-4, atol=1e-4)
        assert 0 < (int8(tokens) - expected).std() < 0.3 * expected.std()


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


def test_projections_of_which_some_have_a_bias_are_not_fused():
    parent = torch.nn.Module()
    parent.fused_projections = ("a", "b")
    parent.a = Linear(8, 4)
    parent.b = Linear(8, 4, bias=True)
    quantize.fuse_projections(parent, quantize.MatvecLinear)
    assert type(parent.a) is Linear and type(parent.b) is Linear


@pytest.mark.parametrize("is_native", [True, False])
def test_long_products_are_in_fp32_if_bf16_is_emulated(monkeypatch, is_native):
    monkeypatch.setattr(hardware, "multiplies_bf16", lambda device: is_native)
    product = mock.Mock(wraps=F.linear)
    monkeypatch.setattr(F, "linear", product)
    weight, bias, draw = random_layer(48, 32, torch.bfloat16)
    x = draw(quantize.MAX_FEW_TOKENS + 1, 32)
    y = quantize.MatvecLinear(weight, bias)(x)
    assert product.call_args[0][0].dtype == (torch.bfloat16 if is_native else torch.float32)
    close(y, x @ weight.T + bias, rtol=0.02, atol=0.1)


def test_a_damaged_library_is_compiled_again(monkeypatch, tmp_path):
    """Simulates a dynamic linker that rejects an empty file."""

    def load_library(path: Path) -> None:
        if path.stat().st_size == 0:
            raise OSError("file too short")
        torch.ops.attend.matvec = None

    monkeypatch.setattr(quantize, "compile_matvec", lambda path, _: path.write_text("code"))
    monkeypatch.setattr(torch.library, "register_fake", lambda *_: None)
    monkeypatch.setattr(torch.ops, "load_library", load_library)
    for _ in range(2):
        monkeypatch.setattr(torch.ops, "attend", SimpleNamespace())
        assert quantize.load_matvec(tmp_path, "compiler")
        (library,) = tmp_path.iterdir()
        assert library.read_text() == "code"
        library.write_bytes(b"")


def test_products_fall_back_to_torch_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.ops, "attend", object())
    for compiler in ("false", None):
        assert not quantize.load_matvec(tmp_path, compiler)
    model = instantiate(tree_of("gqa"))
    quantize.optimize_for_decoding(model, int8=False)
    assert not any(isinstance(module, quantize.MatvecLinear) for module in model.modules())


@pytest.mark.parametrize("inputs", [quantize.MAX_INT8_INPUTS, quantize.MAX_INT8_INPUTS + 16])
def test_int8_products_of_many_inputs_do_not_overflow(compiled, inputs):
    """The kernel's sums of 32 bits are used only up to MAX_INT8_INPUTS."""
    linear = quantize.Int8Linear(torch.ones(4, inputs), None)
    close(linear(torch.ones(1, inputs)), torch.full((1, 4), float(inputs)), rtol=1e-3, atol=0)
