"""Attention layers match simple fp64 references: loops over formulas, and torch's attention."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from model.attention.alibi import alibi_slopes
from model.attention.base import Attention, LayerSpec
from model.attention.mla import LatentAttention
from model.attention.softmax import SoftmaxAttention
from model.context import ForwardContext
from run.instantiate import instantiate
from tests.conftest import close, drawn, redraw, tree_of
from tests.model.test_layers import random, rotated


def spec_of(dim: int, heads: int, context: int) -> LayerSpec:
    """A layer's sizes; the epsilon of its norms is large enough to matter."""
    return LayerSpec(dim=dim, heads=heads, context=context, layer=0, depth=1, norm_eps=0.01)


def layers_of(*overrides: str) -> list[Attention]:
    """The attention layers of an fp64 model with randomized parameters."""
    model = drawn(tree_of(*overrides), torch.float64)
    return [block.attention for block in model.blocks]


def output(layer: Attention, x: Tensor) -> Tensor:
    """The output of a layer for full rows, without a cache and without earlier layers."""
    return layer(x, ForwardContext(x[..., 0]), None, {})[0]


def projected(layer: Attention, x: Tensor, head_dim: int) -> list[Tensor]:
    """q, k and v of a layer (B, T, H, D)."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    return [proj(x).unflatten(-1, (-1, head_dim)) for proj in projections]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's causal attention (B, T, H D); `bias` (H, T, S) on the scores includes the mask."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("variant", ["gqa", "mla"])
def test_dropout_is_active_only_in_training(variant):
    layer = layers_of(variant, "attention.dropout=0.5")[0].train()
    x = random(2, 9, 64)
    assert (output(layer, x) - output(layer, x)).abs().max() > 1e-3
    layer.eval()
    close(output(layer, x), output(layer, x), rtol=0, atol=0)


@pytest.mark.parametrize("variant", ["gqa", "mla", "sliding_window", "chunked"])
def test_attention_flops_count_only_visible_scores(variant):
    for layer in layers_of(variant):
        window, chunk = getattr(layer, "window", None), getattr(layer, "chunk", None)
        mask = ForwardContext(torch.zeros(1, 13)).mask(window or 99, chunk)
        # One product with a key and one product with a value.
        flops = 4 * layer.heads * getattr(layer, "value_dim", layer.head_dim)
        pairs = mask.dense.sum().item()
        assert layer.attention_flops(13) * 13 == pytest.approx(flops * pairs)


@pytest.mark.parametrize("dim, heads, kv_heads", [(10, 4, 2), (8, 4, 3), (12, 4, 2)])
def test_incompatible_head_counts_are_refused(dim, heads, kv_heads):
    sizes = (f"model.dim={dim}", f"model.heads={heads}", f"attention.kv_heads={kv_heads}")
    with pytest.raises(ValueError, match="head"):
        instantiate(tree_of("gqa", *sizes))


@pytest.mark.parametrize("qk_norm", ["before_rope", "after_rope"])
def test_a_layer_with_rope_and_qk_norm_matches_its_formulas(qk_norm):
    """16 heads of width 8 and four key heads. QK-norm after RoPE has no weights."""
    options = {"kv_heads": 4, "rope_base": 10000.0, "qk_norm": qk_norm}
    layer = redraw(SoftmaxAttention(spec_of(128, 16, 10), **options).double())
    x = random(2, 10, 128)
    q, k, v = projected(layer, x, 8)

    def normalize(z: Tensor) -> Tensor:
        return z / (z.square().mean(-1, keepdim=True) + 0.01).sqrt()

    if qk_norm == "before_rope":
        q = rotated(normalize(q) * layer.q_norm.weight, 10000.0)
        k = rotated(normalize(k) * layer.k_norm.weight, 10000.0)
    else:
        q = normalize(rotated(q, 10000.0))
        k = normalize(rotated(k, 10000.0))
    y = softmax_attention(q, k, v)
    close(output(layer, x), layer.o_proj(y), rtol=0, atol=1e-6)


def test_absorbing_projections_halves_the_flops_of_a_decode_step():
    options = {"rank": 64, "head_dim": 32, "rope_dim": 16, "rope_base": 10000.0}
    layer = redraw(LatentAttention(spec_of(256, 8, 4096), **options))
    cache = layer.new_cache(1, 2049, torch.float32, "cpu")
    x = random(1, 1, 256).float()
    results = []
    flops = []
    for attend in (layer.attend_absorbed, layer.attend_expanded):
        layer.attend_absorbed = attend
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            y, _ = layer(x, ForwardContext(x[..., 0], torch.tensor([2048])), cache, {})
        results.append(y)
        flops.append(counter.get_total_flops())
    close(results[0], results[1], rtol=0, atol=1e-4)
    assert flops[0] < flops[1] / 2


def test_shared_keys_and_values_come_from_the_previous_layer():
    first, second = layers_of("shared_kv")
    x = random(2, 9, 64)
    later = x.flip(1)
    ctx = ForwardContext(x[..., 0])
    _, shared = first(x, ctx, None, {})
    y, _ = second(later, ctx, None, shared)

    _, k, v = first.project_qkv(x, ctx)
    expected = second.attend(second.project_q(later, ctx), k, v, ctx.mask(None, None))
    close(y, second.o_proj(expected.flatten(-2)))
    with pytest.raises(ValueError, match="layer 1 reuses"):
        second(later, ctx, None, {})


@pytest.mark.parametrize(
    "variant, change",
    [
        ("value_residual", "kv_heads=1"),
        ("shared_kv", "kv_heads=1"),
        ("shared_kv", "window=8"),
        ("shared_kv", "rope_base=100.0"),
    ],
)
def test_layers_that_share_keys_or_values_must_have_equal_options(variant, change):
    first, _ = layers_of(variant)
    _, second = layers_of(variant, f"attention.{change}")
    x = random(2, 9, 64)
    ctx = ForwardContext(x[..., 0])
    _, shared = first(x, ctx, None, {})
    with pytest.raises(ValueError, match="layers that share keys"):
        second(x, ctx, None, shared)


@pytest.mark.parametrize("share, providers", [("pairs", [0, 0, 2, 2]), ("half", [0, 1, 2, 2])])
def test_each_layer_reads_the_keys_of_its_own_group(share, providers):
    layers = layers_of("shared_kv", f"attention.share={share}", "model.depth=4")
    assert [layer.first_layer for layer in layers] == providers
    x = random(2, 9, 64)
    ctx = ForwardContext(x[..., 0])
    _, shared = layers[0](x, ctx, None, {})
    with pytest.raises(ValueError, match="layer 2"):
        layers[3](x, ctx, None, shared)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_values_are_mixed_with_the_first_layers_values(share):
    first, second = layers_of("value_residual")
    x = random(2, 9, 64)
    ctx = ForwardContext(x[..., 0])
    _, shared = first(x, ctx, None, {})
    second.share.data.fill_(share)
    y, _ = second(x, ctx, None, shared)

    plain = layers_of("gqa")[1]
    weights = second.state_dict()
    del weights["share"]
    plain.load_state_dict(weights)
    if share == 1.0:
        plain.v_proj = first.v_proj
    close(y, output(plain, x))


@pytest.mark.parametrize(
    ("variant", "numbers"),
    [
        ("gqa", 2 * 2 * 16),  # keys and values of two heads
        ("mla", 2 * 16 + 8),  # latent and rotary key
    ],
)
def test_cache_bytes_match_the_formula(variant, numbers):
    """The model has two layers, a width of 64, four heads and a context of 64."""
    model = instantiate(tree_of(variant))
    assert model.cache_bytes(64, torch.bfloat16) == 2 * 64 * numbers * 2


def test_a_window_cache_does_not_grow_with_the_prompt():
    model = drawn(tree_of("sliding_window", "context=2048"), torch.float64)
    tokens = torch.randint(128, (1, 1027), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(1, 2048, torch.float64, "cpu")
    with torch.no_grad():
        logits = [model(part, cache) for part in tokens.split([512, 512, 1, 1, 1], dim=1)]
        close(torch.cat(logits, dim=1), model(tokens))
    # Two layers keep five keys and values of two heads, each of 16 numbers.
    assert cache.nbytes == 2 * 5 * 2 * 2 * 16 * 8


def test_the_state_of_a_recurrence_is_in_fp32_and_does_not_grow():
    recurrent, *_ = layers_of("gdn")
    for capacity in (1, 4096):
        cache = recurrent.new_cache(1, capacity, torch.bfloat16, "cpu")
        state = 4 * 16 * 16 * 4
        conv_state = 3 * 64 * (4 - 1) * 2  # in bf16, the inputs of the newest 3 tokens
        assert sum(buffer.nbytes for buffer in cache.buffers) == state + conv_state


@pytest.mark.parametrize("heads", [4, 6, 20])
def test_alibi_slopes_match_bloom_and_mpt(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    slopes = alibi_slopes(heads)
    # For all queries, BLOOM adds slope x key position, and MPT adds slope x (key - last key).
    bloom = build_alibi_tensor(torch.ones(1, 5), heads, torch.float32)[:, 0]
    close(slopes[:, None] * torch.arange(5), bloom, rtol=0, atol=1e-5)
    mpt = build_mpt_alibi_tensor(heads, 5)[:, 0]
    close(slopes[:, None] * (torch.arange(5) - 4), mpt, rtol=0, atol=1e-5)


def test_alibi_subtracts_scaled_distances_from_scores():
    layer = layers_of("alibi", "attention.qk_norm=null")[0]
    x = random(2, 9, 64)
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])  # of 4 heads
    positions = torch.arange(9)
    distances = positions[:, None] - positions
    bias = torch.where(distances < 0, -torch.inf, -slopes[:, None, None] * distances)
    y = softmax_attention(*projected(layer, x, 16), bias.double())
    close(output(layer, x), layer.o_proj(y), rtol=0, atol=1e-5)


def test_retention_matches_its_recurrence():
    layer = layers_of("retention")[0]
    x = random(2, 11, 64)
    q, k = (
        rotated(proj(x).unflatten(-1, (4, 16)), 10000.0) for proj in (layer.q_proj, layer.k_proj)
    )
    v = layer.v_proj(x).unflatten(-1, (4, 32))
    y = torch.zeros(2, 11, 4, 32, dtype=torch.float64)
    for b, h in product(range(2), range(4)):
        decay = 1 - 2.0 ** (-5 - h)
        state = torch.zeros(16, 32, dtype=torch.float64)
        for t in range(11):
            state = decay * state + k[b, t, h, :, None] / 4 * v[b, t, h]
            read = q[b, t, h] @ state
            y[b, t, h] = read / (read.square().mean() + 1e-6).sqrt()
    gate = layer.gate_proj(x)
    expected = layer.o_proj(gate * gate.sigmoid() * y.flatten(-2))
    close(output(layer, x), expected, rtol=0, atol=1e-5)
