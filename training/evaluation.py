"""What a model is judged by while it trains: the loss on held-out text, and a sample of its own."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import nn

from common.hardware import accumulation_dtype, autocast, to_device
from data.loader import eval_windows
from data.prepare import Corpus
from data.tokenizer import Tokenizer
from inference import sampling
from inference.engine import Sequence, generate
from model.transformer import Transformer
from training.distributed import DistEnv


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
) -> dict[str, float | None] | None:
    """`val_loss` in nats per token and `val_bpb` in bits per byte of the held-out text.

    Its first `num_tokens` tokens are read in windows of `context` tokens that do not overlap,
    `batch_size` of them at a time.
    `val_bpb` is None where the size of the text is unknown. Return None once `stop()`, called by
    all ranks after each batch, is not 0. Of a `loss_module` that was compiled `with_gradients`, the
    same graph runs here, and the head's gradients are discarded.
    """
    loss_module.eval()
    # Summed on the device: the host waits once, at the end, and not for each batch.
    loss_sum = torch.zeros((), dtype=accumulation_dtype(ranks.device), device=ranks.device)
    tokens = np.concatenate(corpus.validation)
    num_bytes = corpus.validation_bytes
    if num_tokens < len(tokens):
        tokens = tokens[:num_tokens]
        num_bytes = corpus.tokenizer.nbytes(tokens)
    batches = list(eval_windows(tokens, context, batch_size))
    for start in range(0, len(batches), ranks.world_size):
        # Sharded ranks compute together: one without a batch of its own repeats the last, unscored.
        number = start + ranks.rank
        inputs, targets = batches[min(number, len(batches) - 1)]
        with autocast(ranks.device, precision), torch.set_grad_enabled(with_gradients):
            loss = loss_module(*to_device(ranks.device, inputs, targets))
        if number < len(batches):
            loss_sum += loss.detach()
        if stop():
            loss_module.train()
            return None
    loss_module.train()

    loss_sum = ranks.all_reduce_sum(loss_sum.item())
    bits_per_byte = None
    if num_bytes:
        bits_per_byte = loss_sum / math.log(2) / num_bytes
    num_targets = len(tokens) - 1  # the first token is the target of none
    return {"val_loss": loss_sum / num_targets, "val_bpb": bits_per_byte}


def sample_text(
    model: Transformer, tokenizer: Tokenizer, seed: int, stop: Callable[[], int]
) -> str:
    """Generate up to 192 tokens from BOS; end early, with what there is, once `stop()` is not 0."""
    capacity = min(192, model.context)
    cache = model.new_cache(1, capacity, torch.float32, model.embed.weight.device)
    sequence = Sequence([tokenizer.bos], capacity - 1, seed=seed, eos=tokenizer.eos)
    sampler = partial(sampling.sample, temperature=0.8, top_k=50)
    model.eval()
    for _ in generate(model, [sequence], sampler, cache=cache):
        if stop():
            break
    model.train()
    return tokenizer.decode(sequence.tokens)
