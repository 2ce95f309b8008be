"""What a model is judged by while it trains: the loss on held-out text, and a sample of its own."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import nn

from data.corpus import Corpus
from data.loader import IGNORE_INDEX
from data.slices import NUM_BINS
from data.tokenizer import Tokenizer
from inference import sampling
from inference.engine import Sequence, generate
from model.transformer import Transformer
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
    # The scores stay on the device: the host waits once, at the end, and not for each batch.
    scores = [torch.zeros(2, 0, device=ranks.device)]
    cells = [torch.zeros(0, dtype=torch.int64)]
    num_cells = corpus.num_classes * NUM_BINS
    batches = list(corpus.evaluation(num_tokens, context, batch_size))
    for start in range(0, len(batches), ranks.world_size):
        # Sharded ranks compute together: one without a batch of its own repeats the last, unscored.
        number = start + ranks.rank
        inputs, targets, batch_cells = batches[min(number, len(batches) - 1)]
        with autocast(ranks.device, precision), torch.set_grad_enabled(with_gradients):
            _, batch_scores = loss_module(*to_device(ranks.device, inputs, targets))
        if number < len(batches):
            scores.append(batch_scores)
            # What does not count goes to one more cell, behind the others.
            batch_cells = batch_cells.masked_fill(targets == IGNORE_INDEX, num_cells)
            cells.append(batch_cells.flatten())
        if stop():
            loss_module.train()
            return None
    loss_module.train()

    # Sum nats, correct predictions and targets by cell, in fp64.
    nats, is_correct = torch.cat(scores, dim=1).cpu().double().numpy()
    cells = torch.cat(cells).numpy()
    totals = []
    for values in (nats, is_correct, np.ones_like(nats)):
        totals.append(np.bincount(cells, values, num_cells + 1)[:num_cells])
    totals = ranks.all_reduce_sum_of_array(np.stack(totals))
    return corpus.metrics(totals.reshape(3, -1, NUM_BINS), num_tokens)


def sample_text(
    model: Transformer, tokenizer: Tokenizer, seed: int, stop: Callable[[], int]
) -> str:
    """Generate up to 192 tokens from BOS; end early, with what there is, once `stop()` is not 0."""
    capacity = min(192, model.context)
    cache = model.new_cache(1, capacity, torch.float32, model.embed.weight.device)
    sequence = Sequence([tokenizer.bos], capacity - 1, seed=seed, eos=tokenizer.eos_ids)
    sampler = partial(sampling.sample, temperature=0.8, top_k=50)
    model.eval()
    for _ in generate(model, [sequence], sampler, cache=cache):
        if stop():
            break
    model.train()
    return tokenizer.decode(sequence.tokens)
