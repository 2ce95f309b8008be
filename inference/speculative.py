"""Speculative decoding by prompt lookup: drafts come from the sequence's own earlier tokens.

The method is that of github.com/apoorvumang/prompt-lookup-decoding; the tokens stay the same.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from inference.batch import Batch, DecodeStep, Sampler, Sequence


def speculate(
    batch: Batch, tokens: Tensor, sampler: Sampler, step: DecodeStep, num_draft_tokens: int
) -> Iterator[Sequence]:
    """Decode `tokens` (B,) and drafts of what follows in one step; append those that are right.

    Yields a sequence each time it has a new token. Afterwards batch.logits and the cache are as
    if the accepted tokens had been decoded one by one. What the sampler draws depends on seed,
    draw index and logits alone, so a draft is right if it is what the logits before it give.
    """
    cache = batch.cache
    model = batch.model
    drafts = []
    for sequence in batch.rows:
        drafts.append(draft_for(sequence, num_draft_tokens, model.context))
    if not any(drafts):
        logits = step(model, tokens[:, None], cache, None)
        batch.logits = logits[:, -1]
        return

    # Decode the tokens and their drafts in one step. Layers that cannot be rewound are copied.
    padded = [draft + [-1] * (num_draft_tokens - len(draft)) for draft in drafts]
    draft_tokens = tokens.new_tensor(padded)  # (B, N)
    inputs = torch.cat((tokens[:, None], draft_tokens), dim=1)  # (B, 1 + N)
    is_valid = inputs >= 0
    inputs = inputs.clamp(min=0)
    num_cached = cache.lengths.clone()
    saved = []
    for layer in cache.layers:
        if not layer.can_rewind:
            saved.append((layer, layer.map(torch.clone)))
    logits = step(model, inputs, cache, is_valid)

    # Draw after each token for which all drafts before it were right.
    num_accepted = torch.zeros_like(tokens)  # (B,)
    is_right = torch.ones_like(tokens, dtype=torch.bool)
    for column in range(num_draft_tokens):
        drawn = sampler(logits[:, column], batch.seeds, batch.draw_indices, batch.seen_tokens)
        is_active = torch.tensor(batch.is_active(), device=tokens.device)
        is_right &= drawn == draft_tokens[:, column]
        is_right &= is_active
        if not is_right.any():
            break
        num_accepted += is_right
        accepted = drawn.where(is_right, -1)
        batch.record(accepted)
        yield from batch.append(accepted.tolist())
    batch.logits = logits.take_along_dim(num_accepted[:, None, None], dim=1)[:, 0]

    # Keep in the cache only what was accepted. Layers that cannot be rewound are restored, and
    # decode the accepted tokens again.
    columns = torch.arange(inputs.shape[1], device=inputs.device)
    is_kept = columns <= num_accepted[:, None]
    if not saved:
        cache.rewind(num_cached + 1 + num_accepted)
    elif not is_kept.equal(is_valid):
        for layer, before in saved:
            layer.copy_(before)
        cache.lengths.copy_(num_cached)
        step(model, inputs, cache, is_kept)


def draft_for(sequence: Sequence, num_draft_tokens: int, context: int) -> list[int]:
    """Draft what may follow a sequence, as far as its length and the context allow.

    That is what followed the newest earlier occurrence of its last three, or else two, tokens.
    """
    tokens = sequence.tokens
    num_free = context - len(tokens)
    limit = min(num_draft_tokens, sequence.num_left, num_free)
    if sequence.is_finished or limit < 1:
        return []
    for size in (3, 2):
        last = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            end = start + size
            if tokens[start] == last[0] and tokens[start:end] == last:
                return tokens[end : end + limit]
    return []
