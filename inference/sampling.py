"""Turning logits into tokens. What is drawn depends on the logits, a key and a place, and on nothing drawn before."""

import torch
from torch import Tensor


def sample(
    logits: Tensor,
    keys: Tensor,
    places: Tensor,
    seen: Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """logits (B, V), keys and places (B,) int64 -> tokens (B,). temperature = 0 is greedy; top_k = 0, top_p = 1 and
    min_p = 0 cut nothing.

    A row's `key` is its seed, its `place` counts its draws: the same row draws the same in any batch, at any time.
    `seen` (B, V) says which tokens a row already holds: theirs are divided by the penalty (Keskar et al., 1909.05858).
    Cuts in this order, each on what the one before left: top-k, top-p (1904.09751), min-p (2407.01082).
    """
    logits = logits.float()
    if repetition_penalty != 1:
        penalised = torch.where(
            logits > 0, logits / repetition_penalty, logits * repetition_penalty
        )
        logits = torch.where(seen, penalised, logits)
    if temperature < 1e-5:
        return logits.argmax(dim=-1)
    vocabulary = logits.shape[-1]
    if (
        top_p < 1 or 0 < top_k < vocabulary
    ):  # what follows is of the likeliest alone, in their order
        logits, tokens = logits.topk(min(top_k or vocabulary, vocabulary))
    else:
        tokens = torch.arange(vocabulary, device=logits.device).expand_as(logits)
    probability = (logits / temperature).softmax(dim=-1)
    if top_p < 1:
        outside = probability.cumsum(dim=-1) - probability >= top_p  # the first is always inside
        probability = probability.masked_fill(outside, 0.0)
    if min_p > 0:
        probability = probability.masked_fill(
            probability < min_p * probability.amax(dim=-1, keepdim=True), 0.0
        )
    fastest = (probability / exponential_noise(keys, places, tokens)).argmax(dim=-1, keepdim=True)
    return tokens.gather(1, fastest).squeeze(1)


def exponential_noise(keys: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    """Of each of the tokens (B, V), a draw from an exponential distribution: the first arrival of races at their
    probabilities is a draw from them.
    """
    bits = splitmix64(splitmix64(splitmix64(keys) + places)[:, None] + tokens)
    return -(
        (((bits >> 41) & 0x7FFFFF) + 0.5) / 2**23
    ).log()  # of 23 bits, so that none is 0 or 1 in fp32


def splitmix64(x: Tensor) -> Tensor:
    """int64 to int64, as if at random: splitmix64 (Steele et al., 10.1145/2660193.2660195)."""
    x = (x + 1) * -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
