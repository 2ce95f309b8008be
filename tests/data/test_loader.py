"""Batches depend only on seed and step, and each epoch visits every row of all shards once."""

import mmap
import tracemalloc
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import stats

from data.loader import IGNORE_INDEX, Loader, document_ids, eval_windows

TEXT = np.arange(1000, dtype=np.uint16)
SHARDS = np.split(TEXT, [7, 400, 401])


def loader(**changed) -> Loader:
    return Loader(SHARDS, **({"context": 10, "batch_size": 4, "seed": 0} | changed))


def test_targets_are_the_next_tokens():
    inputs, targets = loader()(3)
    assert inputs.shape == targets.shape == (4, 10)
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(10))


def test_an_epoch_visits_every_row_once():
    one = loader()
    num_steps = -(-one.rows_per_epoch // 4)
    rows = torch.cat([one(step)[0] for step in range(num_steps)])[: one.rows_per_epoch]
    assert len(rows.flatten().unique()) == rows.numel() == one.rows_per_epoch * 10


def test_each_epoch_has_a_different_offset_and_order():
    one = loader(batch_size=98)  # all rows
    assert one.rows_per_epoch == 98
    first, second = one(0)[0], one(1)[0]
    assert not torch.equal(first, second)
    assert not torch.equal(first.sort(dim=0).values, second.sort(dim=0).values)


def order_of(num_rows: int, seed: int, epoch: int = 0) -> np.ndarray:
    """The row order of an epoch, as the position of each row's first token in the text."""
    text = np.zeros(num_rows + 2, dtype=np.uint16)
    return Loader([text], context=1, batch_size=1, seed=seed).row_starts(
        np.arange(epoch * num_rows, (epoch + 1) * num_rows)
    )


def test_row_order_is_a_permutation_for_any_number_of_rows():
    for num_rows in range(1, 301):
        assert sorted(order_of(num_rows, seed=num_rows)) == list(range(num_rows))


@pytest.mark.parametrize("num_rows", [3, 17])
def test_small_texts_are_shuffled_uniformly(num_rows):
    orders = np.array([order_of(num_rows, seed) for seed in range(2000)])
    # Every pair of rows is equally likely at each of these positions.
    for one, other in ((0, 1), (0, num_rows - 1)):
        pairs = np.bincount(orders[:, one] * num_rows + orders[:, other], minlength=num_rows**2)
        different = pairs.reshape(num_rows, num_rows)[~np.eye(num_rows, dtype=bool)]
        assert stats.chisquare(different).pvalue > 0.001


def test_batch_memory_and_time_do_not_depend_on_the_number_of_rows():
    # Broadcast from one token: the text takes no memory.
    num_rows = 10**10
    text = np.broadcast_to(np.uint16(0), num_rows * 2 + 1)
    large = Loader([text], context=2, batch_size=64, seed=0)
    tracemalloc.start()
    starts = large.row_starts(np.arange(num_rows - 50_000, num_rows + 50_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
    # The last rows of one epoch and the first rows of the next one.
    for rows in np.split(starts, 2):
        assert len(set(rows.tolist())) == 50_000 and rows.min() >= 0 and rows.max() < 2 * num_rows
        assert stats.kstest(rows / (2 * num_rows), "uniform").pvalue > 0.001


def test_random_reads_are_advised_only_for_the_training_part_of_a_file(tmp_path):
    path = tmp_path / "ids.bin"
    np.zeros(3000, np.uint16).tofile(path)
    tokens = np.memmap(path, np.uint16, "r", offset=1024)  # a header, as in llm.c
    shard = tokens[:2000]
    shard._mmap = mock.Mock()
    Loader([shard], context=10, batch_size=4, seed=0)
    shard._mmap.madvise.assert_called_once_with(mmap.MADV_RANDOM, 0, 1024 + 2 * 2000)


def test_a_batch_depends_only_on_seed_and_step():
    used = loader()
    for step in (5, 99, 0):
        used(step)
    assert torch.equal(used(7)[0], loader()(7)[0])
    assert not torch.equal(used(7)[0], loader(seed=1)(7)[0])
    assert not torch.equal(used(7)[0], used(8)[0])


def test_ranks_and_micro_batches_split_the_same_batch():
    whole = loader()(2)[0]
    parts = [loader()(2, slice(start, start + 1))[0] for start in range(4)]
    assert torch.equal(torch.cat(parts), whole)


def test_a_text_shorter_than_one_batch_is_refused():
    with pytest.raises(ValueError, match="need 51"):
        Loader([TEXT[:50]], context=10, batch_size=4, seed=0)
    Loader([TEXT[:51]], context=10, batch_size=4, seed=0)(0)


def test_document_ids_increase_at_each_bos():
    inputs = torch.tensor([[5, 2, 1, 6, 7, 2, 1, 1], [1, 5, 5, 5, 5, 5, 5, 5]])
    assert document_ids(inputs, bos=1).tolist() == [[0, 0, 1, 1, 1, 1, 2, 3], [1] * 8]


@pytest.mark.parametrize("context, batch", [(10, 4), (999, 1), (2000, 2)])
def test_eval_windows_contain_every_target_once(context, batch):
    seen = []
    for inputs, targets in eval_windows(np.concatenate(SHARDS), context, batch):
        assert inputs.shape == targets.shape == (batch, context)
        counted = targets != IGNORE_INDEX
        assert torch.equal(inputs[counted] + 1, targets[counted])
        seen.append(targets[counted])
    assert torch.cat(seen).tolist() == TEXT[1:].tolist()
