"""Batches as a pure function of (seed, step): a run's place in its data is one integer."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

IGNORE_INDEX = -100  # a target that does not count, as in torch's cross_entropy


class Loader:
    """Rows of `context` tokens and the one after each, from shards laid end to end.

    An epoch cuts the text into rows at an offset of its own and visits each once, in an order of its own.
    Raises ValueError where the text has not one row for the batch.
    """

    def __init__(self, shards: list[np.ndarray], *, context: int, batch: int, seed: int):
        self.shards, self.context, self.batch, self.seed = shards, context, batch, seed
        self.ends = np.cumsum([len(shard) for shard in shards])
        self.rows = (int(self.ends[-1]) - 1) // context - 1  # one less, so that every offset fits
        self.epoch, self.order = -1, None
        check_enough_tokens(int(self.ends[-1]), context, batch)

    def __call__(self, step: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """inputs (B, T) and targets (B, T) of these rows of the batch, int64, one position apart."""
        numbers = range(step * self.batch, (step + 1) * self.batch)[rows]
        taken = np.stack([self._take(self._start(number), self.context + 1) for number in numbers])
        taken = torch.from_numpy(taken.astype(np.int64))
        return taken[:, :-1].contiguous(), taken[:, 1:].contiguous()

    def describe(self, step: int) -> str:
        """Where the rows of a batch lie, for a reader."""
        starts = [
            self._start(number) for number in range(step * self.batch, (step + 1) * self.batch)
        ]
        some = ", ".join(map(str, starts[:8])) + (" and so on" if len(starts) > 8 else "")
        return (
            f"{self.batch} rows of epoch {step * self.batch // self.rows}, from the tokens {some}"
        )

    def _start(self, number: int) -> int:
        epoch, row = divmod(number, self.rows)
        if epoch != self.epoch:
            draw = np.random.default_rng((self.seed, epoch))
            self.epoch, self.offset, self.order = (
                epoch,
                int(draw.integers(self.context)),
                draw.permutation(self.rows),
            )
        return self.offset + int(self.order[row]) * self.context

    def _take(self, start: int, count: int) -> np.ndarray:
        shard = int(np.searchsorted(self.ends, start, side="right"))
        at = start - (int(self.ends[shard]) - len(self.shards[shard]))
        piece = self.shards[shard][at : at + count]
        return (
            piece
            if len(piece) == count
            else np.concatenate((piece, self._take(start + len(piece), count - len(piece))))
        )


def check_enough_tokens(tokens: int, context: int, batch: int) -> None:
    need = (batch + 1) * context + 1
    if tokens < need:
        fix = "more text, or a smaller batch_tokens or context"
        raise ValueError(
            f"too little text for one batch (have {tokens} tokens, need {need}). fix: {fix}"
        )


def document_ids(inputs: Tensor, bos: int) -> Tensor:
    """inputs (B, T) -> the number (B, T) of the document that a token belongs to, in its row: each begins with BOS."""
    return (inputs == bos).cumsum(dim=1)


def eval_windows(
    shards: list[np.ndarray], context: int, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """All text once, in order, in windows that do not overlap: inputs (B, T) and targets (B, T).

    The last batch is as large as the others: what is missing has the target IGNORED.
    """
    text = np.concatenate(shards).astype(np.int64)
    count = -(-(len(text) - 1) // (context * batch)) * batch
    inputs, targets = (
        np.zeros(count * context, np.int64),
        np.full(count * context, IGNORE_INDEX, np.int64),
    )
    inputs[: len(text) - 1], targets[: len(text) - 1] = text[:-1], text[1:]
    pairs = (torch.from_numpy(x).view(count, context).split(batch) for x in (inputs, targets))
    return zip(*pairs, strict=True)
