"""Held-out loss, and sampled text."""

import math
from collections.abc import Callable
from functools import partial
from itertools import islice

import torch
from torch import nn

from common.hardware import autocast, to_device
from data.loader import eval_windows
from data.prepare import Corpus
from data.tokenizer import Tokenizer
from inference import sampling
from inference.engine import Sequence, generate
from model.transformer import Transformer
from training.distributed import DistEnv


def evaluate(
    objective: nn.Module,
    corpus: Corpus,
    context: int,
    batch: int,
    precision: torch.dtype,
    ranks: DistEnv,
    stop: Callable[[], int],
) -> dict[str, float | None] | None:
    """`val_loss` in nats per token and `val_bpb`, if the bytes are known, over all held-out text in windows apart.

    Gradients stay enabled and are thrown away: what training has compiled serves here too. None where `stop` says so.
    """
    nats, stopped = 0.0, False
    batches = iter(eval_windows(corpus.validation, context, batch))
    objective.eval()
    while (each := list(islice(batches, ranks.world_size))) and not stopped:
        inputs, targets = each[
            min(ranks.rank, len(each) - 1)
        ]  # the last ones may only keep the others company
        with autocast(ranks.device, precision):
            found = objective(*to_device(ranks.device, inputs, targets)).item()
        nats, stopped = nats + found * (ranks.rank < len(each)), bool(stop())
    objective.train()
    if stopped:
        return None
    nats, tokens = ranks.all_reduce_sum(nats), sum(map(len, corpus.validation)) - 1
    size = corpus.validation_bytes
    return {"val_loss": nats / tokens, "val_bpb": nats / math.log(2) / size if size else None}


def sample_text(
    model: Transformer, tokenizer: Tokenizer, seed: int, stop: Callable[[], int]
) -> str:
    """Text from nothing, up to its end or 192 tokens, or until `stop` says so."""
    capacity = min(192, model.context)
    cache = model.new_cache(1, capacity, torch.float32, model.embed.weight.device)
    text = Sequence([tokenizer.bos], capacity - 1, key=seed)
    model.eval()
    for _ in generate(
        model, [text], partial(sampling.sample, temperature=0.8, top_k=50), cache=cache
    ):
        text.done |= text.tokens[-1] == tokenizer.eos or bool(stop())
    model.train()
    return tokenizer.decode(text.tokens)
