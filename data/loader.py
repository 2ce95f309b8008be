"""Batches are a pure function of (seed, step), so a loader has no state to save or restore."""

import mmap
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from math import isqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

IGNORE_INDEX = -100  # a target that the loss ignores, as in torch's cross_entropy
# Version of the order of rows. A run resumes only with the order that it began with: increase the
# version if a change in this file changes a batch.
ROW_ORDER = 2
ROUNDS = 12  # of the Feistel network; with 6, the order of 4 to 16 rows is measurably nonrandom


class Batch(NamedTuple):
    """Input tokens and the next token of each, as int64 ids."""

    inputs: Tensor  # (B, T)
    targets: Tensor  # (B, T)


class Loader:
    """Cuts concatenated shards into rows of `context` input tokens and their next tokens.

    Each epoch cuts its rows from a new random offset, and visits each row once, in random order.
    Row n of step s is row s * `batch_size` + n, counted across epochs. Raises ValueError if the
    text is too short for one batch.
    """

    def __init__(self, shards: list[np.ndarray], context: int, batch_size: int, seed: int):
        assert all(shard.ndim == 1 for shard in shards)
        # Slicing a memmap takes several times as long as slicing a plain array of the same memory.
        self.shards = [np.asarray(shard) for shard in shards]
        # The end of each shard in the concatenated text.
        self.ends = list(accumulate(len(shard) for shard in shards))
        self.context = context
        self.batch_size = batch_size
        self.seed = seed

        num_tokens = self.ends[-1]
        # The last target needs one more token, and the random offset takes up to one row.
        self.rows_per_epoch = (num_tokens - 1) // context - 1
        if self.rows_per_epoch < batch_size:
            min_tokens = (batch_size + 1) * context + 1
            raise ValueError(
                f"too little text for one batch (have {num_tokens} tokens, need {min_tokens}). "
                "fix: use more text, or a smaller batch_tokens or context"
            )
        for shard in shards:
            advise_random_access(shard)

    def __call__(self, step: int, rows: slice = slice(None)) -> Batch:
        """Return the batch of a step, or only its `rows`."""
        first = step * self.batch_size
        numbers = np.arange(first, first + self.batch_size)[rows]
        tokens = np.stack([self._row(start) for start in self.row_starts(numbers).tolist()])
        assert tokens.shape == (len(numbers), self.context + 1)
        tokens = torch.from_numpy(tokens.astype(np.int64))
        return Batch(inputs=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())

    def num_targets(self, step: int) -> int:
        """Return the number of targets in a batch, over which its loss is averaged."""
        return self.batch_size * self.context

    def row_starts(self, numbers: np.ndarray) -> np.ndarray:
        """Return the position in the text of the first token of each row."""
        epochs, indices = np.divmod(numbers, self.rows_per_epoch)
        starts = np.empty_like(numbers)
        for epoch in np.unique(epochs).tolist():
            generator = np.random.default_rng((self.seed, epoch))
            offset = generator.integers(self.context)
            keys = generator.integers(2**64, size=ROUNDS, dtype=np.uint64)
            is_epoch = epochs == epoch
            rows = shuffle(indices[is_epoch], self.rows_per_epoch, keys)
            starts[is_epoch] = offset + rows * self.context
        return starts

    def _row(self, start: int) -> np.ndarray:
        """Return the tokens (T + 1,) of a row, which may span several shards."""
        index = bisect_right(self.ends, start)  # of the shard that contains the first token
        num_left = self.context + 1
        pieces = []
        while num_left > 0:
            shard = self.shards[index]
            first = start - (self.ends[index] - len(shard))
            piece = shard[first : first + num_left]
            pieces.append(piece)
            start += len(piece)
            num_left -= len(piece)
            index += 1
        return np.concatenate(pieces)


def advise_random_access(shard: np.ndarray) -> None:
    """Turn off the system's read-ahead for a shard, which must begin its memory-mapped file.

    Read-ahead would load megabytes for each row that is not in memory. The rest of the file, which
    may be held out, is still read ahead.
    """
    if isinstance(shard, np.memmap) and hasattr(mmap, "MADV_RANDOM"):
        shard._mmap.madvise(mmap.MADV_RANDOM, 0, shard.offset + shard.nbytes)


def shuffle(indices: np.ndarray, num_rows: int, keys: np.ndarray) -> np.ndarray:
    """Map indices below `num_rows` to their values in a permutation that `keys` determine.

    The permutation is computed instead of stored, so memory does not depend on `num_rows`. A
    Feistel network permutes the numbers below the next square, and values outside the range are
    permuted again until they are inside (Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002).
    """
    assert (indices < num_rows).all()
    side = isqrt(num_rows - 1) + 1
    rows = feistel(indices.astype(np.uint64), side, keys)
    while (is_outside := rows >= num_rows).any():
        rows[is_outside] = feistel(rows[is_outside], side, keys)
    return rows.astype(np.int64)


def feistel(numbers: np.ndarray, side: int, keys: np.ndarray) -> np.ndarray:
    """Permute uint64 numbers below side * side, in one round per key."""
    # A round adds a function of the low digit to the high digit, and swaps them. The low digit is
    # unchanged, so every round is invertible, and the network is a permutation.
    high, low = np.divmod(numbers, side)
    for key in keys:
        high, low = low, (high + random_bits(key, low) % side) % side
    return high * side + low


def random_bits(key: np.uint64, numbers: np.ndarray) -> np.ndarray:
    """Map each number n to 64 random bits: SplitMix64's mix of its state n steps after `key`.

    Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
    """
    bits = key + numbers * 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


def document_ids(inputs: Tensor, bos: int) -> Tensor:
    """Return the index (B, T) of each token's document within its row. BOS begins a document."""
    return (inputs == bos).cumsum(dim=1)


def eval_windows(tokens: np.ndarray, context: int, batch_size: int) -> Iterator[Batch]:
    """Yield all text once, in order, in non-overlapping windows.

    All batches have the same shape: the last one is padded, with IGNORE_INDEX as targets.
    """
    assert tokens.ndim == 1
    text = torch.from_numpy(tokens.astype(np.int64))
    batch_tokens = batch_size * context
    num_targets = len(text) - 1
    num_padding = -num_targets % batch_tokens  # up to a multiple of batch_tokens
    all_inputs = pad(text[:-1], (0, num_padding))
    all_targets = pad(text[1:], (0, num_padding), value=IGNORE_INDEX)

    # Cut inputs and targets into batches of windows.
    shape = (-1, batch_size, context)
    for inputs, targets in zip(all_inputs.view(shape), all_targets.view(shape), strict=True):
        yield Batch(inputs, targets)
