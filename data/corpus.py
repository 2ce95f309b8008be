"""What a run reads: batches to train on, and held-out batches to evaluate on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from data.loader import Loader, eval_windows
from data.slices import slice_means, text_cells
from data.tokenizer import Tokenizer


@dataclass
class Corpus:
    """Token ids of both splits of a text, of training in shards, and their tokenizer.

    `sha256` identifies the tokens: a run resumes on a corpus of the same hash only.
    """

    train: list[np.ndarray]
    validation: np.ndarray
    tokenizer: Tokenizer
    sha256: str
    num_classes = 2  # of targets in an evaluation (data/slices.py)

    @property
    def description(self) -> str:
        """What there is to train on."""
        return f"{sum(map(len, self.train)):,} tokens of text"

    def loader(self, context: int, batch_size: int, seed: int) -> Loader:
        """Return the batches of training. Raises ValueError for too little text."""
        return Loader(self.train, context, batch_size, seed)

    def validation_tokens(self, context: int) -> int:
        """The tokens of an evaluation that reads all there is."""
        return len(self.validation)

    def evaluation(
        self, num_tokens: int, context: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield inputs, targets and the cells of data/slices.py (B, T) of the held-out text.

        Its first `num_tokens` tokens are cut into windows that do not overlap.
        """
        tokens = self.validation[:num_tokens]
        for inputs, targets in eval_windows(tokens, context, batch_size):
            yield inputs, targets, text_cells(inputs, targets)

    def metrics(self, totals: np.ndarray, num_tokens: int) -> dict:
        """Metrics of an evaluation of `num_tokens` tokens, from its totals per cell.

        The totals (3, num_classes, NUM_BINS) are nats, correct predictions and targets.
        """
        nats, _, targets = totals
        num_bytes = self.tokenizer.nbytes(self.validation[:num_tokens])
        bits_per_byte = None
        if num_bytes is not None:
            bits_per_byte = nats.sum() / math.log(2) / num_bytes
        return {
            "val_loss": nats.sum() / targets.sum(),
            "val_bpb": bits_per_byte,
            "slices": slice_means(nats, targets, ("new", "repeated"), "position", "loss"),
        }
