"""Batches as a pure function of (seed, step), so one integer says where a run is in its data."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

IGNORE_INDEX = -100  # a target that does not count, as in torch's cross_entropy


class Loader:
    """Cuts shards, laid end to end, into rows of `context` input tokens and their next tokens.

    An epoch cuts its rows from a random offset on and visits each row once, in a random order.
    Raises ValueError if the text is too short for one batch.
    """

    def __init__(self, shards: list[np.ndarray], *, context: int, batch: int, seed: int):
        self.shards = shards
        self.context = context
        self.batch = batch
        self.seed = seed

        # Positions in the whole text of the first token of each shard.
        sizes = [len(shard) for shard in shards]
        self.shard_starts = np.cumsum([0, *sizes])[:-1]
        num_tokens = sum(sizes)
        check_enough_tokens(num_tokens, min_corpus_tokens(context, batch))

        # The last row needs one token more as a target; one row less, so that every offset fits.
        self.rows_per_epoch = (num_tokens - 1) // context - 1
        self._begin_epoch(0)

    def __call__(self, step: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return inputs (B, T) and their next tokens (B, T), int64, of these rows of a batch."""
        numbers = self._row_numbers(step)[rows]
        tokens = torch.empty(len(numbers), self.context + 1, dtype=torch.int64)
        for row, number in zip(tokens.numpy(), numbers, strict=True):
            start = self._row_start(number)
            self._read(start, row)
        # Targets are the inputs, one token later.
        inputs = tokens[:, :-1].contiguous()
        targets = tokens[:, 1:].contiguous()
        return inputs, targets

    def describe(self, step: int) -> str:
        """Describe, for a message, from where in the text the rows of a batch are."""
        numbers = self._row_numbers(step)
        epoch = numbers.start // self.rows_per_epoch
        # Eight positions are enough to find the text again.
        starts = [str(self._row_start(number)) for number in numbers[:8]]
        text = ", ".join(starts)
        if len(numbers) > 8:
            text += " and so on"
        return f"{self.batch} rows of epoch {epoch}, from the tokens {text}"

    def _row_numbers(self, step: int) -> range:
        """Return the numbers of a batch's rows, which are counted through all epochs."""
        first = step * self.batch
        return range(first, first + self.batch)

    def _row_start(self, number: int) -> int:
        """Return the position of a row's first token in the whole text."""
        epoch, index = divmod(number, self.rows_per_epoch)
        if epoch != self.epoch:
            self._begin_epoch(epoch)
        row = int(self.order[index])
        return self.offset + row * self.context

    def _begin_epoch(self, epoch: int) -> None:
        """Draw where the rows of an epoch are cut and in which order they come."""
        generator = np.random.default_rng((self.seed, epoch))
        self.epoch = epoch
        self.offset = int(generator.integers(self.context))
        self.order = generator.permutation(self.rows_per_epoch)

    def _read(self, start: int, out: np.ndarray) -> None:
        """Fill `out` (n) with the tokens from position `start` on, across the ends of shards."""
        # The shard that holds the position is the last one that begins at or before it.
        index = int(np.searchsorted(self.shard_starts, start, side="right")) - 1
        begin = start - int(self.shard_starts[index])
        while len(out) > 0:
            piece = self.shards[index][begin : begin + len(out)]
            out[: len(piece)] = piece
            out = out[len(piece) :]
            # What is missing is at the beginning of the next shard.
            index += 1
            begin = 0


def min_corpus_tokens(context: int, batch: int) -> int:
    """Tokens that a text must have for one batch, at any offset of the epoch."""
    return (batch + 1) * context + 1


def check_enough_tokens(tokens: int, min_tokens: int) -> None:
    """Raise ValueError if a text of so many tokens is too short."""
    if tokens < min_tokens:
        raise ValueError(
            f"too little text for one batch (have {tokens} tokens, need {min_tokens}). "
            "fix: more text, or a smaller batch_tokens or context"
        )


def document_ids(inputs: Tensor, bos: int) -> Tensor:
    """Map inputs (B, T) to the number (B, T) of each token's document in its row, by BOS tokens."""
    return (inputs == bos).cumsum(dim=1)


def eval_windows(
    shards: list[np.ndarray], context: int, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate once over all text, in order, in windows that do not overlap.

    Yields inputs (B, T) and targets (B, T), all of one shape: the last batch is padded, and its
    padding has the target IGNORE_INDEX.
    """
    text = np.concatenate(shards).astype(np.int64)
    tokens = torch.from_numpy(text)
    num_targets = len(tokens) - 1

    # The text ends somewhere in its last batch: what is behind its end stays padding.
    batch_tokens = batch * context
    num_batches = math.ceil(num_targets / batch_tokens)
    inputs = torch.zeros(num_batches * batch_tokens, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORE_INDEX)
    inputs[:num_targets] = tokens[:-1]
    targets[:num_targets] = tokens[1:]

    # Cut it into batches of windows.
    inputs = inputs.view(num_batches, batch, context)
    targets = targets.view(num_batches, batch, context)
    return zip(inputs, targets, strict=True)
