"""Layers against plain references: loops from the formulas, in float64; whole models against transformers."""

import cmath
import math
import operator
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from model import layers
from model.attention import kernels
from model.attention.alibi import alibi_slopes
from model.attention.base import Attention, LayerSpec
from model.attention.kernels import AttentionKernel
from model.attention.mla import LatentAttention
from model.attention.softmax import SoftmaxAttention
from model.cache import KVCache
from model.context import ForwardContext, Visibility
from model.layers import FeedForward, GatedFeedForward, LayerNorm, RMSNorm, apply_rope
from run.instantiate import instantiate
from tests.conftest import close, redraw, settings_of, tree_of
from tools import cost


def random(*shape: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


COST = ("model=15m", "context=4096", "micro_batch=1", "data.vocab_size=128")


def spec_of(dim: int, heads: int, context: int) -> LayerSpec:
    return LayerSpec(dim=dim, heads=heads, context=context, layer=0, depth=1, norm_eps=1e-6)


def output(layer: Attention, x: Tensor) -> Tensor:
    """What a layer that takes nothing from others computes of plain rows."""
    return layer(x, ForwardContext(x[..., 0], None, None, None), None, {})[0]


def test_rms_norm():
    x, norm = random(2, 5, 7), RMSNorm(7, 1e-6).double()
    norm.weight.data.copy_(random(7))
    for b in range(2):
        for t in range(5):
            rms = math.sqrt(sum(v * v for v in x[b, t].tolist()) / 7 + 1e-6)
            close(norm(x)[b, t], torch.stack([x[b, t, i] / rms * norm.weight[i] for i in range(7)]))


def test_rms_norm_of_bf16_sums_in_fp32():
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    assert RMSNorm(4096, 1e-6).bfloat16()(x).eq(1).all()


def test_layer_norm():
    x, norm = random(2, 5, 7), LayerNorm(7, 1e-6).double()
    norm.weight.data.copy_(random(7))
    norm.bias.data.copy_(random(7, 1)[:, 0])
    for b, t in product(range(2), range(5)):
        mean = sum(x[b, t].tolist()) / 7
        std = math.sqrt(sum((v - mean) ** 2 for v in x[b, t].tolist()) / 7 + 1e-6)
        close(norm(x)[b, t], (x[b, t] - mean) / std * norm.weight + norm.bias)


ACTIVATIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "relu2": lambda x: max(x, 0.0) ** 2,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forwards(activation):
    def act(x: Tensor) -> Tensor:
        return x.detach().clone().apply_(ACTIVATIONS[activation])

    x, ffn = random(3, 4), FeedForward(4, 6, activation=activation).double()
    close(ffn(x), act(x @ ffn.up_proj.weight.T) @ ffn.down_proj.weight.T)
    ffn = GatedFeedForward(4, 6, activation=activation).double()
    gate, up = (x @ w.weight.T for w in (ffn.gate_proj, ffn.up_proj))
    close(ffn(x), (act(gate) * up) @ ffn.down_proj.weight.T)


class Operations(TorchDispatchMode):
    """Collects the names of the operations that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", ["gqa", "delta", "gqa attention.bias=true"])
def test_projections_joined_for_a_gpu_are_those_of_each_layer(variant, monkeypatch):
    name, *overrides = variant.split()
    model = instantiate(tree_of(name, *overrides))
    tokens = torch.randint(128, (2, 9), generator=torch.Generator().manual_seed(1))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)

    def run() -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        return logits, *torch.autograd.grad(logits.float().square().mean(), model.parameters())

    alone = run()
    with Operations() as operations:
        run()
    count = operations.names.count("aten::mm")
    monkeypatch.setattr(layers, "on_gpu", lambda x: True)
    with Operations() as operations:
        joined = run()
    if "bias" not in variant:
        assert operations.names.count("aten::mm") < count
    for x, y in zip(joined, alone, strict=True):
        assert (x - y).norm() <= 0.02 * y.norm()  # bf16 has 8 bits


@pytest.mark.parametrize("on_gpu", [False, True])
def test_rope_turns_each_pair_by_its_angle(on_gpu, monkeypatch):
    monkeypatch.setattr(layers, "on_gpu", lambda x: on_gpu)
    x = random(1, 5, 2, 6)
    ctx = ForwardContext(torch.zeros(1, 5), None, None, None)
    turned = apply_rope(x, *ctx.rotary(6, 100.0))
    for t in range(5):
        for h in range(2):
            for i in range(3):
                angle = t * 100.0 ** (-2 * i / 6)
                pair = complex(x[0, t, h, i], x[0, t, h, i + 3]) * complex(
                    math.cos(angle), math.sin(angle)
                )
                got = complex(turned[0, t, h, i], turned[0, t, h, i + 3])
                assert abs(got - pair) < 1e-6  # the tables are fp32


@pytest.mark.parametrize("heads, kv_heads", [(6, 6), (6, 3), (6, 1)])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_a_softmax_over_what_is_visible(heads, kv_heads, window):
    q, k, v = random(2, 7, heads, 4), random(2, 7, kv_heads, 4), random(2, 7, kv_heads, 4)
    mask = ForwardContext(torch.zeros(2, 7), None, None, None).visible(window, None).mask
    by_heads = (x.transpose(1, 2) for x in (q, k, v))
    y = kernels.eager_attention(*by_heads, mask).transpose(1, 2)
    for b in range(2):
        for t in range(7):
            for h in range(heads):
                shared = h // (heads // kv_heads)
                seen = [s for s in range(t + 1) if window is None or t - s < window]
                scores = [math.exp(float(q[b, t, h] @ k[b, s, shared]) / 2) for s in seen]
                mean = sum(w * v[b, s, shared] for w, s in zip(scores, seen, strict=True)) / sum(
                    scores
                )
                close(y[b, t, h], mean)


# What the faster kernels support: (window, softcap, has_sink).
BLOCKWISE = [(None, None, False), (None, 2.0, True), (3, None, False), (3, 2.0, True)]
FUSED = [(None, None, False), (3, None, False)]


def kernel_inputs(window: int | None, has_sink: bool, dtype: torch.dtype) -> tuple:
    """q, k, v with grouped heads and values of another width, what is visible, and a sink."""
    q, k, v = (random(2, heads, 9, width) for heads, width in ((4, 8), (2, 8), (2, 6)))
    visible = ForwardContext(torch.zeros(2, 9), None, None, None).visible(window, None)
    inputs = [x.to(dtype).requires_grad_() for x in (q, k, v, random(4))]
    return *inputs[:3], visible, inputs[3] if has_sink else None


def assert_same_with_gradients(y: Tensor, expected: Tensor, inputs: tuple) -> None:
    inputs = [x for x in inputs if x is not None and x.requires_grad]
    close(y, expected)
    close(
        torch.autograd.grad(y.pow(3).sum(), inputs),
        torch.autograd.grad(expected.pow(3).sum(), inputs, retain_graph=True),
    )


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("window, softcap, has_sink", BLOCKWISE)
def test_blockwise_attention_equals_the_definition(window, softcap, has_sink, scale, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK_SIZE", 4)
    *qkv, visible, sink = kernel_inputs(window, has_sink, torch.float64)
    options = {"softcap": softcap, "sink": sink, "scale": scale}
    y = kernels.blockwise_attention(*qkv, visible.mask, **options)
    expected = kernels.eager_attention(*qkv, visible.mask, **options)
    assert_same_with_gradients(y, expected, (*qkv, sink))


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("window, softcap, has_sink", [*FUSED, *BLOCKWISE])
def test_the_chosen_kernel_equals_the_definition(window, softcap, has_sink, scale):
    *qkv, visible, sink = kernel_inputs(window, has_sink, torch.float64)
    by_tokens = [x.transpose(1, 2) for x in qkv]
    y = AttentionKernel(softcap)(*by_tokens, visible, sink=sink, scale=scale).transpose(1, 2)
    options = {"softcap": softcap, "sink": sink, "scale": scale}
    expected = kernels.eager_attention(*qkv, visible.mask, **options)
    assert_same_with_gradients(y, expected, (*qkv, sink))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_compiled_step_of_one_token_is_sums(device, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    q, k = (torch.ones(2, length, heads, 8, device=device) for length, heads in ((1, 4), (9, 2)))
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool, device=device)
    with Operations() as operations:
        AttentionKernel()(q, k, k, Visibility(mask, None, None))
    assert not {name for name in operations.names if "bmm" in name or "attention" in name}


@pytest.mark.parametrize("kernel", [kernels.eager_attention, kernels.blockwise_attention])
def test_dropout_zeroes_weights_and_enlarges_the_others(kernel):
    q, k = torch.zeros(2, 1, 4, 200, 8).double()
    v = torch.eye(200).double().expand(1, 4, -1, -1)
    mask = torch.ones(1, 1, 200, 200, dtype=torch.bool)
    weights = kernel(q, k, v, mask, dropout=0.25) * 200  # 1 each without dropout
    close(weights[weights != 0].unique(), torch.tensor([4 / 3]).double(), rtol=0, atol=1e-6)
    assert (weights == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "window, softcap, has_sink",
    [(None, 2.0, False), (3, None, False), (3, None, True), (None, 2.0, True)],
)
def test_flex_attention_equals_the_definition(window, softcap, has_sink):
    """Its output alone: without a GPU it has no backward."""
    q, k, v = (random(2, heads, 9, 16).float() for heads in (4, 2, 2))
    *_, visible, sink = kernel_inputs(window, has_sink, torch.float32)
    options = {"softcap": softcap, "sink": sink if sink is None else sink.detach(), "scale": None}
    y = kernels.flex_attention_kernel(q, k, v, visible, score_bias=None, **options)
    close(y, kernels.eager_attention(q, k, v, visible.mask, **options), rtol=0, atol=1e-5)


class LearnedBias(torch.nn.Module):
    """A bias for each head and distance, whose values have gradients."""

    def __init__(self, heads: int, length: int):
        super().__init__()
        self.table = torch.nn.Parameter(random(heads, length))

    def __call__(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.table[head, (query - key).clamp(min=0)]


# Which keys there are: all tokens before, a window, and those of a cache for the newest 3 tokens.
@pytest.mark.parametrize("case", ["plain", "window", "ring", "ragged cache"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_kernel_adds_a_score_bias(case, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK_SIZE", 4)
    queries, keys = (9, 9) if case in ("plain", "window") else (3, 9)
    ctx = ForwardContext(torch.zeros(2, queries), None, None, None)
    if "ring" in case:
        ctx = ForwardContext(torch.zeros(2, 3), torch.tensor([13, 4]), None, None)
        visible = ctx.visible_in_ring(6, 4, None)
    elif "cache" in case:
        valid = torch.tensor([[True, True, True], [False, True, True]])
        ctx = ForwardContext(torch.zeros(2, 3), torch.tensor([2, 5]), valid, None)
        visible = ctx.visible_in_cache(9, None, None)
    else:
        visible = ctx.visible(3 if case == "window" else None, None)
    bias = LearnedBias(4, 20)
    q, k, v = (random(2, heads, n, 16) for heads, n in ((4, queries), (2, keys), (2, keys)))

    # The definition, in a loop over scores.
    expected = torch.zeros(2, 4, queries, 16, dtype=torch.float64)
    at = visible.query_positions.expand(2, -1), visible.key_positions.expand(2, -1)
    for b, h, i in product(range(2), range(4), range(queries)):
        if at[0][b, i] < 0:  # padding
            continue
        mask = visible.mask if visible.mask is None else visible.mask.expand(2, -1, -1, -1)
        seen = [j for j in range(keys) if mask is None or mask[b, 0, i, j]]
        seen = [j for j in seen if 0 <= at[1][b, j] <= at[0][b, i]]
        scores = [q[b, h, i] @ k[b, h // 2, j] / 4 for j in seen]
        added = [bias.table[h, at[0][b, i] - at[1][b, j]] for j in seen]
        weights = torch.stack([s + a for s, a in zip(scores, added, strict=True)]).softmax(0)
        expected[b, h, i] = sum(w * v[b, h // 2, j] for w, j in zip(weights, seen, strict=True))
    is_token = (at[0] >= 0)[:, None, :, None]

    by_tokens = [x.transpose(1, 2) for x in (q, k, v)]
    results = [
        kernel(q, k, v, visible.mask, bias=kernels.bias_tensor(bias, 4, visible))
        for kernel in (kernels.eager_attention, kernels.blockwise_attention)
    ]
    results += [AttentionKernel()(*by_tokens, visible, score_bias=bias).transpose(1, 2)]
    for y in results:
        assert_same_with_gradients(y * is_token, expected * is_token, (bias.table,))
    with torch.no_grad():
        y = kernels.flex_attention_kernel(
            q, k, v, visible, softcap=None, score_bias=bias, sink=None, scale=None
        )
    close(y * is_token, expected * is_token, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window, softcap, has_sink", BLOCKWISE[1:])
def test_compiled_flex_attention_has_the_gradients_of_the_definition(window, softcap, has_sink):
    *_, visible, sink = kernel_inputs(window, has_sink, torch.float32)
    q, k, v = (random(2, heads, 9, 16).float().cuda().requires_grad_() for heads in (4, 2, 2))
    sink = None if sink is None else sink.detach().cuda().requires_grad_()
    visible = Visibility(*(x if x is None else x.cuda() for x in visible))
    options = {"softcap": softcap, "sink": sink, "scale": None}
    compiled = torch.compile(kernels.flex_attention_kernel, fullgraph=True)
    y = compiled(q, k, v, visible, score_bias=None, **options)
    expected = kernels.eager_attention(q, k, v, visible.mask, **options)
    inputs = [x for x in (q, k, v, sink) if x is not None]
    grads = [torch.autograd.grad(x.pow(3).sum(), inputs) for x in (y, expected)]
    close(y, expected, rtol=0, atol=1e-2)  # products in TF32
    close(*grads, rtol=0, atol=1e-1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
@pytest.mark.parametrize("window, softcap", [(16, None), (16, 2.0), (None, 2.0)])
def test_flex_attention_compiles(window, softcap):
    torch._dynamo.reset()
    q, k, v = (random(2, heads, 128, 16).float() for heads in (4, 2, 2))
    visible = ForwardContext(torch.zeros(2, 128), None, None, None).visible(window, None)
    options = {"softcap": softcap, "sink": None, "scale": None}
    compiled = torch.compile(kernels.flex_attention_kernel, fullgraph=True, dynamic=False)
    with torch.no_grad():  # without a GPU there is no backward
        y = compiled(q, k, v, visible, score_bias=None, **options)
    close(y, kernels.eager_attention(q, k, v, visible.mask, **options), rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", ["gqa", "mla", "softcap"])
def test_dropout_acts_in_training_alone(variant):
    layer = redraw(instantiate(tree_of(variant, "attention.dropout=0.5"))).blocks[0].attention
    x = random(2, 9, 64).float()
    assert (output(layer, x) - output(layer, x)).abs().max() > 1e-3
    layer.eval()
    close(output(layer, x), output(layer, x), rtol=0, atol=0)


@pytest.mark.parametrize("variant", ["gqa", "mla", "sliding_window", "chunked"])
def test_operations_on_scores_are_counted_where_they_are_visible(variant):
    for block in instantiate(tree_of(variant)).blocks:
        layer = block.attention
        window, chunk = getattr(layer, "window", None), getattr(layer, "chunk", None)
        pairs = [(i, j) for i in range(13) for j in range(i + 1)]
        pairs = [(i, j) for i, j in pairs if window is None or i - j < window]
        pairs = [(i, j) for i, j in pairs if chunk is None or i // chunk == j // chunk]
        each = (
            2 * 2 * layer.heads * getattr(layer, "value_dim", layer.head_dim)
        )  # a product with k and one with v
        assert layer.attention_flops(13) * 13 == pytest.approx(each * len(pairs))


def test_a_window_cache_holds_no_more_than_the_window():
    cache = KVCache(1, 4096, 256, None, (1, 2), dtype=torch.float32, device="cpu")
    assert cache.nbytes == (256 + 1) * 2 * 4


@pytest.mark.parametrize("dim, heads, kv_heads", [(10, 4, 2), (8, 4, 3), (12, 4, 2)])
def test_heads_that_do_not_fit_are_refused(dim, heads, kv_heads):
    with pytest.raises(ValueError, match="fix: "):
        instantiate(
            tree_of(
                "gqa", f"model.dim={dim}", f"model.heads={heads}", f"attention.kv_heads={kv_heads}"
            )
        )


def test_a_window_holds_its_positions_whatever_the_prompt():
    attention = {
        "_target_": "model.attention.softmax.SoftmaxAttention",
        "_partial_": True,
        "kv_heads": 2,
    }
    knobs = {"rope_base": 10000.0, "qk_norm": "before_rope", "window": 256}
    tree = settings_of("model=tiny", "model.vocab_size=128", "context=8192")["model"] | {
        "attention": attention | knobs
    }
    model = redraw(instantiate(tree)).eval()
    tokens = torch.randint(128, (1, 4096 + 3), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(1, 8192, torch.float32, "cpu")
    with torch.no_grad():
        logits = [model(part, cache) for part in tokens.split([512] * 8 + [1] * 3, dim=1)]
        close(torch.cat(logits, dim=1)[:, -600:], model(tokens)[:, -600:], rtol=0, atol=1e-4)
    head_dim = tree["dim"] // tree["heads"]
    assert (
        cache.nbytes == tree["depth"] * (256 + 1) * 2 * 2 * head_dim * 4
    )  # a slot more, for padding
    assert all(layer.size == 256 for layer in cache.layers)


def test_the_block_of_the_classic_walkthrough():
    """Hidden 128, 16 heads of 8, 4 key-value heads, RoPE, then QK-norm without weight: number by number."""
    layer = SoftmaxAttention(
        spec_of(128, 16, 10), kv_heads=4, rope_base=10000.0, qk_norm="after_rope"
    ).double()
    x = random(2, 10, 128)
    q, k, v = (x @ w.weight.detach().T for w in (layer.q_proj, layer.k_proj, layer.v_proj))

    def placed(row, t):  # eight numbers at position t, turned and normalized
        turned = [0.0] * 8
        for i in range(4):
            pair = complex(row[i], row[i + 4]) * cmath.exp(1j * t * 10000 ** (-i / 4))
            turned[i], turned[i + 4] = pair.real, pair.imag
        size = math.sqrt(sum(a * a for a in turned) / 8 + 1e-6)
        return [a / size for a in turned]

    y = torch.zeros(2, 10, 128, dtype=torch.float64)
    for b, t, h in product(range(2), range(10), range(16)):
        shared = slice(h // 4 * 8, h // 4 * 8 + 8)
        query = placed(q[b, t, 8 * h : 8 * h + 8], t)
        keys = [placed(k[b, s, shared], s) for s in range(t + 1)]
        scores = [math.exp(sum(map(operator.mul, query, key)) / math.sqrt(8)) for key in keys]
        for s in range(t + 1):
            y[b, t, 8 * h : 8 * h + 8] += scores[s] / sum(scores) * v[b, s, shared]
    expected = y @ layer.o_proj.weight.T
    close(output(layer, x), expected, rtol=0, atol=1e-6)


def test_absorption_halves_the_work_of_a_step():
    layer = LatentAttention(
        spec_of(256, 8, 4096), rank=64, head_dim=32, rope_dim=16, rope_base=10000.0
    )
    cache, seen = layer.new_cache(1, 2049, torch.float32, "cpu"), torch.tensor([2048])
    assert (
        cache.nbytes == (2049 + 1) * (64 + 16) * 4
    )  # bytes a token: latent and rope, once for all heads
    work = {}
    for way in ("absorbed", "expanded"):
        layer.attend_absorbed = getattr(layer, f"attend_{way}")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            ctx = ForwardContext(torch.zeros(1, 1), seen, None, None)
            work[way], _ = layer(random(1, 1, 256).float(), ctx, cache, {})
        work[way + " FLOP"] = counter.get_total_flops()
    close(work["absorbed"], work["expanded"], rtol=0, atol=1e-4)
    assert work["absorbed FLOP"] < work["expanded FLOP"] / 2


def layers_of(variant: str) -> list:
    return [
        block.attention for block in redraw(instantiate(tree_of(variant))).double().eval().blocks
    ]


def test_shared_keys_and_values_are_those_of_the_layer_before():
    first, second = layers_of("shared_kv")
    x, later = random(2, 9, 64), random(1, 9, 65, 2).reshape(-1)[: 2 * 9 * 64].reshape(2, 9, 64)
    ctx = ForwardContext(x[..., 0], None, None, None)
    _, carry = first(x, ctx, None, {})
    y, _ = second(later, ctx, None, carry)
    first.q_proj, first.q_norm, first.o_proj = second.q_proj, second.q_norm, second.o_proj
    k, v, _ = first.project_kv(x, ctx, {})
    q = first.project_q(later, ctx)
    k, v = (z.repeat_interleave(2, dim=2).transpose(1, 2) for z in (k, v))
    scores = (q.transpose(1, 2) @ k.mT / 4).masked_fill(
        ~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf
    )
    close(y, second.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)))
    with pytest.raises(ValueError, match="layer=1"):
        second(later, ctx, None, {})


def test_values_mix_with_the_first_layers_by_their_share():
    first, second = layers_of("value_residual")
    x = random(2, 9, 64)
    ctx = ForwardContext(x[..., 0], None, None, None)
    _, carry = first(x, ctx, None, {})
    for share in (0.0, 1.0):
        second.share.data.fill_(share)
        (_, plain) = layers_of("gqa")
        plain.load_state_dict(
            {name: w for name, w in second.state_dict().items() if name != "share"}
        )
        plain.v_proj = first.v_proj if share == 1.0 else plain.v_proj
        close(second(x, ctx, None, carry)[0], output(plain, x))


@pytest.mark.parametrize(
    "variant, bytes_per_token",
    [
        ("gqa", lambda d, h: 2 * 2 * (d // h) * 2),  # 2 of k and v x 2 heads x D/H x 2 bytes
        ("mha", lambda d, h: 2 * d * 2),
        ("mla", lambda d, h: (2 * (d // h) + d // h // 2) * 2),  # latent and rotary key
    ],
)
def test_the_card_of_a_cache_equals_a_formula(variant, bytes_per_token):
    settings = settings_of(*COST, f"attention={variant}")["model"]
    per_token = settings["depth"] * bytes_per_token(settings["dim"], settings["heads"])
    card = cost.row(cost.Cost([*COST, f"attention={variant}"]))
    assert card[2:4] == (f"{per_token:,}", f"{4097 * per_token / 1e6:.2f}")  # a slot for padding


def test_the_card_of_a_cache_of_fixed_size_equals_a_formula():
    model = settings_of(*COST)["model"]
    depth, dim, heads = model["depth"], model["dim"], model["heads"]
    slot = 2 * 2 * (dim // heads) * 2
    window = cost.Cost([*COST, "attention=sliding_window"])
    assert window.model.cache_bytes(4096, torch.bfloat16) == depth * (128 + 1) * slot
    assert cost.row(window)[3] == f"{depth * 129 * slot / 1e6:.2f}"

    # Three layers in four have a state in fp32 and the inputs of a convolution of 4 tokens.
    delta = cost.Cost([*COST, "attention=delta", "model.depth=4"])
    state = dim * (dim // heads) * 4 + 3 * dim * (4 - 1) * 2
    assert delta.model.cache_bytes(4096, torch.bfloat16) == 3 * state + 4097 * slot
    assert cost.row(delta)[2] == f"{slot:,}"


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8, 12, 20])
def test_alibi_slopes_are_those_of_bloom_and_mpt(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    slopes = alibi_slopes(heads)
    # BLOOM adds slope x key position, MPT slope x (key - last key), either to all rows alike.
    bloom = build_alibi_tensor(torch.ones(1, 5), heads, torch.float32)[:, 0]
    close(slopes[:, None] * torch.arange(5), bloom, rtol=0, atol=1e-5)
    mpt = build_mpt_alibi_tensor(heads, 5)[:, 0]
    close(slopes[:, None] * (torch.arange(5) - 4), mpt, rtol=0, atol=1e-5)


def test_alibi_is_a_softmax_of_scores_less_distances():
    layer = redraw(instantiate(tree_of("alibi"))).double().blocks[0].attention
    x = random(2, 9, 64)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    q, k, v = (proj(x).unflatten(-1, (-1, 16)) for proj in projections)
    y = torch.zeros(2, 9, 4, 16, dtype=torch.float64)
    for b, t, h in product(range(2), range(9), range(4)):
        slope = 2 ** (-2 * (h + 1))  # of 4 heads
        scores = [q[b, t, h] @ k[b, s, h // 2] / 4 - slope * (t - s) for s in range(t + 1)]
        weights = torch.stack(scores).softmax(0)
        y[b, t, h] = sum(w * v[b, s, h // 2] for s, w in enumerate(weights))
    close(output(layer, x), layer.o_proj(y.flatten(-2)), rtol=0, atol=1e-5)


def test_retention_equals_its_recurrence():
    layer = redraw(instantiate(tree_of("retention"))).double().blocks[0].attention
    x = random(2, 11, 64)
    q, k = (proj(x).unflatten(-1, (4, 16)) for proj in (layer.q_proj, layer.k_proj))
    v = layer.v_proj(x).unflatten(-1, (4, 32))
    y = torch.zeros(2, 11, 4, 32, dtype=torch.float64)
    for b, h in product(range(2), range(4)):
        decay = 1 - 2.0 ** (-5 - h)
        state = torch.zeros(16, 32, dtype=torch.float64)
        for t in range(11):
            # Rotate the pairs (i, i + 8), as complex numbers.
            angle = t * 10000.0 ** (-torch.arange(8).double() / 8)
            turn = torch.polar(torch.ones(8).double(), angle)
            query = torch.complex(q[b, t, h, :8], q[b, t, h, 8:]) * turn
            key = torch.complex(k[b, t, h, :8], k[b, t, h, 8:]) * turn
            query = torch.cat((query.real, query.imag))
            key = torch.cat((key.real, key.imag)) / 4
            state = decay * state + key[:, None] * v[b, t, h]
            read = query @ state
            y[b, t, h] = read / (read.square().mean() + 1e-6).sqrt()
    gate = layer.gate_proj(x)
    expected = layer.o_proj(gate * gate.sigmoid() * y.flatten(-2))
    close(output(layer, x), expected, rtol=0, atol=1e-5)
