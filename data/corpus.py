"""What a run reads: batches to train on, and held-out batches to evaluate on."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from data.loader import Loader, eval_windows
from data.slices import text_cells
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

    # Names for the cells of targets (data/slices.py), as metrics show them.
    class_names = ("new", "repeated")
    length_name = "position"
    task_name = None  # a text is no task

    @property
    def num_classes(self) -> int:
        """Number of classes of targets in an evaluation."""
        return len(self.class_names)

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

    def validation_bytes(self, num_tokens: int) -> int | None:
        """UTF-8 bytes of the first `num_tokens` held-out tokens; None if their text is unknown."""
        return self.tokenizer.nbytes(self.validation[:num_tokens])
