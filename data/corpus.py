"""A corpus provides batches for training, and held-out batches for evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from data.loader import ROW_ORDER, Loader, eval_windows
from data.slices import text_cells
from data.tokenizer import Tokenizer


class EvaluationBatch(NamedTuple):
    """A batch of held-out text or of task rows, with the cell (data/slices.py) of each target."""

    inputs: Tensor  # (B, T)
    targets: Tensor  # (B, T), or (B, A) for the A answers of a task
    cells: Tensor  # (B, T) or (B, A)
    # (B A,), positions in inputs.flatten() where targets are predicted; None: at every token.
    positions: Tensor | None = None


@dataclass
class Corpus:
    """The token ids of a text's training and validation splits, and their tokenizer.

    `train` is a list of shards. `sha256` identifies the tokens: a run resumes only on a corpus with
    the same hash.
    """

    train: list[np.ndarray]
    validation: np.ndarray
    tokenizer: Tokenizer
    sha256: str

    # The names that metrics use for the classes and the lengths of targets (data/slices.py).
    class_names = ("new", "repeated")
    length_name = "position"
    task_name = None  # a text is not a task

    @property
    def num_classes(self) -> int:
        """Number of classes of targets in an evaluation."""
        return len(self.class_names)

    @property
    def identity(self) -> dict[str, str | int]:
        """The values that a checkpoint saves and that must be the same when the run resumes."""
        return {"text": self.sha256, "row_order": ROW_ORDER}

    @property
    def description(self) -> str:
        """The amount of training data, for the summary of a run."""
        num_tokens = sum(len(shard) for shard in self.train)
        return f"{num_tokens:,} tokens of text"

    def with_context(self, context: int) -> "Corpus":
        """Return the corpus for another context, which only a task depends on."""
        return self

    def loader(self, context: int, batch_size: int, seed: int) -> Loader:
        """Return the training batches. Raises ValueError if the text is too short."""
        return Loader(self.train, context, batch_size, seed)

    def validation_tokens(self, context: int) -> int:
        """Return the number of tokens in an evaluation on all held-out data."""
        return len(self.validation)

    def evaluation(
        self, num_tokens: int, context: int, batch_size: int
    ) -> Iterator[EvaluationBatch]:
        """Yield the first `num_tokens` held-out tokens in non-overlapping windows."""
        tokens = self.validation[:num_tokens]
        for inputs, targets in eval_windows(tokens, context, batch_size):
            yield EvaluationBatch(inputs, targets, text_cells(inputs, targets))

    def validation_bytes(self, num_tokens: int) -> int | None:
        """Return the UTF-8 bytes of the first `num_tokens` held-out tokens; None if unknown."""
        return self.tokenizer.nbytes(self.validation[:num_tokens])
