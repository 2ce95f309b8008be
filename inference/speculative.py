"""Speculative decoding by prompt lookup: drafts come from the sequence's own earlier tokens.

The method is that of github.com/apoorvumang/prompt-lookup-decoding; the tokens stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from inference.engine import Batch, DecodeStep, Sampler, Sequence


def speculate(
    batch: Batch, tokens: Tensor, sampler: Sampler, step: DecodeStep, num_draft_tokens: int
) -> Iterator[Sequence]:
    """Decode `tokens` (B,) and drafts of what follows in one step; append the drafts that are right.

    Yields a sequence each time it has a new token. Afterwards batch.logits and the cache are as
    if the accepted tokens had been decoded one by one. What the sampler draws depends on seed,
    draw index and logits alone, so a draft is right if it is what is drawn from the logits before it.
    """
    cache = batch.cache
    model = batch.model
    drafts = []
    for sequence in batch.rows:
        draft = draft_for(sequence, num_draft_tokens, model.context)
        drafts.append(draft)
    if not any(drafts):
        logits = step(model, tokens[:, None], cache, None)
        batch.logits = logits[:, -1]
        return

    # Pad the drafts to (B, N).
    lengths = [len(draft) for draft in drafts]
    padded = [draft + [0] * (num_draft_tokens - len(draft)) for draft in drafts]
    draft_lengths = tokens.new_tensor(lengths)
    draft_tokens = tokens.new_tensor(padded)

    # Decode the tokens and their drafts, (B, 1 + N), in one step.
    inputs = torch.cat((tokens[:, None], draft_tokens), dim=1)
    columns = torch.arange(inputs.shape[1], device=inputs.device)
    is_valid = columns <= draft_lengths[:, None]
    num_cached = cache.lengths.clone()
    fixed_layers = [layer for layer in cache.layers if not layer.can_rewind]
    saved_layers = [layer.map(torch.clone) for layer in fixed_layers]
    logits = step(model, inputs, cache, is_valid)

    # Draw after each token for which all drafts before it were right.
    num_accepted = torch.zeros_like(tokens)  # (B,)
    for column in range(num_draft_tokens):
        drawn = sampler(logits[:, column], batch.seeds, batch.draw_indices, batch.seen_tokens)
        is_accepted = batch.active_mask()
        is_accepted &= num_accepted == column
        is_accepted &= column < draft_lengths
        is_accepted &= drawn == draft_tokens[:, column]
        if not is_accepted.any():
            break
        batch.record(drawn, is_accepted)
        num_accepted += is_accepted
        yield from batch.append(drawn.tolist(), is_accepted.tolist())
    rows = torch.arange(len(inputs), device=inputs.device)
    batch.logits = logits[rows, num_accepted]

    # Keep in the cache only what was accepted. Layers that cannot be rewound are restored, and
    # decode the accepted tokens again.
    if not fixed_layers:
        cache.rewind(num_cached + 1 + num_accepted)
    elif (num_accepted < draft_lengths).any():
        for layer, saved in zip(fixed_layers, saved_layers, strict=True):
            layer.copy_(saved)
        cache.lengths.copy_(num_cached)
        is_valid = columns <= num_accepted[:, None]
        step(model, inputs, cache, is_valid)


def draft_for(sequence: Sequence | None, num_draft_tokens: int, context: int) -> list[int]:
    """Draft what may follow a sequence, as far as its length and the context allow."""
    if sequence is None or sequence.is_finished:
        return []
    num_free = max(0, context - len(sequence.tokens))
    limit = min(num_draft_tokens, sequence.num_left, num_free)
    return lookup(sequence.tokens, limit)


def lookup(tokens: list[int], limit: int) -> list[int]:
    """Return what followed the newest earlier occurrence of the last three, or else two, tokens."""
    for size in (3, 2):
        last = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            end = start + size
            if tokens[start] == last[0] and tokens[start:end] == last:
                return tokens[end : end + limit]
    return []
