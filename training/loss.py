"""The loss of a language model: cross-entropy of the next token, summed over targets, in nats."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.loader import IGNORE_INDEX, document_ids
from model.layers import apply_softcap, fp32
from model.transformer import Transformer
from training.distillation import Distillation

MAX_LOGITS = {"cpu": 2**25, "cuda": 2**27, "mps": 2**24}  # logits in memory at a time
# Rows of bf16 logits must begin at multiples of 16 bytes for the fast kernels of a GPU, and fill
# their tiles best at multiples of 128. nanoGPT pads GPT-2's 50,257 tokens in its weights instead.
VOCAB_MULTIPLE = {"cpu": 1, "cuda": 128, "mps": 1}
ALL = slice(None)  # positions


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    z_loss: float = 0.0,
    teacher_logits: Tensor | None = None,
    distill_weight: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """logits (N, V) after the soft-cap, targets (N,) -> what training minimizes, scores (3, N).

    The first is summed over targets. Each has its nats or, at `distill_weight`, the cross-entropy
    with the probabilities of a teacher's logits (Hinton et al., 1503.02531); beside that the
    penalty z_loss * log(Z)^2, Z the sum of exponentials (PaLM, 2204.02311).

    The scores have no gradient: the nats of each target, then 1 where no token is more likely,
    which may be true of several in bf16, and 1 where there is a target. All are 0 where the target
    is IGNORE_INDEX.
    """
    is_counted = targets != IGNORE_INDEX
    nats = target_nats(logits, targets) * is_counted
    objective = nats
    if teacher_logits is not None:
        probabilities = teacher_logits.softmax(dim=-1)
        distilled = F.cross_entropy(logits, probabilities, reduction="none") * is_counted
        objective = (1 - distill_weight) * nats + distill_weight * distilled
    if z_loss > 0:
        log_z = logits.logsumexp(dim=-1) * is_counted
        objective = objective + z_loss * log_z.square()

    target_logits = logits.gather(-1, targets.clamp(min=0)[:, None])
    is_correct = (target_logits == logits.amax(dim=-1, keepdim=True))[:, 0] & is_counted
    return objective.sum(), torch.stack([nats, is_correct, is_counted]).detach()


def target_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """logits (N, V), targets (N,) -> -log of the probability of each target (N,).

    Of IGNORE_INDEX it is any number.
    """
    if not torch.compiler.is_compiling():
        return F.cross_entropy(logits, targets, reduction="none")
    # Its gradient, compiled for a CPU, adds up a row of V zeros and a one for every target, which
    # takes longer than the exponentials. That of the following has the row, but not the sum.
    vocabulary = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    is_target = vocabulary == targets.int()[:, None]
    target_logits = torch.where(is_target, logits, 0.0).sum(dim=-1)
    return logits.logsumexp(dim=-1) - target_logits


class ChunkedCrossEntropy(torch.autograd.Function):
    """hidden (N, D), weight (V, D), targets (N,) -> the summed nats and scores of `cross_entropy`.

    The gradient is that of what training minimizes. The value has neither penalty nor teacher in
    it, so that runs with and without these report comparable losses.

    At most MAX_LOGITS logits are in memory: the forward takes a chunk of rows at a time and
    computes their gradient at once, so that nothing of size (N, V) is kept for the backward.
    Where hidden needs no gradient, as in an evaluation, none is computed.
    """

    # F.linear_cross_entropy(..., options=...) of torch 2.13 has neither softcap nor z_loss, and its
    # loss in bf16 is rounded.

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        softcap: float | None,
        z_loss: float,
        teacher_hidden: Tensor | None = None,
        teacher_weight: Tensor | None = None,
        teacher_softcap: float | None = None,
        distill_weight: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        # The weight in the dtype of matrix products, with rows of zeros below it on a GPU.
        needs_grad = ctx.needs_input_grad[0]
        device_type = weight.device.type
        vocab_size = len(weight)
        grad_weight = torch.zeros_like(weight)
        if torch.is_autocast_enabled(device_type):
            weight = weight.to(torch.get_autocast_dtype(device_type))
        padding = -vocab_size % VOCAB_MULTIPLE[device_type]
        if padding > 0:
            weight = F.pad(weight, (0, 0, 0, padding))
        weight = weight.detach().requires_grad_(needs_grad)

        # Products whose sizes are not multiples of 128 take a tenth longer.
        chunk_size = MAX_LOGITS[device_type] // vocab_size
        chunk_size = chunk_size // 128 * 128 or max(chunk_size, 1)
        grads = []
        scores = []
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            teacher_logits = None
            if teacher_hidden is not None:
                teacher_logits = head(teacher_hidden[rows], teacher_weight, teacher_softcap)
            chunk = hidden[rows].detach().requires_grad_(needs_grad)
            with torch.enable_grad():
                objective, chunk_scores = cross_entropy(
                    head(chunk, weight, softcap)[:, :vocab_size],
                    targets[rows],
                    z_loss=z_loss,
                    teacher_logits=teacher_logits,
                    distill_weight=distill_weight,
                )
            scores.append(chunk_scores)
            if needs_grad:
                grad_chunk, grad_chunk_weight = torch.autograd.grad(objective, (chunk, weight))
                grads.append(grad_chunk)
                grad_weight += grad_chunk_weight[:vocab_size]
        if grads:
            ctx.save_for_backward(torch.cat(grads), grad_weight)
        scores = torch.cat(scores, dim=1)
        ctx.mark_non_differentiable(scores)
        return scores[0].sum(), scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        no_gradients = [None] * (len(ctx.needs_input_grad) - 2)
        return grad * grad_hidden, grad * grad_weight, *no_gradients


def head(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    """hidden (N, D), weight (V, D) -> logits (N, V) in fp32"""
    return apply_softcap(fp32(F.linear(hidden, weight)), softcap)


class HeadLoss(nn.Module):
    """ChunkedCrossEntropy as a module, which can be compiled apart from the blocks."""

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        return ChunkedCrossEntropy.apply(*arguments)


class LanguageModelLoss(nn.Module):
    """inputs, targets (B, T) -> losses (1 + L,) summed over targets, and scores (3, B T).

    The gradient of the first loss is that of all that training minimizes; its value is that of
    ChunkedCrossEntropy alone. The others are the values of the model's L auxiliary losses.

    With positions (N,), the indices of some tokens in inputs.flatten(), N targets and scores are of
    these tokens, such as the questions of a task, and the head computes no other logits.

    This is the module that is made parallel, and compiled where its parts are not.

    Where `bos` is a token id, it begins a document, and no token attends to another document.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        z_loss: float,
        bos: int | None,
        distillation: Distillation | None = None,
    ):
        super().__init__()
        self.model = model
        self.distillation = distillation  # in a tuple, so that no parameter of it is trained
        self.z_loss = z_loss
        self.bos = bos
        self.head_loss = HeadLoss()

    def forward(
        self, inputs: Tensor, targets: Tensor, positions: Tensor | slice = ALL
    ) -> tuple[Tensor, Tensor]:
        documents = None
        if self.bos is not None:
            documents = document_ids(inputs, self.bos)
        model = self.model
        hidden, losses = model.hidden_states(inputs, documents=documents)
        hidden = hidden.flatten(0, 1)[positions]
        targets = targets.flatten()
        arguments = [hidden, model.unembedding, targets, model.softcap, self.z_loss]
        if self.distillation is not None and torch.is_grad_enabled():
            teacher, weight = self.distillation
            # The teacher needs no gradient.
            teacher_hidden, _ = teacher.hidden_states(inputs, documents=documents)
            arguments += [
                teacher_hidden.flatten(0, 1)[positions],
                teacher.unembedding,
                teacher.softcap,
                weight,
            ]
        loss_sum, scores = self.head_loss(*arguments)

        # Auxiliary losses count where there is a target, as the cross-entropy does.
        sums = [loss_sum]
        for loss in losses:
            aux_sum = (fp32(loss).flatten()[positions] * (targets != IGNORE_INDEX)).sum()
            sums[0] = sums[0] + aux_sum - aux_sum.detach()  # adds its gradient, not its value
            sums.append(aux_sum.detach())
        return torch.stack(sums), scores
