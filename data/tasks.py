"""A synthetic task that tests recall; the seed determines the rows.

Only the answers of a task count toward its loss. The size of a row is its number of answers; the
configured sizes alternate from row to row. An evaluation reports the accuracy for each size, and
for ranges of the distance between an answer and its source. `Task.floor` is the accuracy of
answering all queries of a row with its most frequent answer.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Annotated, NamedTuple

import numpy as np
import torch
from annotated_types import MinLen
from torch import Tensor

from data.corpus import Corpus, EvaluationBatch
from data.loader import IGNORE_INDEX
from data.prepare import Source, text_hash
from data.slices import cells
from data.tokenizer import IdTokenizer
from run.ranges import NonNegativeFloat, PositiveInt

VALIDATION_ROWS = 512  # total over all sizes


class Row(NamedTuple):
    """A row of a task, and its A answers. All arrays are int64."""

    inputs: np.ndarray  # (T,)
    positions: np.ndarray  # (A,), positions of the tokens before the answers
    answers: np.ndarray  # (A,)
    distances: np.ndarray  # (A,), in tokens, from the source of each answer to the answer


class TaskBatch(NamedTuple):
    """B training rows of a task, each with up to A answers. All tensors are int64."""

    inputs: Tensor  # (B, T)
    targets: Tensor  # (B, A), the answers; shorter rows are padded with IGNORE_INDEX
    positions: Tensor  # (B A,), positions of the tokens before the answers in inputs.flatten()


@dataclass(kw_only=True)
class Task(Source):
    """A task. A row has `context` ids below `vocab_size`, from which its answers can be computed.

    The last id is BOS, which begins a prompt and occurs in no row. Raises ValueError if a row does
    not fit.
    """

    context: PositiveInt
    tokenizer: None = field(init=False, default=None)
    is_endless = True

    def __post_init__(self):
        # If a row of the largest size fits, all rows do.
        try:
            self.row(np.random.default_rng(0), max(self.sizes))
        except (ValueError, IndexError):
            raise ValueError(
                f"rows with {max(self.sizes)} answers do not fit (context={self.context}, "
                f"data.vocab_size={self.vocab_size}). fix: a larger context or data.vocab_size, "
                "or smaller data.pairs"
            ) from None

    @property
    @abstractmethod
    def sizes(self) -> list[int]:
        """The possible numbers of answers per row; row n has sizes[n % len(sizes)] answers."""

    @abstractmethod
    def row(self, generator: np.random.Generator, size: int) -> Row:
        """Generate a row with `size` answers."""

    def rows(self, seed: int, numbers: range, is_held_out: bool = False) -> EvaluationBatch:
        """Generate the rows with the given numbers."""
        # The initial values pad rows with fewer answers.
        shape = (len(numbers), max(self.sizes))
        inputs = np.empty((len(numbers), self.context), np.int64)
        positions = np.zeros(shape, np.int64)
        targets = np.full(shape, IGNORE_INDEX, np.int64)
        distances = np.ones(shape, np.int64)
        for index, number in enumerate(numbers):
            # The last number of the seed separates held-out rows from training rows. Callers
            # generate held-out rows with seed 0, so that they are the same in all runs.
            generator = np.random.default_rng((seed, number, int(is_held_out)))
            size = self.size_of(number)
            row = self.row(generator, size)
            assert row.inputs.shape == (self.context,)
            assert row.positions.shape == row.answers.shape == row.distances.shape == (size,)
            assert (row.inputs < self.vocab_size).all() and (row.answers < self.vocab_size).all()
            assert (row.distances >= 1).all()
            inputs[index] = row.inputs
            positions[index, :size] = row.positions
            targets[index, :size] = row.answers
            distances[index, :size] = row.distances

        # Positions in the flattened inputs.
        first_positions = self.context * np.arange(len(numbers))
        positions += first_positions[:, None]
        # The class of an answer is the index of its row's size.
        classes = torch.tensor(numbers) % len(self.sizes)
        return EvaluationBatch(
            inputs=torch.from_numpy(inputs),
            targets=torch.from_numpy(targets),
            cells=cells(classes[:, None], torch.from_numpy(distances)),
            positions=torch.from_numpy(positions.flatten()),
        )

    def size_of(self, number: int) -> int:
        """Return how many answers a row has."""
        return self.sizes[number % len(self.sizes)]

    def floor(self) -> float:
        """Return the accuracy of answering all queries of a row with its most frequent answer.

        It is measured on the held-out rows, and averaged over sizes like the accuracy of a model.
        """
        batch = self.rows(0, range(VALIDATION_ROWS), is_held_out=True)
        accuracies = []
        for row in batch.targets.numpy():
            counts = np.bincount(row[row != IGNORE_INDEX])
            accuracies.append(counts.max() / counts.sum())

        # Sizes alternate from row to row.
        num_sizes = len(self.sizes)
        means = [fmean(accuracies[first::num_sizes]) for first in range(num_sizes)]
        return fmean(means)

    def corpus(self) -> "TaskCorpus":
        tokenizer = IdTokenizer(self.vocab_size, self.vocab_size - 1)
        return TaskCorpus(
            train=[],
            validation=np.empty(0),
            tokenizer=tokenizer,
            sha256=text_hash(self.identity()),
            task=self,
        )

    @property
    def name(self) -> str:
        return type(self).__name__.lower()


@dataclass(kw_only=True)
class Recall(Task):
    """Multi-query associative recall: Arora et al., Zoology, 2312.04927, appendix C.1.

    A row begins with keys, each followed by its value. Later each key occurs again, as a query,
    and its value is the answer. Slots for queries are sampled without replacement, slot i (from 1)
    with a probability proportional to i^(power - 1). All other tokens are 0. Keys are sampled
    without replacement from the lower half of the vocabulary, and values from the upper half.
    """

    pairs: Annotated[list[PositiveInt], MinLen(1)]
    power: NonNegativeFloat

    def __post_init__(self):
        if len(set(self.pairs)) < len(self.pairs):
            raise ValueError(
                f"data.pairs has duplicates (got {self.pairs}). fix: list each number once"
            )
        super().__post_init__()

    @property
    def sizes(self) -> list[int]:
        return self.pairs

    def row(self, generator: np.random.Generator, size: int) -> Row:
        inputs = np.zeros(self.context, np.int64)

        # The pairs. 0 is not a key, and BOS, the last id, is not a value.
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
        key_positions = 2 * np.arange(size)
        return Row(inputs, queries, values, distances=queries - key_positions)


@dataclass
class TaskLoader:
    """Batches of a task as a function of (seed, step), like data.loader.Loader."""

    task: Task
    batch_size: int
    seed: int
    rows_per_epoch = math.inf  # no row repeats

    def __call__(self, step: int, rows: slice = slice(None)) -> TaskBatch:
        """Return the batch of a step, or only its `rows`."""
        batch = self.task.rows(self.seed, self.row_numbers(step)[rows])
        return TaskBatch(batch.inputs, batch.targets, batch.positions)

    def num_targets(self, step: int) -> int:
        """Return the number of answers in a batch, over which its loss is averaged."""
        return sum(self.task.size_of(number) for number in self.row_numbers(step))

    def row_numbers(self, step: int) -> range:
        first = step * self.batch_size
        return range(first, first + self.batch_size)


@dataclass
class TaskCorpus(Corpus):
    """The corpus of a task, which has a loader and an evaluation, but no token ids."""

    task: Task
    length_name = "distance"

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes that answers are grouped into, one per row size."""
        return tuple(str(size) for size in self.task.sizes)

    @property
    def task_name(self) -> str:
        return self.task.name

    @property
    def identity(self) -> dict[str, str]:
        return {"text": self.sha256}

    @property
    def description(self) -> str:
        return f"{self.task.name} with {self.task.sizes} answers per row"

    def with_context(self, context: int) -> "TaskCorpus":
        return replace(self.task, context=context).corpus()

    def loader(self, context: int, batch_size: int, seed: int) -> TaskLoader:
        return TaskLoader(self.task, batch_size, seed)

    def validation_tokens(self, context: int) -> int:
        return VALIDATION_ROWS * context

    def evaluation(
        self, num_tokens: int, context: int, batch_size: int
    ) -> Iterator[EvaluationBatch]:
        """Yield batches of rows that no run trains on, with at least one row of each size.

        The last batch is padded with rows whose answers do not count.
        """
        num_rows = max(num_tokens // context, self.num_classes)
        for first in range(0, num_rows, batch_size):
            numbers = range(first, first + batch_size)
            batch = self.task.rows(0, numbers, is_held_out=True)
            batch.targets[num_rows - first :] = IGNORE_INDEX
            yield batch
