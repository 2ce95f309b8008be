"""Training against the predictions of another model, the teacher: Hinton et al., 1503.02531."""

from pathlib import Path
from typing import NamedTuple

import torch

from data.corpus import Corpus
from data.tokenizer import Tokenizer, tokenizer_file
from inference.load import load_model
from model.transformer import Transformer
from run import checkpoint
from run.settings import Settings


class Distillation(NamedTuple):
    """A model to learn from, which is not trained.

    The gradient is that of weight * KL(teacher || model) + (1 - weight) * cross-entropy. The value
    of the loss that is reported remains the cross-entropy.
    """

    teacher: Transformer
    weight: float


def load_distillation(
    settings: Settings, device: torch.device, precision: torch.dtype
) -> Distillation | None:
    """The teacher, if any, that `check_teacher` has found; each device has all of it."""
    if settings.distill is None:
        return None
    dtype = torch.float32
    if precision == torch.bfloat16:  # fp16 has too small a range for weights that are not scaled
        dtype = precision
    teacher = load_model(Path(settings.distill), device, dtype, settings.context)
    return Distillation(teacher.requires_grad_(False), settings.distill_weight)


def check_teacher(settings: Settings, corpus: Corpus) -> None:
    """Let `distill` name the teacher's checkpoint, which is verified once.

    Raises ValueError for a teacher whose tokens are not those of the model.
    """
    if settings.distill is None:
        return
    path = checkpoint.find_model(settings.distill)
    model = settings.model
    teacher = checkpoint.load_model_config(path)
    named = f"distill={settings.distill}"
    if teacher["context"] < model["context"]:
        raise ValueError(
            f"the teacher's context is too short ({named}: {teacher['context']} tokens, "
            f"context={model['context']}). fix: context={teacher['context']}"
        )
    tokenizer = Tokenizer.load(tokenizer_file(path))
    is_same = tokenizer.sha256 == corpus.tokenizer.sha256
    if not is_same or teacher["vocab_size"] != model["vocab_size"]:
        raise ValueError(
            f"the teacher has another vocabulary ({named}: {teacher['vocab_size']} tokens, the "
            f"model {model['vocab_size']}). fix: a teacher with the same tokenizer"
        )
    settings.distill = str(path)
