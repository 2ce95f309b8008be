"""What training lowers and evaluation reports, the nats of the next token; and a look at the text itself."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.loader import IGNORE_INDEX, document_ids
from model.layers import apply_softcap, fp32
from model.transformer import Transformer

MAX_LOGITS = {"cpu": 2**24, "cuda": 2**27, "mps": 2**24}  # logits in memory


class LinearCrossEntropy(torch.autograd.Function):
    """hidden (N, D), weight (V, D), targets (N,) -> summed nats; never more than AT_ONCE logits are in memory.

    The gradient is made in the forward, while the logits are there: that of nats + z_loss * log(Z)^2, Z the sum of
    exponentials (Chowdhery et al., 2204.02311). `softcap` bounds the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        softcap: float | None,
        z_loss: float,
    ) -> Tensor:
        rows, weight_grad = MAX_LOGITS[weight.device.type] // len(weight), torch.zeros_like(weight)
        rows = rows // 128 * 128 or max(rows, 1)  # products of odd sizes take a tenth longer
        if torch.is_autocast_enabled(weight.device.type):
            weight = weight.to(torch.get_autocast_dtype(weight.device.type))
        columns, nats, hidden_grads = torch.arange(len(weight), device=weight.device).int(), 0.0, []
        for h, target in zip(hidden.split(rows), targets[:, None].split(rows), strict=True):
            scores, counts = F.linear(h, weight), target != IGNORE_INDEX
            logits = apply_softcap(fp32(scores), softcap)
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


class LanguageModelLoss(nn.Module):
    """inputs, targets (B, T) -> summed nats. The one thing that is compiled and made parallel.

    `bos` begins each document, if none is to see another.
    """

    def __init__(self, model: Transformer, *, z_loss: float, bos: int | None):
        super().__init__()
        self.model, self.z_loss, self.bos = model, z_loss, bos

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        packed = None if self.bos is None else document_ids(inputs, self.bos)
        hidden = self.model.hidden(inputs, documents=packed).flatten(0, 1)
        how = self.model.softcap, self.z_loss
        return LinearCrossEntropy.apply(hidden, self.model.unembedding, targets.flatten(), *how)
