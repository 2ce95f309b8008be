"""Metrics of an evaluation on a text or a task, computed from sums over the targets in each cell.

data/slices.py defines the cells. The totals (3, num_classes, NUM_BINS) of an evaluation are the
loss in nats, the number of correct predictions and the number of targets in each cell.
"""

import math
from statistics import fmean

import numpy as np

from data.corpus import Corpus
from data.slices import NUM_BINS, bin_name
from training.loss import TARGET_METRICS


def corpus_metrics(corpus: Corpus, totals: np.ndarray, num_tokens: int) -> dict:
    """Return metrics by name for an evaluation on the first `num_tokens` held-out tokens."""
    assert totals.shape == (len(TARGET_METRICS), corpus.num_classes, NUM_BINS)
    if corpus.task_name is None:
        return text_metrics(corpus, totals, num_tokens)
    return task_metrics(corpus, totals)


def text_metrics(corpus: Corpus, totals: np.ndarray, num_tokens: int) -> dict:
    """Return the loss in nats per token and in bits per byte, and the loss of each slice.

    The bits per byte are None if the number of bytes is unknown.
    """
    nats, _, targets = totals
    num_bytes = corpus.validation_bytes(num_tokens)
    bits_per_byte = None
    if num_bytes is not None:
        bits_per_byte = nats.sum() / math.log(2) / num_bytes
    return {
        "val_loss": nats.sum() / targets.sum(),
        "val_bpb": bits_per_byte,
        "slices": slice_means(nats, targets, corpus.class_names, corpus.length_name, "loss"),
    }


def task_metrics(corpus: Corpus, totals: np.ndarray) -> dict:
    """Return the loss per answer in nats, accuracies by size (with their mean) and by length."""
    nats, correct, targets = totals
    slices = slice_means(correct, targets, corpus.class_names, corpus.length_name, "accuracy")
    # The classes of a task are its sizes, and each size has its own accuracy metric.
    key = f"{corpus.task_name}_accuracy"
    accuracies = {}
    for size in corpus.class_names:
        accuracies[f"{key}_{size}"] = slices.pop(size)["accuracy"]
    return {
        "val_loss": nats.sum() / targets.sum(),
        "val_bpb": None,
        key: fmean(accuracies.values()),
        **accuracies,
        "slices": slices,
    }


def slice_means(
    sums: np.ndarray, counts: np.ndarray, classes: tuple[str, ...], length: str, value: str
) -> dict[str, dict[str, float]]:
    """Return each slice's mean, under the key `value`, and its number of tokens.

    `sums` and `counts` are (num_classes, NUM_BINS). A slice is a row, named by its class, or a
    column, named by its bin of `length`. Slices without targets, such as positions beyond the
    context, are left out.
    """
    assert sums.shape == counts.shape == (len(classes), NUM_BINS)
    bins = [f"{length} {bin_name(index)}" for index in range(NUM_BINS)]
    slices = {}
    # The rows of the table, then its columns.
    for axis, names in ((1, classes), (0, bins)):
        totals = sums.sum(axis)
        tokens = counts.sum(axis)
        for index, name in enumerate(names):
            if tokens[index] > 0:
                mean = float(totals[index] / tokens[index])
                slices[name] = {value: mean, "tokens": int(tokens[index])}
    return slices
