"""Synthetic tasks that show what a mixer can look up or keep track of; rows come from the seed.

A task counts the loss of its answers only. The size of a row is its number of answers; the
configured sizes alternate from row to row. An evaluation reports the accuracy for each size, and
for each distance from an answer to its source. `Task.floor` is what needs no mixer.
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.corpus import Corpus
from data.loader import IGNORE_INDEX
from data.prepare import Source, text_hash
from data.slices import cells
from data.tokenizer import IdTokenizer

VALIDATION_ROWS = 512  # of all sizes together


class Row(NamedTuple):
    """A row of a task, and its A answers; all int64."""

    inputs: np.ndarray  # (T,)
    positions: np.ndarray  # (A,), of the tokens after which an answer is due
    answers: np.ndarray  # (A,)
    distances: np.ndarray  # (A,), from the source of the answer to it, in tokens


@dataclass(kw_only=True)
class Task(Source):
    """Rows of `context` ids below `vocab_size`, with questions that the row itself answers.

    The last id is BOS, which begins a prompt and stands in no row. Raises ValueError for rows that
    do not fit.
    """

    context: int
    tokenizer: None = field(init=False, default=None)
    is_endless = True
    length_name = "distance"  # of the slices

    def __post_init__(self):
        # The largest rows say whether all fit.
        try:
            self.row(np.random.default_rng(0), max(self.sizes))
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
    def row(self, generator: np.random.Generator, size: int) -> Row:
        """Draw a row with `size` answers."""

    def rows(self, seed: int, numbers: range, is_held_out: bool = False) -> tuple[Tensor, ...]:
        """Draw rows by their numbers.

        Returns inputs (B, T), answers (B, A), the cells of data/slices.py (B, A), and where in
        inputs.flatten() the answers are due (B A,). A is the largest size: rows with fewer answers
        are padded with IGNORE_INDEX.
        """
        inputs = np.empty((len(numbers), self.context), np.int64)
        # Positions, answers and distances, and what stands for them where a row has fewer.
        padding = [[[0]], [[IGNORE_INDEX]], [[1]]]
        padded = np.full((3, len(numbers), max(self.sizes)), padding)
        for index, number in enumerate(numbers):
            # Rows that are held out come from streams of their own, whatever the seed.
            generator = np.random.default_rng((seed, number, int(is_held_out)))
            size = self.size_of(number)
            inputs[index], *columns = self.row(generator, size)
            padded[:, index, :size] = columns
        positions, targets, distances = torch.from_numpy(padded)
        positions += self.context * torch.arange(len(numbers))[:, None]
        classes = torch.tensor(numbers) % len(self.sizes)
        row_cells = cells(classes[:, None], distances)
        return torch.from_numpy(inputs), targets, row_cells, positions.flatten()

    def size_of(self, number: int) -> int:
        """Return the number of answers of a row."""
        return self.sizes[number % len(self.sizes)]

    def floor(self) -> float:
        """The accuracy of giving the most frequent answer of a row to all of its questions.

        It is that of the held-out rows, averaged over sizes as the accuracy of a model is.
        """
        _, targets, _, _ = self.rows(0, range(VALIDATION_ROWS), is_held_out=True)
        accuracies = []
        for row in targets.numpy():
            counts = np.bincount(row[row != IGNORE_INDEX])
            accuracies.append(counts.max() / counts.sum())
        num_sizes = len(self.sizes)
        return fmean(fmean(accuracies[first::num_sizes]) for first in range(num_sizes))

    def corpus(self) -> "TaskCorpus":
        tokenizer = IdTokenizer(self.vocab_size, self.vocab_size - 1)
        return TaskCorpus([], np.empty(0), tokenizer, text_hash(self.identity()), self)

    @property
    def name(self) -> str:
        return type(self).__name__.lower()


@dataclass(kw_only=True)
class Recall(Task):
    """Multi-query associative recall: Arora et al., Zoology, 2312.04927, appendix C.1.

    A row begins with keys, each followed by its value. Later each key comes once more, as a query,
    and its value is the answer. Slots for queries are drawn without replacement, the i-th with a
    probability proportional to i^(power - 1). All other tokens are 0. Keys are drawn without
    replacement from the lower half of the vocabulary, and values from the upper half.
    """

    pairs: list[int]
    power: float

    def __post_init__(self):
        if len({*self.pairs}) < len(self.pairs):
            raise ValueError(f"a number comes twice (got {self.pairs}). fix: leave data.pairs out")
        super().__post_init__()

    @property
    def sizes(self) -> list[int]:
        return self.pairs

    def row(self, generator: np.random.Generator, size: int) -> Row:
        inputs = np.zeros(self.context, np.int64)

        # The pairs. Of either half, one id is used otherwise: 0 and BOS.
        half = self.vocab_size // 2
        keys = 1 + generator.choice(half - 1, size, replace=False)
        values = half + generator.choice(half - 1, size, replace=False)
        first = 2 * size
        inputs[0:first:2] = keys
        inputs[1:first:2] = values

        # The queries, in slots of two tokens each. The input after a query is not its answer.
        num_slots = (self.context - first) // 2
        weights = np.arange(1, num_slots + 1) ** (self.power - 1)
        slots = generator.choice(num_slots, size, replace=False, p=weights / weights.sum())
        queries = first + 2 * slots
        inputs[queries] = keys
        return Row(inputs, queries, values, queries - 2 * np.arange(size))


@dataclass(kw_only=True)
class Track(Task):
    """State tracking, the word problem of S_n: Merrill et al., 2404.08819.

    Each token is a permutation of `elements` things, by its lexicographic number. The answer after
    it is the permutation that all tokens so far amount to, one applied after the other. That of
    two things is the parity of the swaps.
    """

    elements: int
    length_name = "length"

    @property
    def sizes(self) -> list[int]:
        return [self.context]

    def row(self, generator: np.random.Generator, size: int) -> Row:
        if math.factorial(self.elements) >= self.vocab_size:
            raise ValueError("too few ids")
        permutations = permutations_of(self.elements)
        inputs = generator.integers(len(permutations), size=size)
        states = itertools.accumulate(permutations[inputs], lambda state, step: step[state])

        # The elements of a permutation are digits of a number, which grows with its own number.
        digits = self.elements ** np.arange(self.elements)[::-1]
        answers = np.searchsorted(permutations @ digits, np.stack([*states]) @ digits)
        positions = np.arange(size)
        return Row(inputs, positions, answers, positions + 1)


@lru_cache
def permutations_of(elements: int) -> np.ndarray:
    """All permutations (elements!, elements), in lexicographic order."""
    return np.array([*itertools.permutations(range(elements))])


@dataclass
class TaskLoader:
    """Batches of a task as a function of (seed, step), like those of data.loader.Loader."""

    task: Task
    batch_size: int
    seed: int
    rows_per_epoch = math.inf  # no row comes twice

    def __call__(self, step: int, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        """Return inputs, targets and positions, as Task.rows has them, of these rows of a batch."""
        inputs, targets, _, positions = self.task.rows(self.seed, self.row_numbers(step)[rows])
        return inputs, targets, positions

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
    def class_names(self) -> tuple[str, ...]:
        """The class of an answer is the size of its row."""
        return tuple(str(size) for size in self.task.sizes)

    @property
    def length_name(self) -> str:
        return self.task.length_name

    @property
    def task_name(self) -> str:
        return self.task.name

    @property
    def description(self) -> str:
        return f"{self.task.name} of {self.task.sizes}"

    def loader(self, context: int, batch_size: int, seed: int) -> TaskLoader:
        return TaskLoader(self.task, batch_size, seed)

    def validation_tokens(self, context: int) -> int:
        return VALIDATION_ROWS * context

    def evaluation(
        self, num_tokens: int, context: int, batch_size: int
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield batches of Task.rows that no run trains on, with a row of each size at least.

        The last batch is filled up with rows whose answers do not count.
        """
        num_rows = max(num_tokens // context, self.num_classes)
        for first in range(0, num_rows, batch_size):
            numbers = range(first, first + batch_size)
            batch = self.task.rows(0, numbers, is_held_out=True)
            batch[1][num_rows - first :] = IGNORE_INDEX
            yield batch
