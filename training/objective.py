"""What training lowers and evaluation reports, the nats of the next token; and a look at the text itself."""

import math
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from data.loader import IGNORED, documents, windows
from data.prepare import Corpus
from data.tokenizer import Tokenizer
from model import sampling
from model.generation import Text, generate
from model.initialise import initialise
from model.layers import capped, precise
from model.materialize import build_model, materialize
from model.transformer import Transformer
from training.distributed import Ranks, distribute, shard
from training.hardware import autocast

AT_ONCE = {"cpu": 2**24, "cuda": 2**27, "mps": 2**24}  # logits in memory


class LinearCrossEntropy(torch.autograd.Function):
    """hidden (N, D), weight (V, D), targets (N,) -> summed nats; never more than AT_ONCE logits are in memory.

    The gradient is made in the forward, while the logits are there: that of nats + z_loss * log(Z)^2, Z the sum of
    exponentials (Chowdhery et al., 2204.02311). `softcap` bounds the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, z_loss: float
    ) -> Tensor:
        rows, weight_grad = AT_ONCE[weight.device.type] // len(weight), torch.zeros_like(weight)
        rows = rows // 128 * 128 or max(rows, 1)  # products of odd sizes take a tenth longer
        if torch.is_autocast_enabled(weight.device.type):
            weight = weight.to(torch.get_autocast_dtype(weight.device.type))
        columns, nats, hidden_grads = torch.arange(len(weight), device=weight.device).int(), 0.0, []
        for h, target in zip(hidden.split(rows), targets[:, None].split(rows), strict=True):
            scores, counts = F.linear(h, weight), target != IGNORED
            logits = capped(precise(scores), softcap)
            highest = logits.amax(dim=-1, keepdim=True)
            weights = (logits - highest).exp()
            total = weights.sum(dim=-1, keepdim=True)
            log_z, chosen = total.log() + highest, logits.gather(-1, target.clamp(min=0))
            nats = nats + ((log_z - chosen) * counts).sum()
            shares = weights.type_as(scores) * (counts * (1 + 2 * z_loss * log_z) / total)
            slope = torch.where(columns == target.int(), shares - 1, shares)
            if softcap is not None:
                slope = slope * (1 - (logits / softcap) ** 2)
            slope = slope.type_as(scores)
            hidden_grads.append(slope @ weight)
            weight_grad += slope.mT @ h
        ctx.save_for_backward(torch.cat(hidden_grads).type_as(hidden), weight_grad)
        return nats

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return grad * hidden_grad, grad * weight_grad, None, None, None


class Objective(nn.Module):
    """inputs, targets (B, T) -> summed nats. The one thing that is compiled and made parallel.

    `bos` begins each document, if none is to see another.
    """

    def __init__(self, model: Transformer, *, z_loss: float, bos: int | None):
        super().__init__()
        self.model, self.z_loss, self.bos = model, z_loss, bos

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        packed = None if self.bos is None else documents(inputs, self.bos)
        hidden = self.model.hidden(inputs, documents=packed).flatten(0, 1)
        how = self.model.softcap, self.z_loss
        return LinearCrossEntropy.apply(hidden, self.model.unembedding, targets.flatten(), *how)


def evaluate(
    objective: nn.Module,
    corpus: Corpus,
    context: int,
    batch: int,
    precision: torch.dtype,
    ranks: Ranks,
    stop: Callable[[], int],
) -> dict[str, float | None] | None:
    """`val_loss` in nats per token and `val_bpb`, if the bytes are known, over all held-out text in windows apart.

    Gradients stay enabled and are thrown away: what training has compiled serves here too. None where `stop` says so.
    """
    nats, stopped = 0.0, False
    batches = iter(windows(corpus.validation, context, batch))
    objective.eval()
    while (each := list(islice(batches, ranks.world))) and not stopped:
        inputs, targets = each[min(ranks.rank, len(each) - 1)]  # the last ones may only keep the others company
        with autocast(ranks.device, precision):
            found = objective(*on(ranks.device, inputs, targets)).item()
        nats, stopped = nats + found * (ranks.rank < len(each)), bool(stop())
    objective.train()
    if stopped:
        return None
    nats, tokens = ranks.total(nats), sum(map(len, corpus.validation)) - 1
    size = corpus.validation_bytes
    return {"val_loss": nats / tokens, "val_bpb": nats / math.log(2) / size if size else None}


def sample(model: Transformer, tokenizer: Tokenizer, seed: int, stop: Callable[[], int]) -> str:
    """Text from nothing, up to its end or 192 tokens, or until `stop` says so."""
    capacity = min(192, model.context)
    cache = model.new_cache(1, capacity, torch.float32, model.embed.weight.device)
    text = Text([tokenizer.bos], capacity - 1, key=seed)
    model.eval()
    for _ in generate(model, [text], partial(sampling.sample, temperature=0.8, top_k=50), cache=cache):
        text.done |= text.tokens[-1] == tokenizer.eos or bool(stop())
    model.train()
    return tokenizer.decode(text.tokens)


def on(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """The same, where they are computed with; pinned on the way to a GPU, so that nobody waits."""
    return [(x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True) for x in tensors]


def recomputed(forward: Callable) -> Callable:
    def again(*args):  # compiled by itself, this is what the compiler sees; `checkpoint` alone it would leave out
        return checkpoint(forward, *args, use_reentrant=False)

    return again


def prepared(settings: dict, bos: int | None, ranks: Ranks, precision: torch.dtype) -> tuple[Objective, nn.Module]:
    """The objective of a model at its first step, and what makes it parallel.

    With `activation_checkpointing`, a block keeps its input alone and computes the rest again. Chen et al., 1604.06174.
    """
    model = build_model(settings["model"])
    if settings["activation_checkpointing"]:
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True  # what layers share is made once
        for block in model.blocks:
            block.forward = recomputed(block.forward)
    if settings["sharded"]:
        shard(model, ranks, precision)
    initialise(materialize(model, ranks.device), settings["seed"], distribute)
    objective = Objective(model, z_loss=settings["z_loss"], bos=bos)
    alone = ranks.world == 1 or settings["sharded"]
    return objective, objective if alone else DistributedDataParallel(objective, gradient_as_bucket_view=True)
