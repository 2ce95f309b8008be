"""Synthetic tasks that show what an attention can look up; rows are made from the seed, no files.

A task counts the loss of its answers only. The size of a row is its number of answers; the
configured sizes alternate from row to row. An evaluation reports the accuracy for each size, and
for each distance from an answer to its source.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from data.corpus import Corpus
from data.loader import IGNORE_INDEX, Batch
from data.prepare import Source, text_hash
from data.slices import cells, slice_means
from data.tokenizer import IdTokenizer

BOS = 0  # begins each row
VALIDATION_ROWS = 512  # of all sizes together


class Row(NamedTuple):
    """Inputs, targets, and how far before each answer its source is; all (T,) int64."""

    inputs: np.ndarray
    targets: np.ndarray  # IGNORE_INDEX where there is no answer
    distances: np.ndarray  # 1 where there is no answer


@dataclass(kw_only=True)
class Task(Source):
    """Rows of ids below `vocab_size`, with questions that the row itself answers.

    Raises ValueError for rows that do not fit into `context` tokens.
    """

    context: int
    tokenizer: None = field(init=False, default=None)
    is_endless = True

    def __post_init__(self):
        # The largest rows say whether all fit.
        try:
            self.row(np.random.default_rng(0), self.context, max(self.sizes))
        except (ValueError, IndexError):
            raise ValueError(
                f"rows with answers {self.sizes} do not fit (context={self.context}, "
                f"data.vocab_size={self.vocab_size}). fix: more of these, or fewer answers"
            ) from None

    @property
    @abstractmethod
    def sizes(self) -> list[int]:
        """The numbers of answers in a row: row n has sizes[n % len(sizes)]."""

    @abstractmethod
    def row(self, generator: np.random.Generator, context: int, size: int) -> Row:
        """Draw a row of `context` tokens with `size` answers."""

    def rows(
        self, seed: int, numbers: range, context: int, is_held_out: bool = False
    ) -> list[Tensor]:
        """Draw rows by their numbers -> inputs, targets and cells of data/slices.py (B, T)."""
        rows = []
        for number in numbers:
            # Rows that are held out come from streams of their own, whatever the seed.
            generator = np.random.default_rng((seed, number, int(is_held_out)))
            rows.append(self.row(generator, context, self.size_of(number)))
        inputs, targets, distances = default_collate(rows)
        classes = torch.tensor(numbers) % len(self.sizes)
        return [inputs, targets, cells(classes[:, None], distances)]

    def size_of(self, number: int) -> int:
        """Return the number of answers of a row."""
        return self.sizes[number % len(self.sizes)]

    def corpus(self) -> "TaskCorpus":
        tokenizer = IdTokenizer(self.vocab_size, BOS)
        return TaskCorpus([], np.empty(0), tokenizer, text_hash(self.identity()), self)

    @property
    def name(self) -> str:
        return type(self).__name__.lower()


@dataclass(kw_only=True)
class Recall(Task):
    """Multi-query associative recall: Arora et al., Zoology, 2312.04927, appendix C.1.

    A row begins with keys, each followed by its value. Later each key comes once more, as a query,
    and its value is the target. Slots for queries are drawn without replacement, the i-th with a
    probability proportional to i^(power - 1). All other tokens are random values. Keys are the ids
    from 1 on, and values the upper half of the vocabulary.
    """

    pairs: list[int]
    power: float

    @property
    def sizes(self) -> list[int]:
        return self.pairs

    def row(self, generator: np.random.Generator, context: int, size: int) -> Row:
        num_keys = self.vocab_size // 2 - 1
        row = empty_row(generator.integers(num_keys + 1, self.vocab_size, context))

        # BOS, then the pairs; their values have been drawn.
        keys = 1 + generator.choice(num_keys, size, replace=False)
        key_positions = 1 + 2 * np.arange(size)
        row.inputs[key_positions] = keys

        # The queries, in slots of two tokens each. The input after a query is not its answer.
        first = 1 + 2 * size
        num_slots = (context - first) // 2
        weights = np.arange(1, num_slots + 1) ** (self.power - 1)
        slots = generator.choice(num_slots, size, replace=False, p=weights / weights.sum())
        queries = first + 2 * slots
        row.inputs[queries] = keys
        row.targets[queries] = row.inputs[key_positions + 1]
        row.distances[queries] = queries - key_positions
        return row


@dataclass(kw_only=True)
class Copy(Task):
    """Selective copying: Gu and Dao, Mamba, 2312.00752, section 4.1.1.

    Tokens are scattered over a row of blanks. As many marks at its end ask for them, in order.
    Unlike in recall, a token is looked up by its order and not by its content.
    """

    copied: list[int]

    @property
    def sizes(self) -> list[int]:
        return self.copied

    def row(self, generator: np.random.Generator, context: int, size: int) -> Row:
        # Ids: 0 is BOS, then come the blank, the mark and the tokens to copy.
        blank = 1
        mark = 2
        first_token = 3
        row = empty_row(np.full(context, blank))
        marks = np.arange(context - size, context)
        sources = 1 + generator.choice(context - 1 - size, size, replace=False)
        sources.sort()
        row.inputs[marks] = mark
        row.inputs[sources] = generator.integers(first_token, self.vocab_size, size)
        row.targets[marks] = row.inputs[sources]
        row.distances[marks] = marks - sources
        return row


def empty_row(inputs: np.ndarray) -> Row:
    """A row with these inputs after BOS, and without any answers yet."""
    inputs[0] = BOS
    return Row(inputs, np.full_like(inputs, IGNORE_INDEX), np.ones_like(inputs))


@dataclass
class TaskLoader:
    """Batches of a task as a function of (seed, step), like those of data.loader.Loader."""

    task: Task
    context: int
    batch_size: int
    seed: int
    rows_per_epoch = math.inf  # no row comes twice

    def __call__(self, step: int, rows: slice = slice(None)) -> Batch:
        """Return inputs (B, T) and targets (B, T), int64, of these rows of a batch."""
        inputs, targets, _ = self.task.rows(self.seed, self.row_numbers(step)[rows], self.context)
        return inputs, targets

    def num_targets(self, step: int) -> int:
        """The answers of a batch."""
        return sum(map(self.task.size_of, self.row_numbers(step)))

    def row_numbers(self, step: int) -> range:
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
        return f"{self.task.name} of {self.task.sizes}"

    def loader(self, context: int, batch_size: int, seed: int) -> TaskLoader:
        return TaskLoader(self.task, context, batch_size, seed)

    def validation_tokens(self, context: int) -> int:
        return VALIDATION_ROWS * context

    def evaluation(
        self, num_tokens: int, context: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield batches of Task.rows that no run trains on, with a row of each size at least.

        The last batch is filled up with rows whose answers do not count.
        """
        num_rows = max(num_tokens // context, self.num_classes)
        for first in range(0, num_rows, batch_size):
            numbers = range(first, first + batch_size)
            inputs, targets, row_cells = self.task.rows(0, numbers, context, is_held_out=True)
            targets[num_rows - first :] = IGNORE_INDEX
            yield inputs, targets, row_cells

    def metrics(self, totals: np.ndarray, num_tokens: int) -> dict:
        """The loss of answers, and accuracies: of each size, of their mean, and by distance."""
        nats, correct, targets = totals
        sizes = tuple(map(str, self.task.sizes))
        slices = slice_means(correct, targets, sizes, "distance", "accuracy")
        key = f"{self.task.name}_accuracy"
        accuracies = {f"{key}_{size}": slices.pop(size)["accuracy"] for size in sizes}
        return {
            "val_loss": nats.sum() / targets.sum(),
            "val_bpb": None,
            key: sum(accuracies.values()) / len(accuracies),
            **accuracies,
            "slices": slices,
        }
