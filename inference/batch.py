"""What is decoded together: sequences of tokens, each with a row of the batch and of its cache."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from model.cache import Cache
from model.transformer import Transformer

# Takes a model, tokens (B, T), its cache, and which tokens are valid (B, T) or None for all;
# returns logits (B, T, V).
DecodeStep = Callable[..., Tensor]

# Takes logits (B, V), seeds (B,), draw indices (B,) and seen tokens (B, V); returns tokens (B,).
Sampler = Callable[..., Tensor]

MAX_PADDING_FACTOR = 2  # prompts are padded to one batch up to this many times their own tokens


@dataclass(eq=False)
class Sequence:
    """A prompt and what is generated after it, until `finish_reason` is "eos", "stop" or "length".

    `tokens` starts with those of the prompt, and loses its older half when it outgrows the
    context. `seed` determines what is drawn. `num_cached` tokens are in the cache row before the
    first prefill; a later prefill starts from an empty row. `prompt` is its text, for output.
    """

    tokens: list[int]
    max_new_tokens: int
    _: KW_ONLY
    seed: int = 0
    eos: int | None = None
    num_cached: int = 0
    prompt: str = ""
    num_generated: int = 0
    finish_reason: str | None = None

    def __post_init__(self):
        self.tokens = list(self.tokens)
        if self.max_new_tokens == 0:
            self.finish_reason = "length"

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_left(self) -> int:
        return self.max_new_tokens - self.num_generated

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.num_generated += 1
        if token == self.eos:
            self.finish_reason = "eos"
        elif self.num_left == 0:
            self.finish_reason = "length"

    def stop(self) -> None:
        """End it after its newest token: no more are generated."""
        self.finish_reason = "stop"


class Batch:
    """The sequences that are decoded together, and the tensors that the sampler draws from.

    logits (B, V), seen_tokens (B, V), seeds (B,) and draw_indices (B,) have a row a sequence.
    Raises ValueError for a prompt that is empty or longer than the context.
    """

    def __init__(
        self, model: Transformer, sequences: list[Sequence], cache: Cache | None, prefill_chunk: int
    ):
        self.model = model
        self.cache = cache
        self.prefill_chunk = prefill_chunk
        self.waiting = deque(sequences)
        for sequence in sequences:
            if not 1 <= len(sequence.tokens) <= model.context:
                problem = f"a prompt must have 1 to {model.context} tokens"
                raise ValueError(f"{problem} (got {len(sequence.tokens)}). fix: cut it")

        # A row starts with a sequence that is finished. Without a cache there is one row.
        num_rows = 1 if cache is None else len(cache.lengths)
        self.rows = [Sequence([], 0)] * num_rows

        # What the sampler draws from.
        weight = model.embed.weight
        self.logits = torch.zeros(num_rows, len(weight), dtype=weight.dtype, device=weight.device)
        self.seen_tokens = torch.zeros_like(self.logits, dtype=torch.bool)
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=weight.device)
        self.draw_indices = torch.zeros_like(self.seeds)

    def schedule(self) -> bool:
        """Give free rows the next sequences and prefill them; return whether any row has one.

        A sequence that has outgrown the context loses its oldest half and is prefilled anew.
        """
        to_prefill = []
        for row, sequence in enumerate(self.rows):
            while sequence.is_finished and self.waiting:
                sequence = self.waiting.popleft()
            if sequence.is_finished:
                continue
            if len(sequence.tokens) > self.model.context:
                del sequence.tokens[: self.model.context // 2]
            elif sequence is self.rows[row] and self.cache is not None:
                continue  # its cache row has all of it
            self.rows[row] = sequence
            to_prefill.append(row)

        # Prefill, and set what the sampler draws from to the state of these sequences.
        self.prefill_rows(to_prefill)
        for row in to_prefill:
            sequence = self.rows[row]
            sequence.num_cached = 0
            self.seeds[row] = sequence.seed
            self.draw_indices[row] = sequence.num_generated
            self.seen_tokens[row] = False
            self.seen_tokens[row, sequence.tokens] = True
        return any(self.is_active())

    def prefill_rows(self, rows: list[int]) -> None:
        """Compute the logits of these rows from those of their tokens that are not cached."""
        sequences = [self.rows[row] for row in rows]
        if self.can_prefill_together(sequences):
            prompts = [sequence.tokens for sequence in sequences]
            self.cache.reset()
            self.logits = prefill(self.model, prompts, self.cache, self.prefill_chunk)
            return

        previous = None  # the row before, whose tokens may be the same
        for row, sequence in zip(rows, sequences, strict=True):
            cache = None if self.cache is None else self.cache.row(row)
            if previous is not None and sequence.tokens == self.rows[previous].tokens:
                cache.copy_(self.cache.row(previous))
                self.logits[row] = self.logits[previous]
                continue
            # The row may still hold another sequence, or this one before it was cut.
            if cache is not None and sequence.num_cached == 0:
                cache.reset()
            new_tokens = sequence.tokens[sequence.num_cached :]
            self.logits[row] = prefill(self.model, [new_tokens], cache, self.prefill_chunk)[0]
            previous = row

    def can_prefill_together(self, sequences: list[Sequence]) -> bool:
        """Whether these take all rows, no two are the same, and padding them wastes little."""
        if self.cache is None or any(sequence.num_cached > 0 for sequence in sequences):
            return False
        prompts = {tuple(sequence.tokens) for sequence in sequences}
        if len(prompts) < len(self.rows):
            return False
        lengths = [len(prompt) for prompt in prompts]
        return len(lengths) * max(lengths) <= MAX_PADDING_FACTOR * sum(lengths)

    def record(self, tokens: Tensor) -> None:
        """Tell the sampler's tensors what was drawn: tokens (B,), negative where nothing was."""
        is_drawn = tokens >= 0
        self.draw_indices += is_drawn
        column = tokens.clamp(min=0)[:, None]
        is_seen = self.seen_tokens.gather(1, column) | is_drawn[:, None]
        self.seen_tokens.scatter_(1, column, is_seen)

    def append(self, tokens: list[int]) -> Iterator[Sequence]:
        """Append to each active row its token, if not negative; yield the row's sequence."""
        for sequence, token in zip(self.rows, tokens, strict=True):
            if token >= 0 and not sequence.is_finished:
                sequence.append(token)
                yield sequence

    def is_active(self) -> list[bool]:
        """Which rows have a sequence that is not finished."""
        return [not sequence.is_finished for sequence in self.rows]

    def needs_more(self) -> bool:
        """Whether any sequence may get a token after the one that was recorded last."""
        return any(not row.is_finished and row.num_left > 1 for row in self.rows)


def prefill(
    model: Transformer, prompts: list[list[int]], cache: Cache | None, chunk: int
) -> Tensor:
    """Run prompts through the model, `chunk` tokens at a time; return the last logits (B, V)."""
    # Pad on the left, so that the last column has the last token of each prompt.
    rows = [torch.tensor(prompt) for prompt in prompts]
    tokens = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")
    is_ragged = bool((tokens < 0).any())
    tokens = tokens.to(model.embed.weight.device)

    if cache is None:
        hidden = model.hidden(tokens)  # of one prompt
        return model.logits(hidden[:, -1])

    # Attend to no more slots of the cache than are filled after each part.
    end = int(cache.lengths.max())
    for part in tokens.split(chunk, dim=1):
        end += part.shape[1]
        valid = part >= 0 if is_ragged else None
        hidden = model.hidden(part.clamp(min=0), cache.first(end), valid)
    return model.logits(hidden[:, -1])
