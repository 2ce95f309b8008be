"""The definition of attention matches torch's, every kernel matches it, and the choice is right."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad, scaled_dot_product_attention

from inference import quantize
from model.attention.alibi import distance
from model.attention.kernels import blocks, decode, flex, fused
from model.attention.kernels.choose import KERNELS, AttentionKernel, choose
from model.attention.kernels.definition import Case, ScoreOptions, TokenBias, eager_attention
from model.attention.kernels.token_bias import SplitInThree, append_token_bias
from model.context import ForwardContext
from run.compilation import cpp_compiler
from tests.conftest import ROOT, close
from tests.model.test_layers import random
from tests.training.test_optimizers import Operations

SCALE = 8**-0.5
F64 = torch.float64
# Combinations of window, softcap and has_sink.
BLOCKWISE = [(None, None, False), (None, 2.0, True), (3, None, False), (3, 2.0, True)]
flex_test = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def loaded():
    """The kernels in C++."""
    if not quantize.load_matvec(ROOT / ".cache", cpp_compiler()):
        pytest.skip("no C++ compiler")


def kernel_inputs(window: int | None, has_sink: bool) -> tuple:
    """q, k and v with grouped heads, where v has a different width; the mask; and a sink."""
    q = random(2, 4, 9, 8).requires_grad_()
    k = random(2, 2, 9, 8).requires_grad_()
    v = random(2, 2, 9, 6).requires_grad_()
    sink = random(4).requires_grad_() if has_sink else None
    return q, k, v, ForwardContext(torch.zeros(2, 9)).mask(window, None), sink


def by_tokens(*tensors: Tensor) -> list[Tensor]:
    """(B, H, T, D) -> (B, T, H, D), the layout that layers use."""
    return [x.transpose(1, 2) for x in tensors]


def assert_same_with_gradients(y: Tensor, expected: Tensor, inputs: tuple) -> None:
    inputs = [x for x in inputs if x is not None]
    close(y, expected)
    grads = torch.autograd.grad(y.pow(3).sum(), inputs, retain_graph=True)
    close(grads, torch.autograd.grad(expected.pow(3).sum(), inputs, retain_graph=True))


@pytest.mark.parametrize("kv_heads", [3, 1])
@pytest.mark.parametrize("window", [None, 3])
def test_eager_attention_matches_torch(kv_heads, window):
    q, k, v = random(2, 6, 7, 8), random(2, kv_heads, 7, 8), random(2, kv_heads, 7, 4)
    mask = ForwardContext(torch.zeros(2, 7)).mask(window, None).dense
    y = eager_attention(Case(q, k, v, mask, ScoreOptions(SCALE)))
    distances = torch.arange(7)[:, None] - torch.arange(7)
    is_visible = (distances >= 0) & (distances < (window or 7))
    close(y, scaled_dot_product_attention(q, k, v, is_visible, enable_gqa=True))


# A decode step: rows, query heads, key heads, slots, widths of keys and of values.
DECODE_CASES = [
    (1, 6, 6, 256, 48, 48),
    (3, 6, 2, 77, 20, 13),
    (2, 12, 1, 130, 40, 40),
    (2, 4, 4, 5, 24, 48),
]
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, F64: 1e-12}


def decode_case(shape: tuple, dtype: torch.dtype, mask_heads: int) -> Case:
    """One query per row; keys and values are views of a larger cache, with tokens before heads."""
    rows, heads, key_heads, slots, width, value_width = shape
    q = random(rows, heads, 1, width).to(dtype)
    k = random(rows, slots + 1, key_heads, width).to(dtype)[:, :slots].transpose(1, 2)
    v = random(rows, slots + 1, key_heads, value_width).to(dtype)[:, :slots].transpose(1, 2)
    mask = random(rows, mask_heads, 1, slots) > 0
    mask[..., : slots // 2] = False  # whole chunks of slots without a visible key
    mask[..., -1] = True
    return Case(q, k, v, mask, ScoreOptions(0.3))


@torch.no_grad()
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_every_kernel_matches_the_definition_in_a_decode_step(loaded, kernel, dtype):
    supported = 0
    for shape, mask_kind in product(DECODE_CASES, ("one", "rows", "rows and heads")):
        case = decode_case(shape, dtype, shape[1] if mask_kind == "rows and heads" else 1)
        if mask_kind == "one":
            case = case._replace(mask=case.mask[:1])
        if kernel.supports(case):
            supported += 1
            wide = case._replace(q=case.q.double(), k=case.k.double(), v=case.v.double())
            close(kernel.run(case).double(), eager_attention(wide), rtol=0, atol=ERRORS[dtype])
    is_used = kernel in (blocks, fused) or (kernel is decode and dtype != F64)
    assert supported == (3 * len(DECODE_CASES) if is_used else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_amx", [False, True])
def test_decoding_on_a_cpu_uses_the_kernel_in_cpp(loaded, dtype, has_amx, monkeypatch):
    """Except in bf16 with AMX, and where a gradient is needed."""
    monkeypatch.setattr(decode, "HAS_AMX", has_amx)
    case = decode_case(DECODE_CASES[0], dtype, 1)
    is_fused = has_amx and dtype == torch.bfloat16
    with torch.no_grad():
        assert choose(case) is (fused if is_fused else decode)
    assert choose(case) is fused


@torch.no_grad()
def test_the_kernel_in_cpp_gives_the_same_bits_with_any_number_of_threads(loaded):
    case = decode_case((2, 4, 2, 700, 16, 16), torch.float32, 1)
    num_threads = torch.get_num_threads()
    y = decode.run(case)
    torch.set_num_threads(3)
    try:
        assert (decode.run(case) == y).all()
    finally:
        torch.set_num_threads(num_threads)


@torch.no_grad()
def test_the_kernel_in_cpp_does_not_hide_invalid_numbers(loaded):
    case = decode_case(DECODE_CASES[0], torch.float32, 1)
    case.q[0, 2, 0, 1] = torch.nan
    is_valid = decode.run(case).isfinite().all(dim=-1).flatten()
    assert is_valid.tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("window, softcap, has_sink", BLOCKWISE)
def test_the_blockwise_and_the_automatic_kernel_match_eager_attention(
    window, softcap, has_sink, monkeypatch
):
    monkeypatch.setattr(blocks, "BLOCK_SIZE", 4)
    q, k, v, mask, sink = kernel_inputs(window, has_sink)
    case = Case(q, k, v, mask.dense, ScoreOptions(0.3, softcap, sink=sink))
    expected = eager_attention(case)
    y = blocks.run(case)
    assert_same_with_gradients(y, expected, (q, k, v, sink))
    chosen = AttentionKernel(softcap)(*by_tokens(q, k, v), mask, sink=sink, scale=0.3)
    assert_same_with_gradients(chosen.transpose(1, 2), expected, (q, k, v, sink))


def test_compiled_code_has_at_most_eight_query_blocks():
    """More blocks would take longer to compile."""
    q, k, v = (random(1, 1, 2048, 2).requires_grad_() for _ in range(3))
    with Operations() as operations:
        y = blocks.run(Case(q, k, v, None, ScoreOptions(SCALE), is_compiled=True))
    assert operations.names.count("aten::exp") == 8
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)
    assert_same_with_gradients(y, expected, (q, k, v))


def test_the_fused_kernel_reads_each_key_head_once_in_a_decode_step(monkeypatch):
    shapes = []

    def attention(q: Tensor, *arguments, **options) -> Tensor:
        shapes.append(q.shape)
        return scaled_dot_product_attention(q, *arguments, **options)

    monkeypatch.setattr(fused.F, "scaled_dot_product_attention", attention)
    fused.run(decode_case((2, 6, 2, 9, 8, 8), F64, 6))
    assert shapes == [(2, 2, 3, 8)]  # three query heads per key head


@pytest.mark.parametrize("kernel", [eager_attention, blocks.run])
def test_dropout_zeroes_weights_and_scales_up_the_rest(kernel):
    q = torch.zeros(1, 4, 200, 8).double()
    v = torch.eye(200).double().expand(1, 4, -1, -1)
    mask = torch.ones(1, 1, 200, 200, dtype=torch.bool)
    weights = kernel(Case(q, q, v, mask, ScoreOptions(SCALE, dropout=0.25)))
    weights = weights * 200  # 1 without dropout
    close(weights[weights != 0].unique(), torch.tensor([4 / 3]).double(), rtol=0, atol=1e-6)
    assert (weights == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)


def flex_inputs(has_sink: bool) -> tuple:
    """q, k and v in fp32, wide enough for FlexAttention, and a sink."""
    q, k, v = (random(2, heads, 9, 16).float() for heads in (4, 2, 2))
    return q, k, v, random(4).float() if has_sink else None


@flex_test
@pytest.mark.parametrize(
    ("window", "chunk", "has_documents", "has_sink"),
    [(3, None, False, True), (None, 4, False, False), (3, 4, True, False)],
)
def test_flex_attention_computes_its_mask_from_positions(window, chunk, has_documents, has_sink):
    """The mask is wrong on purpose: it must not be read. With a sink, the length is padded.

    Compares only outputs, because FlexAttention has no backward without a GPU.
    """
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 0, 1, 2, 3]])
    if not has_documents:
        documents = torch.zeros(2, 9)
        positions = torch.arange(9).expand(2, -1)
    query, key = positions[:, :, None], positions[:, None]
    expected = (key <= query) & (documents[:, :, None] == documents[:, None])
    if window is not None:
        expected = expected & (query - key < window)
    if chunk is not None:
        expected = expected & (query // chunk == key // chunk)
    expected = expected[:, None]

    ctx = ForwardContext(torch.zeros(2, 9), documents=documents if has_documents else None)
    mask = ctx.mask(window, chunk)
    assert (mask.dense == expected).all()
    q, k, v, sink = flex_inputs(has_sink)
    options = ScoreOptions(0.25, softcap=2.0, sink=sink)
    wrong_mask = torch.zeros_like(mask.dense)
    y = flex.run(Case(q, k, v, wrong_mask, options, mask.rule))
    close(y, eager_attention(Case(q, k, v, expected, options)), rtol=0, atol=1e-5)


@flex_test
@pytest.mark.parametrize("is_ring", [False, True])
def test_every_kernel_adds_a_score_bias(is_ring, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_SIZE", 4)
    if is_ring:
        ctx = ForwardContext(torch.zeros(2, 3), torch.tensor([13, 4]))
        mask = ctx.ring_mask(6, 4, None)
    else:
        mask = ForwardContext(torch.zeros(2, 9)).mask(None, None)
    q = random(2, 4, 3 if is_ring else 9, 16)
    k = random(2, 2, 9, 16)
    v = random(2, 2, 9, 16) + 1
    table = random(4, 20).requires_grad_()
    distances = mask.query_positions[..., None] - mask.key_positions[:, None]
    is_visible = distances >= 0  # (B, T, S)
    if mask.dense is not None:
        is_visible = is_visible & mask.dense[:, 0]
    scores = table[:, distances.clamp(min=0)].transpose(0, 1)
    scores = scores.masked_fill(~is_visible[:, None], -torch.inf).expand(2, -1, -1, -1)
    expected = scaled_dot_product_attention(q, k, v, scores, enable_gqa=True)

    def score_bias(row, head, query, key):
        return table[head, distance(mask, row, query, key).clamp(min=0)]

    case = Case(q, k, v, mask.dense, ScoreOptions(0.25, bias=score_bias))
    chosen = AttentionKernel()(*by_tokens(q, k, v), mask, score_bias=score_bias)
    for y in (eager_attention(case), blocks.run(case), chosen.transpose(1, 2)):
        assert_same_with_gradients(y, expected, (table,))
    with torch.no_grad():
        y = flex.run(case)
    close(y, expected, rtol=0, atol=1e-5)


def decays(length: int, dtype: torch.dtype) -> Tensor:
    """Cumulative sums of log decays (2, 4, length), down to about -400 at 512 tokens."""
    noise = torch.randn(2, 4, length, generator=torch.Generator().manual_seed(3))
    return logsigmoid(noise).to(dtype).cumsum(dim=-1)


def biased_by_tokens(q: Tensor, k: Tensor, v: Tensor, bias: TokenBias, sink=None) -> Tensor:
    """torch's causal attention in float64 with a bias per query and key, and an optional sink."""
    q, k, v, query, key = [x.double() for x in (q, k, v, *bias)]
    length = q.shape[2]
    scores = query[..., None] + key[..., None, :]
    scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
    if sink is not None:  # add a key with this score and a value of zero
        column = sink.double()[:, None, None].expand(2, -1, length, 1)
        scores = torch.cat((scores, column), dim=-1)
        k = pad(k, (0, 0, 0, 1))
        v = pad(v, (0, 0, 0, 1))
    return scaled_dot_product_attention(q, k, v, scores, enable_gqa=True)


@flex_test
@pytest.mark.parametrize("has_sink", [False, True])
def test_every_kernel_adds_a_token_bias(has_sink, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_SIZE", 4)
    q, k, v, mask, sink = kernel_inputs(None, has_sink)
    bias = TokenBias(random(2, 4, 9).requires_grad_(), random(2, 4, 9).requires_grad_())
    expected = biased_by_tokens(q, k, v, bias, sink)
    inputs = (q, k, v, sink, bias.key)  # without a sink, the query's bias has no gradient
    case = Case(q, k, v, None, ScoreOptions(SCALE, token_bias=bias, sink=sink))
    chosen = AttentionKernel()(*by_tokens(q, k, v), mask, sink=sink, token_bias=bias)
    for y in (eager_attention(case), blocks.run(case), chosen.transpose(1, 2)):
        assert_same_with_gradients(y, expected, inputs)

    # The two GPU kernels, which append biases to fp32 queries and keys as columns.
    q, k, v, sink = flex_inputs(has_sink)
    case = Case(q, k, v, None, ScoreOptions(0.25, token_bias=bias, sink=sink))
    expected = biased_by_tokens(q, k, v, bias, sink).float()
    with torch.no_grad():
        close(flex.run(case), expected, rtol=0, atol=1e-5)
        if sink is None:
            close(fused.run(case), expected, rtol=0, atol=1e-5)


# Bounds for the relative errors of the output, the gradients of q, k and v, and the decay gradient.
@pytest.mark.parametrize(
    ("kernel", "dtype", "bounds"),
    [
        (fused.run, torch.float32, (2e-5, 2e-5, 2e-5)),
        (fused.run, torch.bfloat16, (4e-3, 8e-3, 0.06)),
        (fused.run, torch.float16, (5e-4, 1e-3, 8e-3)),
        (blocks.run, torch.bfloat16, (6e-3, 1.5e-2, 0.015)),
    ],
)
def test_decays_appended_to_queries_and_keys_are_as_accurate_as_added_decays(kernel, dtype, bounds):
    """Compares with float64 at 512 tokens, where rounding a decay to bf16 would change it by 1."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, 2, 4, 512, 64)
    *inputs, weight = torch.randn(shape, generator=generator).bfloat16()
    results = []
    for function, dtypes in ((kernel, (dtype, torch.float32)), (biased_by_tokens, 2 * [F64])):
        q, k, v = [x.to(dtypes[0]).requires_grad_() for x in inputs]
        log_f = decays(512, F64).diff(dim=-1, prepend=torch.zeros(2, 4, 1)).to(dtypes[1])
        log_f.requires_grad_()
        sums = log_f.cumsum(dim=-1)
        bias = TokenBias(sums, -sums)
        if function is biased_by_tokens:
            y = function(q, k, v, bias)
        else:
            y = function(Case(q, k, v, None, ScoreOptions(64**-0.5, token_bias=bias)))
        grads = torch.autograd.grad(y, (q, k, v, log_f), weight.to(y.dtype))
        results.append([x.double() for x in (y, *grads)])
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True)]
    y, q, k, v, log_f = errors
    assert y < bounds[0] and max(q, k, v) < bounds[1] and log_f < bounds[2], errors


def test_three_bf16_parts_sum_exactly_to_an_fp32_number():
    x = random(1000).float() * torch.logspace(-3, 5, 1000)
    parts = SplitInThree.apply(x)
    close(parts, parts.bfloat16().float(), rtol=0, atol=0)
    close(parts.double().sum(dim=-1), x.double(), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
def test_splitting_a_bias_in_compiled_code_is_bit_exact():
    """Inductor removes round trips through bf16, so parts computed with casts would be zero."""
    torch._dynamo.reset()
    q, k = (random(2, heads, 32, 16).bfloat16() for heads in (4, 2))
    options = ScoreOptions(0.25, token_bias=TokenBias(*2 * [decays(32, torch.float32)]))
    compiled = torch.compile(append_token_bias, fullgraph=True, dynamic=False)
    for found, expected in zip(
        compiled(q, k, options), append_token_bias(q, k, options), strict=True
    ):
        close(found, expected, rtol=0, atol=0)


def test_large_values_do_not_overflow_in_fp16():
    """4096 equal weights of 1 times values of 16 would sum to 65536, above the range of fp16."""
    q = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    k = torch.zeros(1, 1, 4096, 8, dtype=torch.float16)
    v = torch.full_like(k, 16.0)
    mask = torch.ones(1, 1, 1, 4096, dtype=torch.bool)
    y = blocks.run(Case(q, k, v, mask, ScoreOptions(1.0, softcap=30.0)))
    close(y, torch.full_like(y, 16.0))
