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
    drafts = [draft_for(sequence, num_draft_tokens, batch.model.context) for sequence in batch.rows]
    if not any(drafts):
        batch.logits = step(batch.model, tokens[:, None], cache, None)[:, -1]
        return

    # Pad the drafts to (B, N).
    padded = [draft + [0] * (num_draft_tokens - len(draft)) for draft in drafts]
    draft = torch.tensor(padded, device=tokens.device)
    draft_lengths = torch.tensor([len(draft) for draft in drafts], device=tokens.device)

    # Decode the tokens and their drafts, (B, 1 + N), in one step.
    inputs = torch.cat((tokens[:, None], draft), dim=1)
    columns = torch.arange(1 + num_draft_tokens, device=tokens.device)
    lengths = cache.lengths.clone()
    fixed_layers = [layer for layer in cache.layers if not layer.can_rewind]
    saved_layers = [layer.map(torch.clone) for layer in fixed_layers]
    logits = step(batch.model, inputs, cache, columns <= draft_lengths[:, None])

    # Draw after each token for which all drafts before it were right.
    num_accepted = torch.zeros_like(tokens)  # (B,)
    for column in range(num_draft_tokens):
        drawn = sampler(logits[:, column], batch.seeds, batch.draw_indices, batch.seen_tokens)
        is_right = (drawn == draft[:, column]) & (column < draft_lengths)
        is_accepted = is_right & (num_accepted == column) & batch.active_mask()
        if not is_accepted.any():
            break
        batch.record(drawn, is_accepted)
        num_accepted += is_accepted
        yield from batch.append(drawn.tolist(), is_accepted.tolist())
    rows = torch.arange(len(tokens), device=tokens.device)
    batch.logits = logits[rows, num_accepted]

    # Keep in the cache only what was accepted. Layers that cannot be rewound are restored, and
    # decode the accepted tokens again.
    if not fixed_layers:
        cache.rewind(lengths + 1 + num_accepted)
    elif (num_accepted < draft_lengths).any():
        for layer, saved in zip(fixed_layers, saved_layers, strict=True):
            layer.copy_(saved)
        cache.lengths.copy_(lengths)
        step(batch.model, inputs, cache, columns <= num_accepted[:, None])


def draft_for(sequence: Sequence | None, num_draft_tokens: int, context: int) -> list[int]:
    """Draft what may follow a sequence, as far as its length and the context allow."""
    if sequence is None or sequence.is_finished:
        return []
    num_left = sequence.max_new_tokens - sequence.num_generated
    limit = min(num_draft_tokens, num_left, context - len(sequence.tokens))
    if limit <= 0:
        return []
    return draft_tokens(sequence.tokens, limit)


def draft_tokens(tokens: list[int], limit: int) -> list[int]:
    """Return what followed the newest earlier occurrence of the last three, or else two, tokens."""
    for size in (3, 2):
        last = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            end = start + size
            if tokens[start] == last[0] and tokens[start:end] == last:
                return tokens[end : end + limit]
    return []
