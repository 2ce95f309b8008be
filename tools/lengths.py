"""Length: what a run makes of more context than it was trained with."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from checkpoints import checkpoint
from common.instantiate import instantiate
from data.corpus import Corpus
from data.loader import IGNORE_INDEX
from data.prepare import prepare
from inference.load import load
from model.attention.mla import LatentAttention
from model.attention.softmax import SoftmaxAttention
from model.rope import YaRN
from model.transformer import Transformer
from training.distributed import DistEnv
from training.evaluation import evaluate
from training.loss import LanguageModelLoss

YARN = "4 YaRN"
MULTIPLES = {"1": 1, "2": 2, "4": 4, YARN: 4}  # of the training context, by the name of the result
NUM_TARGETS = 16_384  # tokens of text that are scored
BATCH_TOKENS = 4096  # inputs computed together


@dataclass
class LastTargets(Corpus):
    """A text in windows of the longest context, of which the last half `trained_context` is scored.

    A shorter context has the same targets, and less of a window in front of them. Windows overlap,
    but not in their targets.
    """

    trained_context: int

    def evaluation(
        self, num_tokens: int, context: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield inputs, targets and cells, which are all one, (B, T) of windows of `context`."""
        tokens = torch.from_numpy(np.concatenate(self.validation).astype(np.int64))
        length = max(MULTIPLES.values()) * self.trained_context + 1
        step = self.trained_context // 2
        if len(tokens) < length:
            raise ValueError(f"{len(tokens)} held-out tokens (a window has {length}). fix: more")
        windows = tokens.unfold(0, length, step)[: NUM_TARGETS // step + 1]
        for window in windows.split(batch_size):
            targets = window[:, -context:].clone()
            targets[:, :-step] = IGNORE_INDEX
            yield window[:, -context - 1 : -1], targets, torch.zeros_like(targets)


def measure_lengths(run_dir: Path | None) -> dict:
    """Score a run's newest checkpoint at multiples of its training context.

    Returns its step and, by the names of MULTIPLES, the nats per token of `LastTargets`, or the
    accuracy of a task whose rows are drawn at this length, or the reason why there is neither. The
    result is kept in the run's lengths.json.
    """
    newest, settings = open_run(run_dir)
    step = int(newest.name.removeprefix("step-"))
    file = newest.parents[1] / "lengths.json"
    if file.exists():
        lengths = json.loads(file.read_text())
        if lengths["step"] == step:
            return lengths

    lengths = {"step": step}
    device = "cpu" if settings["device"] == "cpu" else "auto"
    for name, multiple in MULTIPLES.items():
        try:
            corpus = open_corpus(settings)
            if corpus.validation:
                corpus = LastTargets(**vars(corpus), trained_context=settings["context"])
            context = multiple * settings["context"]
            model, *_ = load(newest, device, context=context)
            if name == YARN:
                scale_positions(model, multiple, settings["context"])
            metrics = evaluate_corpus(model, corpus, settings, max(1, BATCH_TOKENS // context))
            accuracies = [metrics[key] for key in metrics if key.endswith("_accuracy")]
            lengths[name] = accuracies[0] if accuracies else metrics["val_loss"]
        except ValueError as error:
            lengths[name] = str(error).partition(". fix: ")[0]
    # The file is whole once it has its name.
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(lengths))
    temporary.replace(file)
    return lengths


def scale_positions(model: Transformer, factor: int, trained_context: int) -> None:
    """Scale RoPE by YaRN with the paper's constants, without further training.

    Raises ValueError where no layer has RoPE that is not scaled yet.
    """
    scaling = YaRN(factor=factor, fast=32, slow=1, context=trained_context)
    num_scaled = 0
    for module in model.modules():
        if isinstance(module, SoftmaxAttention | LatentAttention):
            dim, base, trained_scaling = module.rotary
            if base is not None and trained_scaling is None:
                module.rotary = (dim, base, scaling)
                num_scaled += 1
    if num_scaled == 0:
        raise ValueError("no layer has RoPE without scaling. fix: attention=gqa")


def open_run(path: Path | None) -> tuple[Path, dict]:
    """The newest checkpoint of a run, by default of the newest run, and its settings.

    Raises ValueError for a model from elsewhere.
    """
    newest = checkpoint.find_model(path)
    settings = checkpoint.load_config(newest)
    if "data" not in settings:
        raise ValueError(f"not a run, so no data is held out ({newest}). fix: --text FILE")
    return newest, settings


def open_corpus(settings: dict) -> Corpus:
    """What a run is trained on and judged by. Raises ValueError for text that is not there."""
    return prepare(instantiate(settings["data"], "data"), Path(".cache"), quiet=True)


def evaluate_corpus(model: Transformer, corpus: Corpus, settings: dict, batch_size: int) -> dict:
    """The metrics of all held-out data in windows of the model's context, as training has them."""
    bos = corpus.tokenizer.bos if settings["document_mask"] else None
    return evaluate(
        LanguageModelLoss(model, z_loss=0.0, bos=bos),
        corpus,
        corpus.validation_tokens(model.context),
        model.context,
        batch_size,
        torch.float32,
        DistEnv(0, 1, model.embed.weight.device),
        stop=lambda: 0,
        with_gradients=False,
    )
