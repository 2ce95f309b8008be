"""Length extrapolation: evaluate a run with more context than it was trained with."""

import json
from pathlib import Path

import numpy as np
import torch

from data.corpus import Corpus
from data.prepare import prepare
from inference.load import load
from model.attention.mla import LatentAttention
from model.attention.softmax import SoftmaxAttention
from model.rope import YaRN
from model.transformer import Transformer
from run import checkpoint
from run.distributed import DistEnv
from run.errors import without_fix
from run.instantiate import instantiate
from training.evaluation import evaluate
from training.loss import LanguageModelLoss

LONGEST = 4  # times the training context
YARN = f"{LONGEST} YaRN"
MULTIPLES = {"1": 1, "2": 2, "4": LONGEST, YARN: LONGEST}  # by the name of the result
NUM_TARGETS = 16_384  # tokens of text that are scored
BATCH_TOKENS = 4096  # inputs computed together


def measure_lengths(run_dir: Path | None) -> dict:
    """Score a run's newest checkpoint at multiples of its training context.

    Returns, by the names of MULTIPLES, `last_loss`, or the accuracy of a task whose rows are drawn
    at this length, or the reason why there is neither. The result is kept in the run's folder.
    """
    newest, settings = open_run(run_dir)
    file = newest.parents[1] / f"lengths-{newest.name}.json"
    if file.exists():
        return json.loads(file.read_text())
    lengths = {}
    for name, multiple in MULTIPLES.items():
        try:
            model, *_ = load(newest, context=multiple * settings["context"])
            if name == YARN:
                scale_positions(model, settings["context"])
            corpus = open_corpus(settings)
            if len(corpus.validation) > 0:
                lengths[name] = last_loss(model, corpus, settings)
            else:
                metrics = evaluate_corpus(model, corpus, settings)
                lengths[name] = metrics[f"{corpus.task.name}_accuracy"]
        except ValueError as error:
            lengths[name] = without_fix(error)
    file.write_text(json.dumps(lengths))
    return lengths


@torch.inference_mode()
def last_loss(model: Transformer, corpus: Corpus, settings: dict) -> float:
    """The nats per token of the last half training context of windows of the held-out text.

    At all contexts of the model these are the same targets, with more or less in front of them.
    Windows have the longest context. They overlap, but not in their targets.
    """
    tokens = torch.from_numpy(corpus.validation.astype(np.int64))
    length = LONGEST * settings["context"] + 1
    if len(tokens) < length:
        raise ValueError(
            f"only {len(tokens)} held-out tokens (a window has {length}). fix: a larger text"
        )
    num_targets = settings["context"] // 2  # of a window
    windows = tokens.unfold(0, length, num_targets)[: NUM_TARGETS // num_targets + 1]
    loss_module = loss_of(model, corpus, settings)
    nats = []
    rows = windows[:, -model.context - 1 :]  # each ends with the same targets at any context
    batch_size = max(1, BATCH_TOKENS // model.context)
    for batch in rows.split(batch_size):
        batch = batch.to(model.embed.weight.device)
        _, scores = loss_module(batch[:, :-1], batch[:, 1:])
        batch_nats = scores[0].view(len(batch), -1)
        nats.append(batch_nats[:, -num_targets:])
    return torch.cat(nats).mean().item()


def scale_positions(model: Transformer, trained_context: int) -> None:
    """Scale RoPE by YaRN with the paper's constants, without further training.

    Layers that were trained with a scaling keep that.
    """
    yarn = YaRN(factor=LONGEST, fast=32, slow=1, context=trained_context)
    for module in model.modules():
        if isinstance(module, SoftmaxAttention | LatentAttention):
            dim, base, scaling = module.rotary
            module.rotary = (dim, base, scaling or yarn)


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
    return prepare(instantiate(settings["data"], "data"), Path(".cache"))


def loss_of(model: Transformer, corpus: Corpus, settings: dict) -> LanguageModelLoss:
    bos = corpus.tokenizer.bos if settings["document_mask"] else None
    return LanguageModelLoss(model, z_loss=0.0, bos=bos)


def evaluate_corpus(model: Transformer, corpus: Corpus, settings: dict) -> dict:
    """The metrics of all held-out data in windows of the model's context, as training has them."""
    return evaluate(
        loss_of(model, corpus, settings),
        corpus,
        corpus.validation_tokens(model.context),
        model.context,
        max(1, BATCH_TOKENS // model.context),
        torch.float32,
        DistEnv(0, 1, model.embed.weight.device),
        stop=lambda: 0,
        with_gradients=False,
    )
