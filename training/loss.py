"""The loss of a language model: cross-entropy of the next token, summed over targets, in nats."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.loader import IGNORE_INDEX, document_ids
from model.layers import apply_softcap, fp32
from model.transformer import Transformer
from training.distillation import Distillation

MAX_LOGITS = {"cpu": 2**24, "cuda": 2**27, "mps": 2**24}  # logits in memory at a time
# Rows of bf16 logits must begin at multiples of 16 bytes for the fast kernels of a GPU, and fill
# their tiles best at multiples of 128. nanoGPT pads GPT-2's 50,257 tokens in its weights instead.
VOCAB_MULTIPLE = {"cpu": 1, "cuda": 128, "mps": 1}


def cross_entropy(
    logits: Tensor, targets: Tensor, *, softcap: float | None = None, z_loss: float = 0.0
) -> Tensor:
    """logits (N, V), targets (N,) -> summed nats, as a definition. Training runs the chunked form.

    The penalty z_loss * log(Z)^2, Z the sum of exponentials (PaLM, 2204.02311), has a gradient but
    is left out of the value, so that runs with and without it report comparable losses.
    """
    logits = apply_softcap(fp32(logits), softcap)
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    log_z = logits.logsumexp(dim=-1)[targets != IGNORE_INDEX]
    penalty = z_loss * log_z.square().sum()
    return loss + penalty - penalty.detach()


class ChunkedCrossEntropy(torch.autograd.Function):
    """hidden (N, D), weight (V, D), targets (N,) -> `cross_entropy` of hidden @ weight.mT.

    With a teacher's hidden (N, C), weight (V, C) and softcap, the gradient is that of Distillation
    at `distill_weight`. The teacher's logits are computed chunk by chunk, too.

    The second result (2, N) is for evaluation and has no gradient: the nats of each target, and 1
    where no token is more likely, which may be true of several in bf16, else 0. Both are 0 where
    the target is IGNORE_INDEX.

    At most MAX_LOGITS logits are in memory: the forward takes a chunk of rows at a time and
    computes their gradient at once, so that nothing of size (N, V) is kept for the backward.
    Where hidden needs no gradient, as in an evaluation, none is computed.
    """

    # F.linear_cross_entropy(..., options=...) of torch 2.13 has neither softcap nor z_loss, and its
    # loss in bf16 is rounded. Forward and backward of N=4096, D=512, V=8192 on one CPU thread take
    # 1.22 to 1.34 s there and 1.68 s here in fp32, 1.28 to 1.62 s and 0.95 s in bf16; 0.16 to 0.29
    # GB there and 0.45 to 0.51 GB here.

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
        device_type = weight.device.type
        vocab_size = len(weight)
        token_ids = torch.arange(vocab_size, device=weight.device).int()
        # Products whose sizes are not multiples of 128 take a tenth longer.
        chunk_size = MAX_LOGITS[device_type] // vocab_size
        chunk_size = chunk_size // 128 * 128 or max(chunk_size, 1)
        padding = -vocab_size % VOCAB_MULTIPLE[device_type]
        grad_weight = weight.new_zeros(vocab_size + padding, weight.shape[1])
        if torch.is_autocast_enabled(device_type):
            weight = weight.to(torch.get_autocast_dtype(device_type))
        if teacher_hidden is not None:
            teacher_hidden = teacher_hidden.type_as(weight).split(chunk_size)
            teacher_weight = teacher_weight.type_as(weight)
        if padding:
            weight = F.pad(weight, (0, 0, 0, padding))
        hidden_chunks = hidden.split(chunk_size)
        target_chunks = targets[:, None].split(chunk_size)

        loss = 0.0
        scores = []
        grad_hidden = []
        for index, (chunk, target) in enumerate(zip(hidden_chunks, target_chunks, strict=True)):
            # log Z. The largest logit is subtracted, so that no exponential overflows.
            raw_logits = F.linear(chunk, weight)[:, :vocab_size]
            logits = apply_softcap(fp32(raw_logits), softcap)
            max_logit = logits.amax(dim=-1, keepdim=True)
            exponentials = (logits - max_logit).exp()
            sum_exp = exponentials.sum(dim=-1, keepdim=True)
            log_z = sum_exp.log() + max_logit

            # The loss of a row is log Z minus the target's logit.
            is_counted = target != IGNORE_INDEX
            target_logit = logits.gather(-1, target.clamp(min=0))
            nats = (log_z - target_logit) * is_counted
            loss = loss + nats.sum()
            is_correct = (target_logit == max_logit) & is_counted
            scores.append(torch.cat([nats, is_correct.type_as(nats)], dim=1))
            if not ctx.needs_input_grad[0]:
                continue

            # d loss / d logits = probabilities * (1 + 2 * z_loss * log Z) - one_hot(target).
            # The target IGNORE_INDEX equals no token id.
            scale = is_counted * (1 + 2 * z_loss * log_z) / sum_exp
            probabilities = exponentials.type_as(raw_logits) * scale
            is_target = token_ids == target.int()
            grad_logits = torch.where(
                is_target, probabilities - (1 - distill_weight), probabilities
            )
            if teacher_hidden is not None:
                # d KL / d logits = probabilities - the teacher's.
                teacher_logits = F.linear(teacher_hidden[index], teacher_weight)
                teacher_logits = apply_softcap(fp32(teacher_logits), teacher_softcap)
                teacher_probabilities = teacher_logits.softmax(dim=-1) * is_counted
                grad_logits = grad_logits - distill_weight * teacher_probabilities
            if softcap is not None:
                grad_logits = grad_logits * (1 - (logits / softcap) ** 2)

            # Back through the linear layer.
            grad_logits = grad_logits.type_as(raw_logits)
            if padding:
                grad_logits = F.pad(grad_logits, (0, padding))
            grad_hidden.append(grad_logits @ weight)
            grad_weight += grad_logits.mT @ chunk
        if grad_hidden:
            grad_weight = grad_weight[:vocab_size]
            ctx.save_for_backward(torch.cat(grad_hidden).type_as(hidden), grad_weight)
        scores = torch.cat(scores).mT
        ctx.mark_non_differentiable(scores)
        return loss, scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        no_gradients = [None] * (len(ctx.needs_input_grad) - 2)
        return grad * grad_hidden, grad * grad_weight, *no_gradients


class LanguageModelLoss(nn.Module):
    """inputs, targets (B, T) -> summed nats and scores (2, B T) of ChunkedCrossEntropy.

    This is the module that is compiled and made parallel.

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

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        documents = None
        if self.bos is not None:
            documents = document_ids(inputs, self.bos)
        model = self.model
        hidden = model.hidden(inputs, documents=documents).flatten(0, 1)
        arguments = [hidden, model.unembedding, targets.flatten(), model.softcap, self.z_loss]
        if self.distillation is not None and torch.is_grad_enabled():
            teacher, weight = self.distillation
            with torch.no_grad():
                teacher_hidden = teacher.hidden(inputs, documents=documents).flatten(0, 1)
            arguments += [teacher_hidden, teacher.unembedding, teacher.softcap, weight]
        return ChunkedCrossEntropy.apply(*arguments)
