"""Batches as a pure function of (seed, step), so one integer says where a run is in its data."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

IGNORE_INDEX = -100  # a target that does not count, as in torch's cross_entropy


@dataclass(kw_only=True)
class Batches:
    """Batches of `batch_size` numbered rows of `context` tokens, drawn by `seed`."""

    context: int
    batch_size: int
    seed: int

    def _row_numbers(self, step: int) -> range:
        """Return the numbers of a batch's rows, which are counted through all epochs."""
        first = step * self.batch_size
        return range(first, first + self.batch_size)


@dataclass
class Loader(Batches):
    """Cuts shards, laid end to end, into rows of `context` input tokens and their next tokens.

    An epoch cuts its rows from a random offset on and visits each row once, in a random order.
    Raises ValueError if the text is too short for one batch.
    """

    shards: list[np.ndarray]

    def __post_init__(self):
        # Positions in the whole text after the last token of each shard.
        lengths = [len(shard) for shard in self.shards]
        self.shard_ends = np.cumsum(lengths)
        num_tokens = int(self.shard_ends[-1])
        check_enough_tokens(num_tokens, min_corpus_tokens(self.context, self.batch_size))

        # The last row needs one token more as a target; one row less, so that every offset fits.
        self.rows_per_epoch = (num_tokens - 1) // self.context - 1
        self._begin_epoch(0)

    def __call__(self, step: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return inputs (B, T) and their next tokens (B, T), int64, of these rows of a batch."""
        pieces = []
        for number in self._row_numbers(step)[rows]:
            start = self._row_start(number)
            pieces.append(self._read(start, self.context + 1))
        tokens = np.stack(pieces).astype(np.int64)
        tokens = torch.from_numpy(tokens)
        # Targets are the inputs, one token later.
        inputs = tokens[:, :-1].contiguous()
        targets = tokens[:, 1:].contiguous()
        return inputs, targets

    def num_targets(self, step: int) -> int:
        """The targets of a batch, over which its loss is averaged."""
        return self.batch_size * self.context

    def describe(self, step: int) -> str:
        """Describe, for a message, where the rows of a batch start in the text."""
        numbers = self._row_numbers(step)
        first = numbers.start
        epoch = first // self.rows_per_epoch
        # Eight positions are enough to find the text again.
        starts = [self._row_start(number) for number in numbers[:8]]
        return f"{len(numbers)} rows of epoch {epoch}, from the tokens {starts} (at most 8 listed)"

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

    def _read(self, start: int, count: int) -> np.ndarray:
        """Return the tokens from position `start` on, across the ends of shards."""
        # The shard that holds the position is the first one that ends after it.
        index = np.searchsorted(self.shard_ends, start, side="right")
        from_end = start - self.shard_ends[index]
        tokens = self.shards[index][from_end:][:count]
        # What is missing is in the shards that follow.
        while len(tokens) < count:
            index += 1
            missing = count - len(tokens)
            tokens = np.concatenate((tokens, self.shards[index][:missing]))
        return tokens


def min_corpus_tokens(context: int, batch_size: int) -> int:
    """Tokens that a text must have for one batch, at any offset of the epoch."""
    return (batch_size + 1) * context + 1


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
    tokens: np.ndarray, context: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate once over all text, in order, in windows that do not overlap.

    Yields inputs (B, T) and targets (B, T), all of one shape: the last batch is padded, and its
    padding has the target IGNORE_INDEX.
    """
    text = torch.from_numpy(tokens.astype(np.int64))
    padding = (0, -(len(text) - 1) % (batch_size * context))
    inputs = pad(text[:-1], padding)
    targets = pad(text[1:], padding, value=IGNORE_INDEX)
    # Cut them into batches of windows.
    shape = (-1, batch_size, context)
    return zip(inputs.view(shape), targets.view(shape), strict=True)
