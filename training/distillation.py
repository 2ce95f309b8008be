"""Training against the predictions of another model, the teacher. Hinton et al., 1503.02531."""

from dataclasses import dataclass
from pathlib import Path

import torch

from data.corpus import Corpus
from data.tokenizer import Tokenizer, tokenizer_file
from model.transformer import Transformer
from run import checkpoint
from run.settings import Settings


@dataclass(frozen=True)
class Distillation:
    """A frozen model to learn from.

    Training minimizes weight * KL(teacher || model) + (1 - weight) * cross-entropy. It reports the
    cross-entropy.
    """

    # This class is not a module, so the teacher is not a submodule of the loss. It is neither
    # trained nor saved, and `train()` does not switch it to training mode.
    teacher: Transformer
    weight: float


def load_distillation(
    settings: Settings, device: torch.device, precision: torch.dtype
) -> Distillation | None:
    """Load the checkpoint `distill`, if given; each device holds the whole teacher."""
    if settings.distill is None:
        return None
    dtype = torch.float32
    if precision == torch.bfloat16:  # the range of fp16 is too small for unscaled weights
        dtype = precision
    model = checkpoint.load_model(Path(settings.distill), device, dtype, settings.context)
    return Distillation(model.requires_grad_(False), settings.distill_weight)


def check_teacher(settings: Settings, corpus: Corpus) -> None:
    """Raise ValueError if the teacher has a different tokenizer or a shorter context."""
    path = Path(settings.distill)
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
            f"the teacher has a different tokenizer ({named}: {teacher['vocab_size']} tokens, "
            f"SHA-256 {tokenizer.sha256[:8]}; the model: {model['vocab_size']}, "
            f"{corpus.tokenizer.sha256[:8]}). fix: use a teacher with the same tokenizer"
        )
