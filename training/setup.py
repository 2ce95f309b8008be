"""From a config to what a run needs: validated settings, device, corpus."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import DictConfig

from checkpoints import checkpoint
from checkpoints.weights import dtype_name
from common import compilation, config, errors, hardware
from common.instantiate import instantiate
from data.loader import Loader, min_corpus_tokens
from data.prepare import Corpus, prepare
from data.sources import Source
from model.materialize import build_model
from training.trainer import Trainer


def validate(cfg: DictConfig, *more: Callable[[dict], object]) -> list:
    """Plain settings that a model and an optimizer can be built from, and what each of `more` makes of them.

    Ends with every fault at once.
    """
    settings = config.resolve(cfg)
    found = config.find_problems(settings, int(os.environ.get("WORLD_SIZE", "1")))
    made, apart = [], (*config.GROUPS, "device", "precision", "compile", "init_from")
    if not any(problem.startswith(apart) for problem in found):
        for attempt in (
            dry_build,
            lambda settings: instantiate(settings["schedule"], "training")(0, 1),
            *more,
        ):
            try:
                made.append(attempt(settings))
            except (
                ValueError,
                TypeError,
                RuntimeError,
            ) as error:  # a knob of the wrong kind fails somewhere inside
                found.append(str(error))
    if found:
        errors.exit_with(errors.INPUT, *found, rank0_only=True)
    return [settings, *made[2:]]


def dry_build(settings: dict) -> None:
    """The model and its optimizer, as shapes without memory.

    Raises ValueError for what cannot be built, trained or saved.
    """
    model = build_model(settings["model"]).to("meta")
    for name, tensor in model.state_dict().items():
        dtype_name(name, tensor)
    with torch.device("meta"):
        instantiate(settings["optimizer"], "training")(model)
        model(torch.zeros(1, 2, dtype=torch.int64), model.new_cache(1, 2, torch.float32, "meta"))


def choose_machine(settings: dict) -> tuple[torch.device, torch.dtype, tuple[bool, str]]:
    device = hardware.pick_device(settings["device"])
    precision = hardware.pick_precision(settings["precision"], device)
    return (
        device,
        precision,
        compilation.pick_compile(settings["compile"], device, config.is_long_run(settings)),
    )


def adopt_pretrained(settings: dict, words: list[str]) -> Path | None:
    """The model to begin with. Its shape and tokenizer become the run's, and context and name unless `words` say some.

    Raises ValueError for words about a model.
    """
    if settings["init_from"] is None:
        return None
    if said := [
        word for word in words if re.match(r"[+~]*(model|attention|data\.tokenizer)\b", word)
    ]:
        raise ValueError(
            f"init_from has a model of its own ({' '.join(said)}). fix: leave these words out"
        )
    source = Path(settings["init_from"]).expanduser()
    start = checkpoint.find_model(source)
    tree = checkpoint.load_config(start)["model"]
    if not any(word.startswith("context=") for word in words):
        settings["context"] = tree["context"]
        if found := config.find_problems(settings, int(os.environ.get("WORLD_SIZE", "1"))):
            raise ValueError(found[0])
    if not any(word.startswith("name=") for word in words):
        known = source.resolve().name.removesuffix(".bin")
        settings["name"] = re.sub(
            r"[^\w.-]+", "-", f"{settings['name'].partition('-')[0]}-{known}", flags=re.ASCII
        )
    settings["model"] = tree | {"context": settings["context"]}
    settings["data"]["tokenizer"] = str(checkpoint.tokenizer_path(start))
    with torch.device("meta"):
        checkpoint.check_weights(instantiate(settings["model"]), start)
    return start


def load_corpus(settings: dict, source: Source) -> tuple[Corpus, Loader]:
    """The text, prepared; the model's vocabulary becomes its tokenizer's."""
    sizes = {
        "context": settings["context"],
        "batch": settings["batch_tokens"] // settings["context"],
    }
    first = os.environ.get("RANK", "0") == "0"
    corpus = prepare(
        source, Path(".cache"), min_tokens=min_corpus_tokens(**sizes), quiet=not first
    )
    settings["model"]["vocab_size"] = corpus.tokenizer.vocab_size
    return corpus, Loader(corpus.train, **sizes, seed=settings["seed"])


def out_of_memory(error: RuntimeError, micro: int) -> str:
    """What there is to do, if that is the error; raises any other."""
    if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
        raise error
    fix = (
        f"micro_batch={micro // 2}, which changes nothing else"
        if micro > 1
        else "a smaller model or context"
    )
    return f"{str(error).partition('. ')[0]} (micro_batch={micro}). fix: {fix}"


def summary(trainer: Trainer, plan: str) -> str:
    millions = sum(p.numel() for p in trainer.model.parameters()) / 1e6
    text = f"{sum(map(len, trainer.corpus.train)) / 1e6:.1f} M tokens of text"
    peak = (
        "peak rate unknown, so no MFU"
        if trainer.peak is None
        else f"peak {trainer.peak / 1e12:.0f} TFLOP/s"
    )
    return (
        f"{trainer.run}: {millions:.1f} M parameters, {trainer.flops / 1e6:.0f} MFLOP a token, {text}\n"
        f"{trainer.ranks.world_size} x {trainer.ranks.device}, {trainer.precision}, {plan}, {peak}"
    )
