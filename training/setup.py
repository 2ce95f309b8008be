"""From a config to what a run needs: valid settings, device, precision and corpus."""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from data.corpus import Corpus
from data.loader import Loader, min_corpus_tokens
from data.prepare import prepare
from data.sources import Source
from model.build import build_model
from run import checkpoint, compilation, config, errors, hardware
from run.instantiate import instantiate
from tools.formats import converted_model
from tools.formats.weights import dtype_name
from training.distillation import check_teacher
from training.trainer import Trainer

MODEL_OVERRIDE = re.compile(r"[+~]*(model|ffn|norm|data\.tokenizer)\b|[+~]+attention\b")
BLOCKING_KEYS = (*config.GROUPS, "device", "precision", "compile", "init_from")


@dataclass
class RunSetup:
    """What a valid config comes to on this machine, before any data is read."""

    settings: dict
    pretrained: Path | None  # the model to start from
    device: torch.device
    precision: torch.dtype  # of matrix products
    compile_reason: str
    source: Source


@contextmanager
def collect(problems: list[str]) -> Iterator[None]:
    """Add the error of the block, if it raises one, so that all are reported at once."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        problems.append(str(error))


def report(problems: list[str]) -> None:
    """End the process with exit code 2 where there are problems."""
    if problems:
        errors.exit_with(errors.INPUT, *dict.fromkeys(problems), rank0_only=True)


def set_up_run(settings: dict, overrides: list[str]) -> RunSetup:
    """Validate a config and resolve what depends on this machine. Ends with exit code 2."""
    # Adopt a pretrained model first, so that it is what is validated.
    problems = []
    with collect(problems):
        pretrained = adopt_pretrained(settings, overrides)
    check_settings(settings, problems)
    # What this machine has, and the source of the text.
    with collect(problems):
        device = hardware.pick_device(settings["device"])
        precision = hardware.pick_precision(settings["precision"], device)
        _, reason = compilation.pick_compile(settings["compile"], device, is_long=True)
    with collect(problems):
        source = instantiate(settings["data"], "data")
    report(problems)
    return RunSetup(settings, pretrained, device, precision, reason, source)


def load_settings(settings: dict) -> dict:
    """Validate a config for commands that do not train. Ends with exit code 2."""
    problems = []
    check_settings(settings, problems)
    report(problems)
    return settings


def check_settings(settings: dict, problems: list[str]) -> None:
    """Collect what is out of range, and model, optimizer and schedule if they cannot be built."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    messages = config.find_problems(settings, world_size)

    # A problem of these keys would only show again, less clearly, where they are used.
    problems += messages
    if any(message.startswith(BLOCKING_KEYS) for message in messages):
        report(problems)
    with collect(problems):
        dry_build(settings)
    with collect(problems):
        schedule = instantiate(settings["schedule"], "training", "schedule")
        schedule(0, 1)


def dry_build(settings: dict) -> None:
    """Build the model and its optimizer as shapes without memory, and run two tokens through it.

    Raises ValueError for what cannot be built, trained or saved.
    """
    # A tensor of a type that has no name in a checkpoint could not be saved.
    model = build_model(settings["model"]).to("meta")
    for name, tensor in model.state_dict().items():
        dtype_name(name, tensor)
    with torch.device("meta"):
        instantiate(settings["optimizer"], "training", "optimizer")(model)
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        model(tokens, model.new_cache(1, 2, torch.float32, "meta"))


def adopt_pretrained(settings: dict, overrides: list[str]) -> Path | None:
    """Take model and tokenizer from `init_from`, and context and name unless they are overridden.

    Overrides of `attention` convert it. Returns the checkpoint to load. Raises ValueError for other
    overrides of the model, and for a conversion without a formula.
    """
    if settings.get("init_from") is None:
        return None
    keys = [word.lstrip("+~").partition("=")[0] for word in overrides]
    refused = [word for word in overrides if MODEL_OVERRIDE.match(word)]
    if refused:
        raise ValueError(
            f"init_from has a model of its own ({' '.join(refused)}). "
            "fix: leave these out; its attention can be converted"
        )

    # The model keeps its shape, but may be trained on shorter or longer sequences.
    folder = Path(settings["init_from"]).expanduser()
    pretrained = checkpoint.find_model(folder)
    model = checkpoint.load_config(pretrained)["model"]
    model = converted_model.convert_config(model, overrides)
    if "context" not in keys:
        settings["context"] = model["context"]
    settings["model"] = model | {"context": settings.get("context")}
    settings["attention"] = model["attention"]
    settings["data"]["tokenizer"] = str(checkpoint.tokenizer_path(pretrained))
    converted_model.load_converted(build_model(settings["model"]), settings["model"], pretrained)

    # The run is named after its data and the pretrained model.
    if "name" not in keys:
        data = settings["name"].partition("-")[0]
        stem = folder.resolve().name.removesuffix(".bin")
        settings["name"] = re.sub(r"[^\w.-]+", "-", f"{data}-{stem}", flags=re.ASCII)
    return pretrained


def load_corpus(settings: dict, source: Source) -> tuple[Corpus, Loader]:
    """Prepare the text. The vocabulary of a new model becomes that of the tokenizer."""
    context = settings["context"]
    batch_size = settings["batch_tokens"] // context
    min_tokens = min_corpus_tokens(context, batch_size)
    is_quiet = os.environ.get("RANK", "0") != "0"
    corpus = prepare(source, Path(".cache"), min_tokens, is_quiet)
    # A pretrained model may have more rows than its tokenizer has tokens.
    if settings.get("init_from") is None:
        settings["model"]["vocab_size"] = corpus.tokenizer.vocab_size
    check_teacher(settings, corpus)
    loader = corpus.loader(context, batch_size, settings["seed"])
    is_bounded = settings["steps"] is not None or settings["max_minutes"] is not None
    if loader.rows_per_epoch == math.inf and not is_bounded:
        raise ValueError(
            "the run has no end (steps=null, max_minutes=null, and no row comes twice). "
            "fix: max_minutes=5"
        )
    return corpus, loader


@contextmanager
def report_machine_errors(trainer: Trainer | None) -> Iterator[None]:
    """End with exit code 2 and a line where compilation fails or memory runs out.

    While there is no trainer yet, no micro-batch is in memory, but the model alone.
    """
    try:
        yield
    except RuntimeError as error:
        if compilation.is_compile_error(error):
            problem = f"compilation failed ({compilation.first_error_line(error)})"
            fix = "compile=false resume=true"
        elif isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            problem = str(error).partition(". ")[0]
            fix = "a smaller model"
            micro_batch = 0 if trainer is None else trainer.micro_batch_size
            if micro_batch > 0:
                problem += f" ({micro_batch=})"
                fix += " or context"
            if micro_batch > 1:
                smaller = max(size for size in range(1, micro_batch) if micro_batch % size == 0)
                fix = f"micro_batch={smaller}, which changes nothing else"
        else:
            raise
        errors.exit_with(errors.INPUT, f"{problem}. fix: {fix}")


def summary(trainer: Trainer, setup: RunSetup) -> str:
    """Lines about a run before it starts: sizes, what it is computed with, and what ends it."""
    peak = "peak FLOP/s unknown, so no MFU"
    if trainer.peak_flops is not None:
        peak = f"peak {trainer.peak_flops / 1e12:.0f} TFLOP/s"
    teacher = ""
    if trainer.settings["distill"] is not None:
        weight = trainer.settings["distill_weight"]
        teacher = f"\nlearning from {trainer.settings['distill']} (distill_weight={weight})"
    return (
        f"{trainer.run_dir}: {trainer.model.num_parameters() / 1e6:.1f} M parameters, "
        f"{trainer.flops_per_token / 1e6:.0f} MFLOP per token, "
        f"{trainer.corpus.description}\n"
        f"{trainer.ranks.world_size} x {trainer.ranks.device}, {trainer.precision}, "
        f"compile={trainer.settings['compile']} ({setup.compile_reason}), {peak}\n"
        f"micro_batch={trainer.micro_batch_size} ({micro_batch_reason(trainer)}), "
        f"{describe_length(trainer)}{teacher}"
    )


def micro_batch_reason(trainer: Trainer) -> str:
    """Why a forward on one device has so many sequences."""
    if trainer.settings["micro_batch"] is not None:
        return "as asked"
    if trainer.ranks.device.type == "cuda":
        return "what the free memory holds, or the whole batch"
    return f"at most {config.CPU_MICRO_BATCH} without CUDA"


def describe_length(trainer: Trainer) -> str:
    """What bounds the number of steps, before it is fitted."""
    bounds = []
    if trainer.steps < math.inf:
        key = "max_epochs" if trainer.settings["steps"] is None else "steps"
        bounds.append(f"at most {trainer.steps:,} steps ({key}={trainer.settings[key]})")
    if trainer.settings["max_minutes"] is not None:
        minutes = trainer.settings["max_minutes"]
        bounds.append(f"as many steps as max_minutes={minutes} has room for")
    return ", or ".join(bounds)
