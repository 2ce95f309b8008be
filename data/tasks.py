"""Synthetic tasks that show what an attention can look up; rows are made from the seed, no files.

A task counts the loss of its answers only. Rows of several sizes take turns in a batch, and an
evaluation has the accuracy for each size, and for each distance from an answer to its source.
"""

import json
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from data.corpus import Corpus
from data.loader import IGNORE_INDEX
from data.slices import cells, slice_means
from data.sources import Documents, Source
from data.tokenizer import IdTokenizer

BOS = 0  # begins each row
VALIDATION_ROWS = 512  # of all sizes together
VALIDATION_SEED = 2**32 - 1  # of rows that no run trains on


@dataclass(kw_only=True)
class Task(Source):
    """Rows of ids below `vocab_size`, in which something is asked that the row itself answers.

    Raises ValueError for rows that do not fit into `context` tokens.
    """

    context: int
    tokenizer: str | None = None

    def __post_init__(self):
        if self.tokenizer is not None:
            raise ValueError(
                f"{self.name} is made of ids and has no tokenizer (data.tokenizer="
                f"{self.tokenizer}). fix: leave it out"
            )
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(
                f"data.{self.size_key} must be whole numbers of at least 1 (got {self.sizes}). "
                f"fix: data.{self.size_key}=[4,8]"
            )
        largest = max(self.sizes)
        if self.min_context(largest) > self.context:
            raise ValueError(
                f"{largest} {self.size_key} need {self.min_context(largest)} tokens "
                f"(context={self.context}). fix: context={self.min_context(largest)}, "
                f"or a smaller data.{self.size_key}"
            )

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    @abstractmethod
    def size_key(self) -> str:
        """The name of the config key that lists the sizes."""

    @property
    def sizes(self) -> list[int]:
        """How many answers the rows have."""
        return getattr(self, self.size_key)

    @abstractmethod
    def min_context(self, size: int) -> int:
        """Tokens that a row with so many answers needs."""

    @abstractmethod
    def row(
        self, generator: np.random.Generator, context: int, size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw inputs, and the targets and distances of `size` answers; all (context,), int64.

        Where there is no answer, the target is IGNORE_INDEX and the distance 1.
        """

    def rows(self, seed: int, numbers: range, context: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw rows by seed and number -> inputs, targets and cells (B, T), int64."""
        inputs, targets, distances, classes = [], [], [], []
        for number in numbers:
            index = number % len(self.sizes)
            generator = np.random.default_rng((seed, number))
            row = self.row(generator, context, self.sizes[index])
            inputs.append(row[0])
            targets.append(row[1])
            distances.append(row[2])
            classes.append(index)
        inputs, targets, distances = map(stacked, (inputs, targets, distances))
        return inputs, targets, cells(torch.tensor(classes)[:, None], distances)

    # What a source has

    def corpus(self) -> "TaskCorpus":
        proto = IdTokenizer.MAGIC + f"{self.vocab_size} {BOS}\n".encode()
        fingerprint = sha256(self.fingerprint().encode()).hexdigest()
        return TaskCorpus([], [], None, IdTokenizer(proto), fingerprint, self)

    def fingerprint(self) -> str:
        return json.dumps([self.name, vars(self)])

    def documents(self) -> Documents:
        """Yield nothing: a task is no text."""
        return iter(())


def stacked(rows: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(rows))


@dataclass(kw_only=True)
class Recall(Task):
    """Multi-query associative recall: Arora et al., Zoology, 2312.04927, appendix C.1.

    A row begins with `pairs` keys, each followed by its value. Later each key comes once more, and
    the value is asked for. Of the places for these, the i-th is drawn with a weight of i to the
    `power` - 1. All other tokens are values that belong to no key.
    """

    pairs: list[int]
    power: float
    size_key = "pairs"

    def __post_init__(self):
        super().__post_init__()
        if self.num_keys < max(self.pairs):
            raise ValueError(
                f"{max(self.pairs)} pairs need as many keys (data.vocab_size={self.vocab_size} has "
                f"{self.num_keys}). fix: data.vocab_size={2 * max(self.pairs) + 2}"
            )

    @property
    def num_keys(self) -> int:
        """Keys are the ids from 1 on, and values the upper half of the vocabulary."""
        return self.vocab_size // 2 - 1

    def min_context(self, size: int) -> int:
        return 1 + 4 * size

    def row(
        self, generator: np.random.Generator, context: int, size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        keys = 1 + generator.choice(self.num_keys, size, replace=False)
        inputs = generator.integers(self.num_keys + 1, self.vocab_size, context)
        targets = np.full(context, IGNORE_INDEX)
        distances = np.ones(context, dtype=np.int64)

        # BOS, then the pairs; their values have been drawn.
        inputs[0] = BOS
        key_positions = 1 + 2 * np.arange(size)
        inputs[key_positions] = keys
        values = inputs[key_positions + 1]

        # The queries, at places of two tokens each. The input after a query is not its answer.
        first = 1 + 2 * size
        num_places = (context - first) // 2
        weights = np.arange(1, num_places + 1) ** (self.power - 1)
        places = generator.choice(num_places, size, replace=False, p=weights / weights.sum())
        query_positions = first + 2 * places
        inputs[query_positions] = keys
        targets[query_positions] = values
        distances[query_positions] = query_positions - key_positions
        return inputs, targets, distances


@dataclass(kw_only=True)
class Copy(Task):
    """Selective copying: Gu and Dao, Mamba, 2312.00752, section 4.1.1.

    `copied` tokens are scattered over a row of blanks, and are asked for in their order by as many
    marks at its end. Unlike recall it asks by order and not by content.
    """

    copied: list[int]
    size_key = "copied"

    def min_context(self, size: int) -> int:
        return 1 + 2 * size

    def row(
        self, generator: np.random.Generator, context: int, size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # Ids: BOS, the blank, the mark, and what is copied.
        blank, mark, first_token = 1, 2, 3
        inputs = np.full(context, blank)
        targets = np.full(context, IGNORE_INDEX)
        distances = np.ones(context, dtype=np.int64)

        inputs[0] = BOS
        sources = 1 + generator.choice(context - 1 - size, size, replace=False)
        sources.sort()
        tokens = generator.integers(first_token, self.vocab_size, size)
        inputs[sources] = tokens
        marks = np.arange(context - size, context)
        inputs[marks] = mark
        targets[marks] = tokens
        distances[marks] = marks - sources
        return inputs, targets, distances


class TaskLoader:
    """Batches of a task as a function of (seed, step), like those of data.loader.Loader."""

    rows_per_epoch = math.inf  # no row comes twice

    def __init__(self, task: Task, *, context: int, batch_size: int, seed: int):
        self.task = task
        self.context = context
        self.batch_size = batch_size
        self.seed = seed

    def __call__(self, step: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return inputs (B, T) and targets (B, T), int64, of these rows of a batch."""
        numbers = self._row_numbers(step)[rows]
        inputs, targets, _ = self.task.rows(self.seed, numbers, self.context)
        return inputs, targets

    def num_targets(self, step: int) -> int:
        """The answers of a batch."""
        sizes = self.task.sizes
        return sum(sizes[number % len(sizes)] for number in self._row_numbers(step))

    def describe(self, step: int) -> str:
        """Name, for a message, the rows of a batch."""
        numbers = self._row_numbers(step)
        return f"the rows {numbers.start} to {numbers.stop - 1} of {self.task.name}"

    def _row_numbers(self, step: int) -> range:
        first = step * self.batch_size
        return range(first, first + self.batch_size)


@dataclass
class TaskCorpus(Corpus):
    """A task in place of a text."""

    task: Task

    @property
    def num_classes(self) -> int:
        return len(self.task.sizes)

    @property
    def description(self) -> str:
        return f"{self.task.name} of {self.task.sizes} {self.task.size_key}"

    def loader(self, context: int, batch_size: int, seed: int) -> TaskLoader:
        return TaskLoader(self.task, context=context, batch_size=batch_size, seed=seed)

    def validation_tokens(self, context: int) -> int:
        return VALIDATION_ROWS * context

    def evaluation(
        self, num_tokens: int, context: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield inputs, targets and the cells of data/slices.py (B, T) of rows never trained on.

        There are about `num_tokens` tokens in whole batches, and at least a row of each size.
        """
        num_rows = max(num_tokens // context, len(self.task.sizes))
        num_batches = math.ceil(num_rows / batch_size)
        for first in range(0, num_batches * batch_size, batch_size):
            numbers = range(first, first + batch_size)
            yield self.task.rows(VALIDATION_SEED, numbers, context)

    def metrics(self, totals: np.ndarray, num_tokens: int) -> dict:
        """The loss of answers, and accuracies: of each size, of their mean, and by distance."""
        nats, correct, targets = totals
        sizes = tuple(map(str, self.task.sizes))
        slices = slice_means(correct, targets, sizes, "distance", "accuracy")
        accuracies = {size: slices.pop(size)["accuracy"] for size in sizes}
        key = f"{self.task.name}_accuracy"
        return {
            "val_loss": nats.sum() / targets.sum(),
            "val_bpb": None,
            key: sum(accuracies.values()) / len(accuracies),
            **{f"{key}_{size}": value for size, value in accuracies.items()},
            "slices": slices,
        }
