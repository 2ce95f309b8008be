"""What training lowers and evaluation reports, the nats of the next token; and a look at the text itself."""

import math
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.loader import IGNORED, documents, windows
from data.prepare import Corpus
from data.tokenizer import Tokenizer
from model import sampling
from model.layers import precise
from model.transformer import Transformer
from training.distributed import Ranks
from training.hardware import autocast
from training.signals import Signals

AT_ONCE = 2**26  # logits in memory


class LinearCrossEntropy(torch.autograd.Function):
    """hidden (N, D), weight (V, D), targets (N,) -> summed nats; never more than AT_ONCE logits are in memory.

    The gradient is made in the forward, while the logits are there.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        rows, columns = max(1, AT_ONCE // len(weight)), torch.arange(len(weight), device=weight.device).int()
        nats, hidden_grads, weight_grad = 0.0, [], 0.0
        for h, target in zip(hidden.split(rows), targets[:, None].split(rows), strict=True):
            scores, counts = F.linear(h, weight), target != IGNORED
            logits = precise(scores)
            highest = logits.amax(dim=-1, keepdim=True)
            weights = (logits - highest).exp()
            total = weights.sum(dim=-1, keepdim=True)
            chosen = logits.gather(-1, target.clamp(min=0))
            nats = nats + ((total.log() + highest - chosen) * counts).sum()
            shares = weights * (counts / total)
            slope = torch.where(columns == target.int(), shares - 1, shares).type_as(scores)
            hidden_grads.append(slope @ weight)
            weight_grad = weight_grad + precise(slope.mT @ h)
        ctx.save_for_backward(torch.cat(hidden_grads).type_as(hidden), weight_grad.type_as(weight))
        return nats

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return grad * hidden_grad, grad * weight_grad, None


class Objective(nn.Module):
    """inputs, targets, documents (B, T) -> summed nats. The one thing that is compiled and made parallel."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        hidden = self.model.hidden(inputs, documents=documents)
        return LinearCrossEntropy.apply(hidden.flatten(0, 1), self.model.unembedding, targets.flatten())


def evaluate(
    objective: nn.Module,
    corpus: Corpus,
    settings: dict,
    batch: int,
    precision: torch.dtype,
    ranks: Ranks,
    stop: Callable[[], int],
) -> dict[str, float] | None:
    """`val_loss` in nats per token and `val_bpb`, over all held-out text in windows that do not overlap.

    Gradients stay enabled and are thrown away: what training has compiled serves here too. None where `stop` says so.
    """
    nats, stopped = 0.0, False
    objective.eval()
    for number, (inputs, targets) in enumerate(windows(corpus.validation, settings["context"], batch)):
        if stopped := bool(stop()):
            break
        if number % ranks.world == ranks.rank:
            packed = documents(inputs, corpus.tokenizer.bos) if settings["document_mask"] else None
            with autocast(ranks.device, precision):
                nats += objective(*on(ranks.device, inputs, targets, packed)).item()
    objective.train()
    if stopped:
        return None
    nats, tokens = ranks.total(nats), sum(map(len, corpus.validation)) - 1
    return {"val_loss": nats / tokens, "val_bpb": nats / math.log(2) / corpus.validation_bytes}


def sample(model: Transformer, tokenizer: Tokenizer, seed: int, signals: Signals) -> str:
    """Text from nothing, up to its end or 192 tokens, or a signal."""
    device, capacity = model.embed.weight.device, min(192, model.context)
    generator = torch.Generator(device).manual_seed(seed)
    cache = model.new_cache(1, capacity, torch.float32, device)

    def draw(logits: Tensor, seen: Tensor) -> Tensor:
        return sampling.sample(logits, seen, temperature=0.8, top_k=50, generator=generator)

    model.eval()
    drawn = sampling.generate(model, [[tokenizer.bos]], capacity - 1, draw, cache=cache)
    tokens = takewhile(lambda token: token != tokenizer.eos and not signals.code, (token.item() for token in drawn))
    text = tokenizer.decode(list(tokens))
    model.train()
    return text


def on(device: torch.device, *tensors: Tensor | None) -> list[Tensor | None]:
    """The same, where they are computed with; pinned on the way to a GPU, so that nobody waits."""
    pinned = [x if x is None or device.type != "cuda" else x.pin_memory() for x in tensors]
    return [x if x is None else x.to(device, non_blocking=True) for x in pinned]
