"""Softmax attention by its definition, which every kernel must match, and a kernel's arguments.

q (B, H, T, E), k (B, K, S, E), v (B, K, S, F) and mask (B, 1, T, S) -> (B, H, T, F). H is a
multiple of K. True in the mask means visible; a mask that differs between heads is (B, H, T, S),
and a mask that is equal in all rows may be (1, 1, T, S). mask=None means plain causal attention
with T = S, which needs no mask in memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.context import MaskRule
from model.layers import apply_softcap, fp32

HAS_AMX = torch.cpu._is_amx_tile_supported()  # the processor has instructions for bf16 matrices
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"

# (row, head, query, key) -> the score's bias; the arguments are index tensors that broadcast.
ScoreBias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class TokenBias(NamedTuple):
    """Biases in fp32: one per query and one per key, added to all scores of that query or key."""

    query: Tensor  # (B, H, T)
    key: Tensor  # (B, H, S)


class ScoreOptions(NamedTuple):
    """The steps from q . k to scores and from scores to weights, in order."""

    scale: float
    softcap: float | None = None  # bounds the scores
    bias: ScoreBias | None = None  # added to the scores
    token_bias: TokenBias | None = None  # added to the scores
    sink: Tensor | None = None  # (H,), the score of an additional key without a value
    dropout: float = 0.0  # dropout rate of the weights


class Case(NamedTuple):
    """The arguments of a kernel, and of its `supports` and `prefers`."""

    q: Tensor  # (B, H, T, E)
    k: Tensor  # (B, K, S, E)
    v: Tensor  # (B, K, S, F)
    mask: Tensor | None  # (B or 1, H or 1, T, S); None: causal
    options: ScoreOptions
    rule: MaskRule | None = None  # computes the mask; without it, `mask` is read
    is_compiled: bool = False  # whether torch.compile compiles the kernel


def eager_attention(case: Case) -> Tensor:
    """Compute attention by its definition. This is the reference implementation, for tests only."""
    q, k, v, mask, options, *_ = case
    weights = F.dropout(attention_weights(q, k, mask, options), options.dropout)
    return weights.type_as(v) @ expand_heads(v, q)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, options: ScoreOptions) -> Tensor:
    """Return the attention weights (B, H, T, S), before dropout, in fp32."""
    length = q.shape[2]
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()

    scores = fp32(q @ expand_heads(k, q).mT) * options.scale  # (B, H, T, S)
    scores = apply_softcap(scores, options.softcap)
    scores = add_bias(scores, options)
    scores = scores.masked_fill(~mask, -torch.inf)
    if options.sink is not None:
        column = fp32(options.sink).view(-1, 1, 1).expand(len(q), -1, length, 1)
        scores = torch.cat((scores, column), dim=-1)  # (B, H, T, S + 1)
    return scores.softmax(dim=-1)[..., : k.shape[2]]


def add_bias(scores: Tensor, options: ScoreOptions, first: int = 0) -> Tensor:
    """Add the biases to scores (B, H, T, S); `first` is the index of the first query."""
    if options.token_bias is not None:
        query_bias = options.token_bias.query[:, :, first : first + scores.shape[2], None]
        key_bias = options.token_bias.key[:, :, None, : scores.shape[3]]
        scores = scores + (query_bias + key_bias)
    if options.bias is None:
        return scores
    row, head, query, key = [torch.arange(size, device=scores.device) for size in scores.shape]
    query = query + first
    bias = options.bias(row[:, None, None, None], head[:, None, None], query[:, None], key)
    return scores + bias


def expand_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, K, S, E) -> (B, H, S, E), repeated for the heads of q (B, H, T, E)."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def is_plain_softmax(options: ScoreOptions) -> bool:
    """Whether the weights are a softmax of the scaled products, without soft-cap, bias or sink."""
    has_bias = options.bias is not None or options.token_bias is not None
    return options.softcap is None and options.sink is None and not has_bias
