"""Batches as a pure function of (seed, step): a run resumes at the right place from its step."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

IGNORE_INDEX = -100  # a target that the loss ignores, as in torch's cross_entropy


class Batch(NamedTuple):
    """Input tokens and the next token of each, as int64 ids."""

    inputs: Tensor  # (B, T)
    targets: Tensor  # (B, T)


class Loader:
    """Cuts concatenated shards into rows of `context` input tokens and their next tokens.

    An epoch cuts its rows from a random offset on, and visits each row once in random order. Row n
    of step s is row s * `batch_size` + n, counted across epochs. Raises ValueError if the text
    is too short for one batch.
    """

    def __init__(self, shards: list[np.ndarray], context: int, batch_size: int, seed: int):
        assert all(shard.ndim == 1 for shard in shards)
        self.shards = shards
        self.context = context
        self.batch_size = batch_size
        self.seed = seed

        num_tokens = sum(len(shard) for shard in shards)
        # The last target needs one more token, and the random offset takes up to one row.
        self.rows_per_epoch = (num_tokens - 1) // context - 1
        if self.rows_per_epoch < batch_size:
            min_tokens = (batch_size + 1) * context + 1
            raise ValueError(
                f"too little text for one batch (have {num_tokens} tokens, need {min_tokens}). "
                "fix: more text, or a smaller batch_tokens or context"
            )

    def __call__(self, step: int, rows: slice = slice(None)) -> Batch:
        """Return the batch of a step, or only its `rows`."""
        first = step * self.batch_size
        numbers = range(first, first + self.batch_size)[rows]
        tokens = np.stack([self._row(number) for number in numbers])
        assert tokens.shape == (len(numbers), self.context + 1)
        tokens = torch.from_numpy(tokens.astype(np.int64))
        return Batch(inputs=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())

    def num_targets(self, step: int) -> int:
        """Number of targets in a batch, over which its loss is averaged."""
        return self.batch_size * self.context

    def _row(self, number: int) -> np.ndarray:
        """Return the tokens (T + 1,) of a row, which may span several shards."""
        epoch, index = divmod(number, self.rows_per_epoch)
        offset, order = epoch_rows(self.seed, epoch, self.context, self.rows_per_epoch)
        start = offset + int(order[index]) * self.context

        # Count start and end from the beginning of each shard in turn. A negative start lies in an
        # earlier shard, an end past the length of the shard in a later one.
        end = start + self.context + 1
        pieces = []
        for shard in self.shards:
            if end > 0:
                pieces.append(shard[max(0, start) : end])
            start -= len(shard)
            end -= len(shard)
        return np.concatenate(pieces)


@lru_cache(maxsize=1)
def epoch_rows(seed: int, epoch: int, context: int, num_rows: int) -> tuple[int, np.ndarray]:
    """Draw the offset of the first row of an epoch, below `context`, and the order of its rows."""
    generator = np.random.default_rng((seed, epoch))
    offset = int(generator.integers(context))
    return offset, generator.permutation(num_rows)


def document_ids(inputs: Tensor, bos: int) -> Tensor:
    """inputs (B, T) -> the index (B, T) of each token's document in its row; BOS begins one."""
    return (inputs == bos).cumsum(dim=1)


def eval_windows(tokens: np.ndarray, context: int, batch_size: int) -> Iterator[Batch]:
    """Iterate once over all text, in order, in non-overlapping windows.

    All batches have the same shape: the last one is padded, with IGNORE_INDEX as targets.
    """
    assert tokens.ndim == 1
    text = torch.from_numpy(tokens.astype(np.int64))
    batch_tokens = batch_size * context
    num_targets = len(text) - 1
    num_padding = -num_targets % batch_tokens  # up to a multiple of batch_tokens
    all_inputs = pad(text[:-1], (0, num_padding))
    all_targets = pad(text[1:], (0, num_padding), value=IGNORE_INDEX)

    # Cut them into batches of windows.
    shape = (-1, batch_size, context)
    for inputs, targets in zip(all_inputs.view(shape), all_targets.view(shape), strict=True):
        yield Batch(inputs, targets)
