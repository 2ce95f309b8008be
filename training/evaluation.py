"""What a model is judged by while it trains: the loss on held-out text."""

from collections.abc import Callable

import torch
from torch import nn

from data.corpus import Corpus
from data.loader import IGNORE_INDEX
from data.slices import NUM_BINS
from run.distributed import DistEnv
from run.hardware import autocast, to_device


def evaluate(
    loss_module: nn.Module,
    corpus: Corpus,
    num_tokens: int,
    context: int,
    batch_size: int,
    precision: torch.dtype,
    ranks: DistEnv,
    stop: Callable[[], int],
    *,
    with_gradients: bool,
) -> dict | None:
    """Evaluate on held-out tokens -> the metrics of the corpus, such as `val_loss`.

    The first `num_tokens` tokens are read in windows of `context` tokens that do not overlap,
    `batch_size` of them at a time. Return None once `stop()`, called by all ranks after each batch,
    is not 0. `with_gradients` runs the graph that was compiled for training, instead of compiling
    one without gradients; the head's gradients are discarded.
    """
    loss_module.eval()
    batches = list(corpus.evaluation(num_tokens, context, batch_size))
    scores = []
    cells = []
    for start in range(0, len(batches), ranks.world_size):
        # Ranks compute together: one without a batch of its own repeats the last, without targets.
        number = start + ranks.rank
        inputs, targets, batch_cells, *positions = batches[min(number, len(batches) - 1)]
        if number >= len(batches):
            targets = torch.full_like(targets, IGNORE_INDEX)
        with autocast(ranks.device, precision), torch.set_grad_enabled(with_gradients):
            _, batch_scores = loss_module(*to_device(ranks.device, inputs, targets, *positions))
        scores.append(batch_scores)
        cells.append(batch_cells.flatten())
        if stop():
            loss_module.train()
            return None
    loss_module.train()

    # Sum nats, correct predictions and targets by cell, in fp64. The host waits for the device
    # once, here, and not for each batch.
    values = torch.cat(scores, dim=1).cpu().double()
    totals = torch.zeros(3, corpus.num_classes * NUM_BINS, dtype=torch.float64)
    totals.index_add_(1, torch.cat(cells), values)
    totals = ranks.all_reduce(totals).view(3, -1, NUM_BINS)
    return corpus.metrics(totals.numpy(), num_tokens)
