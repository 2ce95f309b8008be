"""Turning logits into tokens, and prompts into text one step at a time."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from model.cache import Cache
from model.transformer import Transformer

Step = Callable[[Transformer, Tensor, Cache], Tensor]
Draw = Callable[[Tensor, Tensor], Tensor]


def sample(
    logits: Tensor,
    seen: Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """logits (B, V) -> tokens (B,). temperature = 0 is greedy; top_k = 0, top_p = 1 and min_p = 0 cut nothing.

    `seen` (B, V) says which tokens a row already holds: theirs are divided by the penalty (Keskar et al., 1909.05858).
    Cuts in this order, each on what the one before left: top-k, top-p (1904.09751), min-p (2407.01082).
    """
    logits = logits.float()
    if repetition_penalty != 1:
        penalised = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    if temperature < 1e-5:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        ranked, order = logits.sort(dim=-1, descending=True)
        probability = ranked.softmax(dim=-1)
        outside = probability.cumsum(dim=-1) - probability >= top_p  # the first is always inside
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    probability = logits.softmax(dim=-1)
    if min_p > 0:
        probability = probability.masked_fill(probability < min_p * probability.amax(dim=-1, keepdim=True), 0.0)
    noise = torch.empty_like(probability).exponential_(generator=generator)
    return (probability / noise).argmax(dim=-1)  # exponential races: as multinomial, without asking the host


def decode_step(model: Transformer, tokens: Tensor, cache: Cache) -> Tensor:
    """tokens (B, 1) -> logits (B, V). Compiled once, it serves every length up to the capacity."""
    return model(tokens, cache)[:, -1]


def prefill(model: Transformer, rows: list[list[int]], cache: Cache | None, chunk: int) -> Tensor:
    """Read what is new of each row, `chunk` tokens at a time -> the logits (B, V) after each."""
    width, device = max(map(len, rows)), model.embed.weight.device
    padded = torch.tensor([[-1] * (width - len(row)) + row for row in rows], device=device)
    ragged = any(len(row) != width for row in rows)
    for tokens in padded.split(width if cache is None else chunk, dim=1):
        hidden = model.hidden(tokens.clamp(min=0), cache, tokens >= 0 if ragged else None)
    return model.logits(hidden[:, -1])  # padded on the left, so that the last column is everyone's last token


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: list[list[int]],
    max_new: int,
    draw: Draw,
    *,
    copies: int = 1,
    cache: Cache | None = None,
    step: Step = decode_step,
    chunk: int = 512,
) -> Iterator[Tensor]:
    """Up to `max_new` tensors (B,) as they are drawn, for `copies` rows of each prompt.

    `cache` is empty, with a row for each prompt and room for min(context, prompt + max_new) tokens; without one,
    everything is read again for every token, to the same text. A row longer than the context loses its older half.
    Raises ValueError for an empty prompt or one longer than the context.
    """
    if not all(0 < len(prompt) <= model.context for prompt in prompts):
        raise ValueError(f"prompts must have 1 to {model.context} tokens (got {[*map(len, prompts)]}). fix: cut them")
    texts = [list(prompt) for prompt in prompts for _ in range(copies)]
    logits = prefill(model, prompts, cache, chunk).repeat_interleave(copies, dim=0)
    if cache is not None and copies > 1:
        cache = cache.repeat(copies)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for row, text in enumerate(texts):
        seen[row, text] = True
    for new in range(max_new):
        tokens = draw(logits, seen)
        yield tokens
        if new + 1 == max_new:
            return
        seen.scatter_(1, tokens[:, None], True)
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)
        full = [len(text) > model.context for text in texts]
        for text in (text for text, is_full in zip(texts, full, strict=True) if is_full):
            del text[: model.context // 2]
        if cache is None:
            logits = prefill(model, texts, None, chunk)
        elif any(full):
            cache.reset(torch.tensor(full, device=tokens.device).nonzero().flatten())
            logits = prefill(
                model, [text if is_full else text[-1:] for text, is_full in zip(texts, full, strict=True)], cache, chunk
            )
        else:
            logits = step(model, tokens[:, None], cache)
