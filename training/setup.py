"""From a config to what a run needs: a model that can be built, a corpus, and batches."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from data.corpus import Corpus
from data.loader import Loader
from data.prepare import prepare
from data.tokenizer import tokenizer_file
from run import checkpoint, compilation, errors, hardware
from run.instantiate import instantiate
from run.settings import Settings
from training.distillation import check_teacher
from training.trainer import Trainer

PRETRAINED = ("model", "attention", "ffn", "norm", "data.tokenizer")  # overrides that it refuses


def set_up_run(settings: Settings, overrides: list[str]) -> tuple[Path | None, torch.device]:
    """Validate a config on this machine -> the checkpoint to start from, and the device.

    Takes model and tokenizer from `init_from`. Raises ValueError for what cannot be trained here.
    """
    pretrained = adopt_pretrained(settings, overrides)
    device = hardware.pick_device(settings.device)
    hardware.pick_precision(settings.precision, device)
    compilation.pick_compile(settings.compile, device, is_long=True)
    check_buildable(settings)
    return pretrained, device


def check_buildable(settings: Settings) -> Settings:
    """Build all parts without memory, and run two tokens through the model.

    Raises ValueError for what does not go together, and what cannot be built.
    """
    settings.check_combinations(int(os.environ.get("WORLD_SIZE", "1")))
    try:
        model = checkpoint.dry_run(settings.model)
        with torch.device("meta"):
            instantiate(settings.optimizer, "training", "optimizer")(model)
        instantiate(settings.schedule, "training", "schedule")(0, 1)
        source = instantiate(settings.data, "data")
    except TypeError as error:
        raise ValueError(str(error)) from None
    has_epochs = settings.max_epochs is not None and not source.is_endless
    if settings.steps is None and settings.max_minutes is None and not has_epochs:
        raise ValueError(
            "the run has no end (steps=null max_minutes=null, and no epochs to count). "
            "fix: max_minutes=5"
        )
    return settings


def adopt_pretrained(settings: Settings, overrides: list[str]) -> Path | None:
    """Take model and tokenizer from `init_from`, and context and name unless they are overridden.

    Returns the checkpoint to load. Raises ValueError for overrides of the model.
    """
    source = settings.init_from
    if source is None:
        return None
    keys = [word.lstrip("+~").partition("=")[0] for word in overrides]
    refused = [word for word in overrides if word.lstrip("+~").startswith(PRETRAINED)]
    if refused:
        raise ValueError(
            f"init_from has a model of its own ({' '.join(refused)}). fix: leave these out; for "
            f"another attention: python -m tools.convert {source} attention=NAME --out Y, then "
            "init_from=Y"
        )
    pretrained = checkpoint.find_model(source)
    model = checkpoint.load_model_config(pretrained)

    # The model keeps its shape, but may be trained on shorter or longer sequences.
    if "context" not in keys:
        settings.context = model["context"]
    settings.model = model | {"context": settings.context}
    settings.data["tokenizer"] = str(tokenizer_file(pretrained))
    # The run is named after its data and the pretrained model.
    if "name" not in keys:
        data = settings.name.partition("-")[0]
        settings.name = re.sub(r"[^\w.-]", "-", f"{data}-{Path(source).resolve().name}")
    return pretrained


def open_corpus(data: dict) -> Corpus:
    """What a run is trained on and judged by. Raises ValueError for text that is not there."""
    return prepare(instantiate(data, "data"), Path(".cache"))


def load_corpus(settings: Settings) -> tuple[Corpus, Loader]:
    """Prepare the text. The vocabulary of a new model becomes that of the tokenizer."""
    corpus = open_corpus(settings.data)
    # A pretrained model may have more rows than its tokenizer has tokens.
    if settings.init_from is None:
        settings.model["vocab_size"] = corpus.tokenizer.vocab_size
    check_teacher(settings, corpus)
    batch_size = settings.batch_tokens // settings.context
    loader = corpus.loader(settings.context, batch_size, settings.seed)
    return corpus, loader


@contextmanager
def report_machine_errors() -> Iterator[None]:
    """End with exit code 2 and a line where compilation fails or memory runs out."""
    try:
        yield
    except RuntimeError as error:
        problem = compilation.compile_problem(error)
        fix = "compile=false resume=true"
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            problem = str(error).partition(". ")[0]
            fix = (
                "a smaller micro_batch, which changes rounding alone, or a smaller model or context"
            )
        if problem is None:
            raise
        errors.exit_with(errors.INPUT, f"{problem}. fix: {fix}")


def summary(trainer: Trainer) -> str:
    """Lines about a run before it starts: sizes, what it is computed with, and what ends it."""
    settings = trainer.settings
    passes = trainer.steps * trainer.loader.batch_size / trainer.loader.rows_per_epoch
    text = (
        f"{trainer.run_dir}: {trainer.model.num_parameters() / 1e6:.1f} M parameters, "
        f"{trainer.flops_per_token / 1e6:.0f} MFLOP per token, {trainer.corpus.description}\n"
        f"{trainer.ranks.world_size} x {trainer.ranks.device}, {trainer.precision}, "
        f"compile={trainer.is_compiled}, micro_batch={trainer.micro_batch_size}\n"
        f"ends after steps={trainer.steps} or max_minutes={settings.max_minutes}"
    )
    if passes > 1:
        text += f", in at most {passes:.1f} passes over the text"
    return text
