"""The slices of an evaluation match their definitions and add up to the total loss."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch

from data.slices import NUM_BINS, bin_name, text_cells
from tests.tools.test_evaluate import nats_by_token
from tests.training.test_train_command import metrics
from train import take_step


def test_slice_bins_end_at_powers_of_two():
    lengths = torch.arange(1, 131)[None]
    tokens = torch.zeros_like(lengths)
    bins = text_cells(tokens, tokens)[0] % NUM_BINS
    names = [bin_name(index) for index in bins.tolist()]
    assert names[:9] == ["1", "2", "3-4", "3-4", *["5-8"] * 4, "9-16"]
    assert names[127:] == ["65-128", *["129-256"] * 2]


def test_repeated_bigrams_are_detected():
    #          a  b  c  a  b  a  b  c  d
    text = torch.tensor([[3, 4, 5, 3, 4, 3, 4, 5, 6], [6, 6, 6, 3, 4, 6, 3, 6, 6]])
    is_repeated = text_cells(text[:, :-1], text[:, 1:]) // NUM_BINS
    assert is_repeated.tolist() == [[0, 0, 0, 1, 0, 1, 1, 0], [0, 1, 0, 0, 0, 1, 0, 1]]


def test_slice_losses_match_losses_computed_from_logits(run_of):
    run = run_of()
    tokens = run.env.corpus.validation
    take_step(run)
    run.evaluator.evaluate(run.progress)
    line = metrics(run.env.run_dir)[-1]
    slices = line["slices"]
    nats = nats_by_token(run.trainer.model, tokens.tolist())
    assert line["val_loss"] == pytest.approx(np.mean(nats), abs=1e-6)
    # Recompute the losses independently from the logits.
    losses = defaultdict(list)
    for start in range(0, len(tokens) - 1, 64):
        window = tokens[start : start + 65].tolist()
        seen = set()
        for index, bigram in enumerate(pairwise(window)):
            losses["repeated" if bigram in seen else "new"].append(nats[start + index])
            losses[f"position {bin_name(index.bit_length())}"].append(nats[start + index])
            seen.add(bigram)
    for name, values in losses.items():
        expected = {"loss": pytest.approx(np.mean(values), abs=1e-5), "tokens": len(values)}
        assert slices.pop(name) == expected
    assert not slices
