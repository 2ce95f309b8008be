"""What is decoded together: sequences of tokens, each with a row of the batch and of its cache."""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from model.cache import Cache
from model.transformer import Transformer
from run import hardware

# `engine.decode_step`, or a compiled one.
DecodeStep = Callable[..., Tensor]

# Takes logits (..., V), seeds and draw indices (...) that broadcast, and seen tokens (..., V);
# returns tokens (...).
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
    eos: Collection[int] = ()
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
        if token in self.eos:
            self.finish_reason = "eos"
        elif self.num_left == 0:
            self.finish_reason = "length"

    def stop(self) -> None:
        """End it after its newest token: no more are generated."""
        self.finish_reason = "stop"


class SamplerState(NamedTuple):
    """What the next draw of each row depends on besides logits. Draws update it in place."""

    tokens: Tensor  # (B, 1), drawn last: what is decoded next
    seeds: Tensor  # (B,)
    draw_indices: Tensor  # (B,), of the next draw
    seen_tokens: Tensor  # (B, V), true for tokens of the prompt or drawn

    def row(self, number: int) -> "SamplerState":
        """A view of one row: what is written to it is written here."""
        return SamplerState(*[tensor[number : number + 1] for tensor in self])

    def draw(self, sampler: Sampler, logits: Tensor, drafts: Tensor) -> Tensor:
        """logits (B, 1 + N, V), drafts (B, N), -1 for none -> tokens (B, 1 + N), -1 for none.

        Draws as if one by one, up to the first token that differs from its draft. Drafts must be
        tokens that the row has seen.
        """
        columns = torch.arange(logits.shape[1], device=logits.device)
        draw_indices = self.draw_indices[:, None] + columns
        drawn = sampler(logits, self.seeds[:, None], draw_indices, self.seen_tokens[:, None])
        if drawn.shape[1] == 1:
            self.record(drawn, 1)
            return drawn

        # Go on after the last draft of those that are right without a gap.
        num_right = (drawn[:, :-1] == drafts).cumprod(dim=1).sum(dim=1, keepdim=True)  # (B, 1)
        newest = drawn.gather(1, num_right)
        self.record(newest, 1 + num_right[:, 0])
        return drawn.where(columns <= num_right, -1)

    def record(self, newest: Tensor, num_drawn: Tensor | int) -> None:
        """After so many draws, the newest tokens (B, 1) are those to decode next."""
        self.tokens.copy_(newest)
        self.draw_indices.add_(num_drawn)
        self.seen_tokens.scatter_(1, newest, True)


def new_sampler_state(model: Transformer, num_rows: int) -> SamplerState:
    """Allocate the state of rows that have no sequence yet."""
    weight = model.embed.weight
    zeros = partial(torch.zeros, dtype=torch.int64, device=weight.device)
    seen_tokens = zeros(num_rows, len(weight), dtype=torch.bool)
    return SamplerState(zeros(num_rows, 1), zeros(num_rows), zeros(num_rows), seen_tokens)


class Batch:
    """The sequences that are decoded together, each with a row of the cache and of `state`.

    Raises ValueError for a prompt that is empty or longer than the context.
    """

    def __init__(
        self,
        model: Transformer,
        sequences: list[Sequence],
        sampler: Sampler,
        cache: Cache | None,
        state: SamplerState,
        prefill_chunk: int,
    ):
        self.model = model
        self.sampler = sampler
        self.cache = cache
        self.state = state
        self.prefill_chunk = prefill_chunk
        self.waiting = deque(sequences)
        for sequence in sequences:
            if not 1 <= len(sequence.tokens) <= model.context:
                raise ValueError(
                    f"a prompt must have 1 to {model.context} tokens "
                    f"(got {len(sequence.tokens)}). fix: cut it"
                )

        # A row starts with a sequence that is finished.
        self.rows = [Sequence([], 0)] * len(state.tokens)
        self.prefilled_rows: list[int] = []  # by the newest `schedule`

    def schedule(self) -> bool:
        """Give free rows the next sequences and prefill them; return whether any row has one.

        Where a row is prefilled, its next token is drawn too. A sequence that has outgrown the
        context loses its oldest half and is prefilled anew.
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

        self.prefilled_rows = to_prefill
        for row, logits in zip(to_prefill, self.prefill_rows(to_prefill), strict=True):
            self.start_row(row, logits)
        return not all(sequence.is_finished for sequence in self.rows)

    def start_row(self, row: int, logits: Tensor) -> None:
        """Set the state of a row to that of its sequence; draw its first token from logits (V,)."""
        sequence = self.rows[row]
        sequence.num_cached = 0
        (tokens,) = hardware.to_device(logits.device, torch.tensor(sequence.tokens))
        state = self.state.row(row)
        state.seeds.fill_(sequence.seed)
        state.draw_indices.fill_(sequence.num_generated)
        state.seen_tokens.zero_()
        state.seen_tokens[:, tokens] = True
        state.draw(self.sampler, logits[None, None], tokens[None, :0])

    def prefill_rows(self, rows: list[int]) -> list[Tensor]:
        """Return the next logits (V,) of these rows, from their tokens that are not cached."""
        sequences = [self.rows[row] for row in rows]
        if self.can_prefill_together(sequences):
            prompts = [sequence.tokens for sequence in sequences]
            self.cache.reset()
            return list(prefill(self.model, prompts, self.cache, self.prefill_chunk))

        logits = []
        previous = None  # the row before, whose tokens may be the same
        for row, sequence in zip(rows, sequences, strict=True):
            cache = None if self.cache is None else self.cache.row(row)
            if previous is not None and sequence.tokens == self.rows[previous].tokens:
                cache.copy_(self.cache.row(previous))
                logits.append(logits[-1])
                continue
            # The row may still hold another sequence, or this one before it was cut.
            num_cached = sequence.num_cached
            if cache is not None and num_cached == 0:
                cache.reset()
            new_tokens = [sequence.tokens[num_cached:]]
            logits += prefill(self.model, new_tokens, cache, self.prefill_chunk, num_cached)
            previous = row
        return logits

    def can_prefill_together(self, sequences: list[Sequence]) -> bool:
        """Whether these take all rows, no two are the same, and padding them wastes little."""
        if self.cache is None or any(sequence.num_cached > 0 for sequence in sequences):
            return False
        prompts = {tuple(sequence.tokens) for sequence in sequences}
        if len(prompts) < len(self.rows):
            return False
        lengths = [len(prompt) for prompt in prompts]
        return len(lengths) * max(lengths) <= MAX_PADDING_FACTOR * sum(lengths)

    def append(self, tokens: list[list[int]]) -> Iterator[Sequence]:
        """Append to each active row its tokens up to a negative one; yield the row's sequence.

        That is after each token, so that the caller can stop the sequence there.
        """
        for sequence, new_tokens in zip(self.rows, tokens, strict=True):
            for token in new_tokens:
                if token < 0 or sequence.is_finished:
                    break
                sequence.append(token)
                yield sequence

    def needs_more(self) -> bool:
        """Whether any sequence may get a token after the one that was drawn last."""
        return any(not sequence.is_finished and sequence.num_left > 1 for sequence in self.rows)


def prefill(
    model: Transformer,
    prompts: list[list[int]],
    cache: Cache | None,
    chunk: int,
    num_cached: int = 0,
) -> Tensor:
    """Run prompts through the model, `chunk` tokens at a time; return the last logits (B, V).

    `num_cached` is the most tokens that a row of the cache holds before.
    """
    # Pad on the left, so that the last column has the last token of each prompt.
    rows = [torch.tensor(prompt) for prompt in prompts]
    tokens = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")
    is_ragged = bool((tokens < 0).any())
    (tokens,) = hardware.to_device(model.embed.weight.device, tokens)

    if cache is None:
        hidden = model.hidden(tokens)  # of one prompt
    else:
        # Attend to no more slots of the cache than are filled after each part.
        end = num_cached
        for part in tokens.split(chunk, dim=1):
            end += part.shape[1]
            valid = part >= 0 if is_ragged else None
            hidden = model.hidden(part.clamp(min=0), cache.first(end), valid)
    return model.logits(hidden[:, -1])
