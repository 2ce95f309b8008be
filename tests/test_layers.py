"""Layers against plain references: loops from the formulas, in float64; whole models against transformers."""

import math

import pytest
import torch
from torch import Tensor

from model.attention import base
from model.attention.base import attend
from model.build import build
from model.cache import KVCache
from model.layers import RMSNorm, SwiGLU, rotate
from model.positions import Positions
from tests.conftest import close, tree_of


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_rms_norm():
    x, norm = random(2, 5, 7), RMSNorm(7).double()
    norm.weight.data.copy_(random(7))
    for b in range(2):
        for t in range(5):
            rms = math.sqrt(sum(v * v for v in x[b, t].tolist()) / 7 + 1e-6)
            close(norm(x)[b, t], torch.stack([x[b, t, i] / rms * norm.weight[i] for i in range(7)]))


def test_rms_norm_of_bf16_sums_in_fp32():
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    assert RMSNorm(4096).bfloat16()(x).eq(1).all()


def test_swiglu():
    x, ffn = random(3, 4), SwiGLU(4, 6).double()
    gate, up = (x @ w.weight.T for w in (ffn.gate_proj, ffn.up_proj))
    close(ffn(x), (gate / (1 + (-gate).exp()) * up) @ ffn.down_proj.weight.T)


def test_rope_turns_each_pair_by_its_angle():
    x = random(1, 5, 2, 6)
    positions = Positions(torch.zeros(1, 5), None, None, None)
    turned = rotate(x, *positions.rotary(6, 100.0))
    for t in range(5):
        for h in range(2):
            for i in range(3):
                angle = t * 100.0 ** (-2 * i / 6)
                pair = complex(x[0, t, h, i], x[0, t, h, i + 3]) * complex(math.cos(angle), math.sin(angle))
                got = complex(turned[0, t, h, i], turned[0, t, h, i + 3])
                assert abs(got - pair) < 1e-6  # the tables are fp32


@pytest.mark.parametrize("heads, kv_heads", [(6, 6), (6, 3), (6, 1)])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_a_softmax_over_what_is_visible(heads, kv_heads, window, monkeypatch):
    q, k, v = random(2, 7, heads, 4), random(2, 7, kv_heads, 4), random(2, 7, kv_heads, 4)
    visible = Positions(torch.zeros(2, 7), None, None, None).visible(window)
    y = attend(q, k, v, visible)
    monkeypatch.setattr(base, "BLOCK", 3)
    by_heads = (x.transpose(1, 2) for x in (q, k, v))
    close(base.by_scores(*by_heads, visible, None, None, 0.0, None).transpose(1, 2), y)
    for b in range(2):
        for t in range(7):
            for h in range(heads):
                shared = h // (heads // kv_heads)
                seen = [s for s in range(t + 1) if window is None or t - s < window]
                scores = [math.exp(float(q[b, t, h] @ k[b, s, shared]) / 2) for s in seen]
                mean = sum(w * v[b, s, shared] for w, s in zip(scores, seen, strict=True)) / sum(scores)
                close(y[b, t, h], mean)


def test_a_window_cache_holds_no_more_than_the_window():
    cache = KVCache(1, 4096, 256, None, (1, 2), dtype=torch.float32, device="cpu")
    assert cache.nbytes == (256 + 1) * 2 * 4


@pytest.mark.parametrize("dim, heads, kv_heads", [(10, 4, 2), (8, 4, 3), (12, 4, 2)])
def test_heads_that_do_not_fit_are_refused(dim, heads, kv_heads):
    with pytest.raises(ValueError, match="fix: "):
        build(tree_of("gqa", f"model.dim={dim}", f"model.heads={heads}", f"attention.kv_heads={kv_heads}"))
