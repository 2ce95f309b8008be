"""Batches are a function of seed and step, and an epoch visits every token once, across shards and at the end."""

import numpy as np
import pytest
import torch

from data.loader import IGNORE_INDEX, Loader, document_ids, eval_windows

TEXT = np.arange(1000, dtype=np.uint16)
SHARDS = np.split(TEXT, [7, 400, 401])


def loader(**changed) -> Loader:
    return Loader(SHARDS, **({"context": 10, "batch_size": 4, "seed": 0} | changed))


def test_targets_are_the_next_tokens():
    inputs, targets = loader()(3)
    assert inputs.shape == targets.shape == (4, 10)
    assert torch.equal(inputs + 1, targets) and torch.equal(
        inputs, inputs[:, :1] + torch.arange(10)
    )


def test_an_epoch_visits_every_row_once():
    one = loader()
    rows = torch.cat([one(step)[0] for step in range(-(-one.rows_per_epoch // 4))])[
        : one.rows_per_epoch
    ]
    assert len(rows.flatten().unique()) == rows.numel() == one.rows_per_epoch * 10


def test_each_epoch_has_its_own_offset_and_order():
    one = loader(batch_size=98)  # all rows
    assert one.rows_per_epoch == 98
    first, second = one(0)[0], one(1)[0]
    assert not torch.equal(first, second) and not torch.equal(
        first.sort(dim=0).values, second.sort(dim=0).values
    )


def test_a_batch_depends_only_on_seed_and_step():
    used = loader()
    for step in (5, 99, 0):
        used(step)
    assert torch.equal(used(7)[0], loader()(7)[0])
    assert not torch.equal(used(7)[0], loader(seed=1)(7)[0])
    assert not torch.equal(used(7)[0], used(8)[0])


def test_ranks_and_micro_batches_split_one_batch():
    whole = loader()(2)[0]
    assert torch.equal(
        torch.cat([loader()(2, slice(start, start + 1))[0] for start in range(4)]), whole
    )


@pytest.mark.parametrize("length", [1, 10, 49])
def test_too_little_text_for_one_batch_is_refused(length):
    with pytest.raises(ValueError, match=f"have {length} tokens, need 51"):
        Loader([TEXT[:length]], context=10, batch_size=4, seed=0)
    Loader([TEXT[:51]], context=10, batch_size=4, seed=0)(0)


def test_documents_are_numbered_from_bos_to_bos():
    inputs = torch.tensor([[5, 2, 1, 6, 7, 2, 1, 1], [1, 5, 5, 5, 5, 5, 5, 5]])
    assert document_ids(inputs, bos=1).tolist() == [[0, 0, 1, 1, 1, 1, 2, 3], [1] * 8]


@pytest.mark.parametrize("context, batch", [(10, 4), (999, 1), (64, 3), (2000, 2)])
def test_windows_hold_every_target_once(context, batch):
    seen = []
    for inputs, targets in eval_windows(np.concatenate(SHARDS), context, batch):
        assert inputs.shape == targets.shape == (batch, context)
        counted = targets != IGNORE_INDEX
        assert torch.equal(inputs[counted] + 1, targets[counted])
        seen.append(targets[counted])
    assert torch.cat(seen).tolist() == TEXT[1:].tolist()
