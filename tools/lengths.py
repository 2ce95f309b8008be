"""Length extrapolation: evaluate a run at longer contexts than in training."""

from pathlib import Path

import torch

from data.corpus import Corpus
from model.transformer import Transformer
from run import checkpoint
from run.distributed import DistEnv
from run.progress import say
from run.signals import Signals
from tools.scoring import Row, load_to_score, total_nats
from training.evaluation import evaluate
from training.loss import LanguageModelLoss
from training.setup import open_run_corpus

MULTIPLES = (1, 2, 4)  # of the training context
LONGEST = MULTIPLES[-1]
NUM_TARGETS = 16_384  # number of text tokens that are scored
BATCH_TOKENS = 4096  # number of inputs processed together


def measure_lengths(run_dir: Path | None, device: str = "auto") -> dict[str, float]:
    """Return `last_loss` of a run's newest checkpoint at MULTIPLES of its training context.

    Raises ValueError if there is no run, or if its text has changed.
    """
    newest, settings = open_run(run_dir)
    corpus = open_run_corpus(newest, settings)
    losses = {}
    for multiple in MULTIPLES:
        context = multiple * settings["context"]
        model, _, _, precision = load_to_score(
            newest, device, context=context, precision=settings["precision"]
        )
        losses[str(multiple)] = last_loss(model, corpus, settings, precision)
    return losses


def last_loss(model: Transformer, corpus: Corpus, settings: dict, precision: torch.dtype) -> float:
    """Return nats per token of held-out text, scoring half a training context per window.

    Only the end of a window is scored, so that every context length scores the same targets, with
    more or less text in front of them. Windows overlap, but their targets do not.
    """
    longest = LONGEST * settings["context"] + 1
    if len(corpus.validation) < longest:
        raise ValueError(
            f"too few held-out tokens ({len(corpus.validation)}; a window needs {longest}). fix: "
            "use a larger text; for a task: --slices --context N"
        )
    num_targets = settings["context"] // 2  # per window
    ends = range(longest, len(corpus.validation) + 1, num_targets)
    length = model.context + 1
    rows = []
    for end in ends[: NUM_TARGETS // num_targets + 1]:
        tokens = corpus.validation[end - length : end].tolist()
        assert len(tokens) == length
        rows.append(Row(tokens, first=length - num_targets))
    batch_size = max(1, BATCH_TOKENS // model.context)
    bos = document_start(corpus, settings)
    nats = total_nats(model, rows, batch_size, bos, precision=precision)
    return nats / (len(rows) * num_targets)


def open_run(path: Path | None) -> tuple[Path, dict]:
    """Return the newest checkpoint of a run, by default the newest run, and its settings.

    Raises ValueError for a model that is not from a run.
    """
    newest = checkpoint.find_model(path)
    settings = checkpoint.load_config(newest)
    if not {"data", "text"} <= settings.keys():
        raise ValueError(f"not a run, so it has no held-out data ({newest}). fix: --text FILE")
    return newest, settings


def document_start(corpus: Corpus, settings: dict) -> int | None:
    """Return the token that begins a document if the run masks other documents, else None."""
    return corpus.tokenizer.bos if settings["document_mask"] else None


def evaluate_corpus(
    model: Transformer, corpus: Corpus, settings: dict, precision: torch.dtype
) -> dict:
    """Compute the training metrics over all held-out data.

    The windows have the length of the model's context.
    """
    corpus = corpus.with_context(model.context)
    num_tokens = corpus.validation_tokens(model.context)
    batch_size = max(1, BATCH_TOKENS // model.context)
    say(f"evaluating on {num_tokens:,} held-out tokens")
    return evaluate(
        LanguageModelLoss(model, z_loss=0.0, bos=document_start(corpus, settings)),
        corpus,
        num_tokens,
        model.context,
        batch_size,
        precision,
        DistEnv(0, 1, model.embed.weight.device),
        Signals(),
        with_gradients=False,
    )
