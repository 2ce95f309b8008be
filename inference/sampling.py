"""Sample tokens from logits. A row's sample does not depend on the other rows."""

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5  # below it, sampling is greedy
ROUNDING = 1e-6  # rounding error of a sum of probabilities in fp32


def sample(
    logits: Tensor,
    seeds: Tensor,
    draw_indices: Tensor,
    seen_tokens: Tensor | None = None,
    *,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """logits (..., V), seeds and draw_indices (...) int64 -> tokens (...).

    A row's sample depends on its logits, seen tokens, seed and draw index, not on other rows.
    temperature = 0 is greedy; top_k = 0, top_p = 1 and min_p = 0 exclude nothing. Filters apply in
    the order top-k, top-p (1904.09751), min-p (2407.01082), each to the tokens kept so far.
    The penalty (Keskar et al., 1909.05858) applies to the tokens in `seen_tokens` (..., V). An
    imported model may have more logits than its tokenizer has ids: only ids below `vocab_size` are
    sampled.
    """
    assert seeds.shape == draw_indices.shape == logits.shape[:-1]
    logits = logits[..., :vocab_size].float()
    if repetition_penalty != 1:
        assert seen_tokens is not None
        seen_tokens = seen_tokens[..., :vocab_size]
        assert seen_tokens.shape == logits.shape
        divided = logits / repetition_penalty
        penalized = torch.where(logits > 0, divided, logits * repetition_penalty)
        logits = torch.where(seen_tokens, penalized, logits)
    if temperature < MIN_TEMPERATURE or top_k == 1:
        return argmax(logits)

    # Sort the most likely tokens if top-k or top-p needs them in order.
    num_tokens = logits.shape[-1]
    num_kept = num_tokens
    if 0 < top_k < num_tokens:
        num_kept = top_k
    if top_p < 1 or num_kept < num_tokens:
        logits, tokens = logits.topk(num_kept)
    else:
        tokens = torch.arange(num_tokens, device=logits.device).expand_as(logits)

    probability = (logits / temperature).softmax(dim=-1)
    if top_p < 1:
        # Drop a token if the tokens before it already have a total probability of top_p, up to
        # rounding; always keep the first token.
        probability_before = probability.cumsum(dim=-1) - probability
        is_dropped = probability_before > max(0.0, top_p - ROUNDING)
        probability = probability.masked_fill(is_dropped, 0.0)
    if min_p > 0:
        threshold = min_p * (1 - ROUNDING) * probability.amax(dim=-1, keepdim=True)
        probability = probability.masked_fill(probability < threshold, 0.0)

    # noise / p is an exponential arrival time of rate p; the earliest token is a sample from p.
    earliest = argmax(probability / exponential_noise(seeds, draw_indices, tokens))
    return tokens.gather(-1, earliest[..., None]).squeeze(-1)


def argmax(x: Tensor) -> Tensor:
    """x (..., V) -> the index (...) of the largest value, or of the first one among equal ones."""
    if x.device.type == "cpu":
        # NumPy's kernel is vectorized; torch's takes 90 us of a 1.2 ms step (docs/dev/log.md).
        return torch.as_tensor(x.detach().numpy().argmax(axis=-1))
    return x.argmax(dim=-1)


def exponential_noise(seeds: Tensor, draw_indices: Tensor, tokens: Tensor) -> Tensor:
    """Return exponential noise (..., V) for seeds and draw_indices (...) and tokens (..., V)."""
    # A different dtype would give different bits.
    assert seeds.dtype == draw_indices.dtype == tokens.dtype == torch.int64
    row_bits = splitmix64(splitmix64(seeds) + draw_indices)
    bits = splitmix64(row_bits[..., None] + tokens)
    # Take 23 bits and add one half, so that in fp32 the result is neither 0 nor 1.
    uniform = (((bits >> 41) & 0x7FFFFF) + 0.5) / 2**23
    return -uniform.log()


def splitmix64(x: Tensor) -> Tensor:
    """Hash int64 to int64 with splitmix64 (Steele et al., 10.1145/2660193.2660195)."""
    x = (x + 1) * -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
