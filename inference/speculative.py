"""Speculative decoding by prompt lookup: drafts come from the sequence's own earlier tokens.

The method is that of github.com/apoorvumang/prompt-lookup-decoding; the tokens stay the same.
"""

from collections.abc import Iterator

import torch

from inference.batch import Batch, DecodeStep, Sequence
from run import hardware


def speculate(batch: Batch, step: DecodeStep, num_draft_tokens: int) -> Iterator[Sequence]:
    """Decode the newest token of each row and drafts of what follows in one step.

    Appends the drafts that are right and one more token, and yields a sequence after each.
    Afterwards state and cache are as if these tokens had been decoded one by one. What the sampler
    draws depends on seed, draw index and logits alone, so a draft is right if it equals the token
    that is drawn from the logits before it.
    """
    cache = batch.cache
    state = batch.state
    # The host knows all tokens but those that were drawn after a prefill.
    if batch.prefilled_rows:
        first_tokens = state.tokens.cpu().tolist()  # a list of one token for each row
        new_tokens = [[]] * len(first_tokens)
        for row in batch.prefilled_rows:
            new_tokens[row] = first_tokens[row]
        yield from batch.append(new_tokens)

    drafts = []
    for sequence in batch.rows:
        drafts.append(draft_for(sequence, num_draft_tokens, batch.model.context))
    if not any(drafts):
        drawn = step(batch.model, state.tokens, cache, None, batch.sampler, state)
        yield from batch.append(drawn.cpu().tolist())
        return

    # Decode the tokens and their drafts in one step. Layers that cannot be rewound are copied.
    padded = [draft + [-1] * (num_draft_tokens - len(draft)) for draft in drafts]
    (draft_tokens,) = hardware.to_device(state.tokens.device, torch.tensor(padded))
    tokens = torch.cat((state.tokens, draft_tokens), dim=1)  # (B, 1 + N)
    num_cached = cache.lengths.clone()
    saved = []
    for layer in cache.layers:
        if not layer.can_rewind:
            saved.append((layer, layer.map(torch.clone)))
    drawn = step(batch.model, tokens, cache, tokens >= 0, batch.sampler, state)

    # This copy to the host is all that a step waits for.
    num_before = [sequence.num_generated for sequence in batch.rows]
    yield from batch.append(drawn.cpu().tolist())

    # Keep in the cache all tokens of a sequence but its newest one.
    num_kept = []
    for sequence, before in zip(batch.rows, num_before, strict=True):
        num_kept.append(max(1, sequence.num_generated - before))
    if num_kept == [1 + len(draft) for draft in drafts]:
        return
    (num_kept,) = hardware.to_device(tokens.device, torch.tensor(num_kept))
    if not saved:
        cache.rewind(num_cached + num_kept)
        return

    # Layers that cannot be rewound are restored, and decode the tokens that are kept again.
    for layer, before in saved:
        layer.copy_(before)
    cache.lengths.copy_(num_cached)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    step(batch.model, tokens, cache, columns < num_kept[:, None])


def draft_for(sequence: Sequence, num_draft_tokens: int, context: int) -> list[int]:
    """Draft what may follow a sequence, as far as its length and the context allow.

    That is what followed the newest earlier occurrence of its last three, or else two, tokens.
    It leaves room for the token that is drawn after the drafts.
    """
    tokens = sequence.tokens
    num_free = context - len(tokens)
    limit = min(num_draft_tokens, sequence.num_left - 1, num_free)
    if sequence.is_finished or limit < 1:
        return []
    for size in (3, 2):
        last = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            end = start + size
            if tokens[start] == last[0] and tokens[start:end] == last:
                return tokens[end : end + limit]
    return []
