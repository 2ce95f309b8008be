"""The loss of a language model: cross-entropy of the next token, summed over targets, in nats.

Training minimizes the objective and reports the metrics, which have no gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.loader import IGNORE_INDEX, document_ids
from model.layers import apply_softcap, fp32
from model.transformer import Transformer

MAX_LOGITS = {"cpu": 2**25, "cuda": 2**27, "mps": 2**24}  # logits in memory at a time
# The fast kernels of a GPU need rows of bf16 logits that begin at multiples of 16 bytes. Rows whose
# length is a multiple of 128 fill the kernels' tiles best.
VOCAB_MULTIPLE = {"cpu": 1, "cuda": 128, "mps": 1}
# For each target: its nats, whether no token has a higher logit, and whether it counts (1 or 0).
TARGET_METRICS = ("nats", "is_correct", "is_counted")


def cross_entropy(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """logits (N, V) after the soft-cap, targets (N,) -> the objective, TARGET_METRICS (3, N).

    The objective is summed over targets. A target contributes its nats plus `z_loss` * log(Z)^2,
    where Z is the sum of the exponentials of its logits (2204.02311).

    The metrics have no gradient, and are 0 where the target is IGNORE_INDEX. In bf16 several tokens
    may share the highest logit; a target among them counts as correct.
    """
    assert logits.ndim == 2 and targets.shape == logits.shape[:1], (logits.shape, targets.shape)
    is_counted = targets != IGNORE_INDEX
    nats = target_nats(logits, targets) * is_counted
    objective = nats
    if z_loss > 0:
        log_z = logits.logsumexp(dim=-1) * is_counted
        objective = objective + z_loss * log_z.square()

    target_logits = logits.gather(-1, targets.clamp(min=0)[:, None])
    is_correct = (target_logits == logits.amax(dim=-1, keepdim=True))[:, 0] & is_counted
    return objective.sum(), torch.stack([nats, is_correct, is_counted]).detach()


def target_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """logits (N, V), targets (N,) -> -log of the probability of each target (N,).

    Undefined where the target is IGNORE_INDEX.
    """
    if not torch.compiler.is_compiling():
        return F.cross_entropy(logits, targets, reduction="none")
    # On a CPU, the compiled backward of F.cross_entropy sums a one-hot row (V,) for each target,
    # which takes longer than the exponentials. The backward of the formula below has no such sum.
    vocabulary = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    is_target = vocabulary == targets.int()[:, None]
    target_logits = torch.where(is_target, logits, 0.0).sum(dim=-1)
    return logits.logsumexp(dim=-1) - target_logits


class ChunkedCrossEntropy(torch.autograd.Function):
    """hidden (N, D), weight (V, D), targets (N,) -> the objective and metrics of `cross_entropy`.

    At most MAX_LOGITS logits are in memory. The forward pass takes a chunk of rows at a time, and
    computes their gradient immediately, so that nothing of size (N, V) is kept for the backward
    pass. If hidden needs no gradient, no gradient is computed.
    """

    # Recomputing each chunk in the backward (torch.utils.checkpoint) would need no autograd
    # function, but four matrix products instead of three. F.linear_cross_entropy(...,
    # options=...) of torch 2.13 has neither softcap nor z_loss, and rounds its loss to bf16.

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        softcap: float | None,
        z_loss: float,
    ) -> tuple[Tensor, Tensor]:
        assert len(hidden) == len(targets), (hidden.shape, targets.shape)
        # The weight in the dtype of matrix products, padded with rows of zeros on CUDA.
        needs_grad = ctx.needs_input_grad[0]
        device_type = weight.device.type
        vocab_size = len(weight)
        grad_weight = torch.zeros_like(weight) if needs_grad else None
        if torch.is_autocast_enabled(device_type):
            weight = weight.to(torch.get_autocast_dtype(device_type))
        padding = -vocab_size % VOCAB_MULTIPLE[device_type]
        if padding > 0:
            weight = F.pad(weight, (0, 0, 0, padding))
        weight = weight.detach().requires_grad_(needs_grad)

        # Products whose sizes are not multiples of 128 are 10% slower.
        chunk_size = MAX_LOGITS[device_type] // vocab_size
        chunk_size = chunk_size // 128 * 128 or max(chunk_size, 1)
        objective_sum = torch.zeros((), device=weight.device)
        grads = []
        scores = []
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            chunk = hidden[rows].detach().requires_grad_(needs_grad)
            with torch.enable_grad():
                logits = fp32(F.linear(chunk, weight))[:, :vocab_size]
                logits = apply_softcap(logits, softcap)
                objective, chunk_scores = cross_entropy(logits, targets[rows], z_loss)
            objective_sum = objective_sum + objective.detach()
            scores.append(chunk_scores)
            if needs_grad:
                grad_chunk, grad_chunk_weight = torch.autograd.grad(objective, (chunk, weight))
                grads.append(grad_chunk)
                grad_weight += grad_chunk_weight[:vocab_size]
        if grads:
            ctx.save_for_backward(torch.cat(grads), grad_weight)
        scores = torch.cat(scores, dim=1)
        ctx.mark_non_differentiable(scores)
        return objective_sum, scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        no_gradients = [None] * (len(ctx.needs_input_grad) - 2)  # except hidden and weight
        return grad * grad_hidden, grad * grad_weight, *no_gradients


class HeadLoss(nn.Module):
    """ChunkedCrossEntropy as a module, so that it can be compiled separately from the blocks."""

    def forward(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        """hidden (N, D), weight (V, D), targets (N,) -> the objective (), TARGET_METRICS (3, N)"""
        return ChunkedCrossEntropy.apply(hidden, weight, targets, softcap, z_loss)


class LanguageModelLoss(nn.Module):
    """inputs, targets (B, T) -> the objective (), and metrics (B T,) by name.

    Training minimizes the objective, summed over targets: the cross-entropy, plus the z-loss and
    the model's weighted auxiliary losses. The metrics have one number per target and no gradient:
    TARGET_METRICS, and the auxiliary losses by name. They exclude the z-loss, so that runs with and
    without it are comparable.

    With positions (N,), indices into inputs.flatten(), the N targets and metrics belong only to
    these tokens, such as the questions of a task, and the head computes no other logits.

    DDP may wrap this module, and torch.compile may compile it or its parts (training/parallel.py).

    If `bos` is a token id, it begins a document, and no token attends to another document.
    """

    def __init__(self, model: Transformer, *, z_loss: float, bos: int | None):
        super().__init__()
        self.model = model
        self.z_loss = z_loss
        self.bos = bos
        self.head_loss = HeadLoss()

    def forward(
        self, inputs: Tensor, targets: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        documents = None
        if self.bos is not None:
            documents = document_ids(inputs, self.bos)
        model = self.model
        hidden, aux_losses = model.hidden_states(inputs, documents=documents)
        targets = targets.flatten()
        selected = slice(None) if positions is None else positions

        objective, scores = self.head_loss(
            hidden.flatten(0, 1)[selected], model.unembedding, targets, model.softcap, self.z_loss
        )
        metrics = dict(zip(TARGET_METRICS, scores, strict=True))

        # Auxiliary losses count only at tokens with a target, like the cross-entropy.
        assert [*sorted(aux_losses)] in ([], model.loss_names), (
            aux_losses.keys(),
            model.loss_names,
        )
        is_counted = targets != IGNORE_INDEX
        for name, loss in aux_losses.items():
            aux_objective = fp32(loss.objective).flatten()[selected] * is_counted
            objective = objective + aux_objective.sum()
            metrics[name] = fp32(loss.value).flatten()[selected] * is_counted
        return objective, metrics
