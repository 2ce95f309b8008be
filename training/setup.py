"""Set up a run from its config: check the model, open the corpus, and build all parts."""

import math
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from data.corpus import Corpus
from data.loader import Loader
from data.prepare import prepare
from data.tokenizer import tokenizer_file
from run import checkpoint, compilation, errors, folder, hardware, threads
from run.compose import compose, size_words
from run.instantiate import instantiate
from run.paths import cache_folder
from run.progress import print0
from run.settings import Settings
from training.adoption import adopt_weights
from training.budget import TimeBudget, planned_steps
from training.checkpointer import Checkpointer, read_saved_run
from training.environment import Environment
from training.evaluation import Evaluator
from training.logger import Logger
from training.memory import choose_micro_batch
from training.meter import Meter
from training.steps import Progress
from training.trainer import Trainer


@dataclass(frozen=True)
class Start:
    """Where a run begins: at its checkpoint, with the weights of another model, or from scratch."""

    resumed: Path | None = None
    pretrained: Path | None = None


@errors.exit_on_invalid_input()
def read_settings(overrides: list[str]) -> tuple[Settings, Start, torch.device]:
    """Return the settings of `python train.py OVERRIDES`, where the run begins, and its device.

    Exits with an error for invalid overrides, and if this machine cannot train the run.
    """
    settings = compose(overrides)
    run = folder.given_run_dir(settings)
    start = Start()
    is_begun = settings.resume and folder.has_checkpoint(run)
    if settings.resume and not is_begun:
        print0(
            f"nothing to resume: {run} has no checkpoint. Starting a new run with these settings"
        )
    if is_begun:
        start = Start(resumed=checkpoint.newest_checkpoint(run))
        saved = checkpoint.load_config(start.resumed)
        settings, changes = folder.resume_settings(overrides, saved, run)
        for change in changes:
            print0(f"changed: {change}")
    elif settings.init_from is not None:
        settings, pretrained = adopt_pretrained(settings, overrides)
        start = Start(pretrained=pretrained)
    # With a given tokenizer, data.vocab_size and data.bos have no effect. A task has no tokenizer.
    has_tokenizer = settings.init_from is not None or settings.data.get("tokenizer") is not None
    if has_tokenizer and "tokenizer" in settings.data:
        for word in overrides:
            if re.match(r"\+*data\.(vocab_size|bos)=", word):
                raise ValueError(f"the tokenizer determines this ({word}). fix: leave it out")
    device = hardware.pick_device(settings.device)
    # Called only for the errors that they raise.
    hardware.pick_precision(settings.precision, device)
    compilation.pick_compile(settings.compile, device, is_long=True)
    check_buildable(settings)
    return settings, start, device


def check_buildable(settings: Settings) -> Settings:
    """Build the config's groups without allocating weights; run two tokens through the model.

    Raises ValueError for groups that cannot be built or do not fit together, for settings that
    conflict, and for a run that would never end.
    """
    settings.check_combinations(int(os.environ.get("WORLD_SIZE", "1")))
    model = checkpoint.dry_run(settings.model)
    with torch.device("meta"):
        instantiate(settings.optimizer, "training", "optimizer")(model)
    instantiate(settings.schedule, "training", "schedule")(0, 1)
    source = instantiate(settings.data, "data")
    has_epochs = settings.max_epochs is not None and not source.is_endless
    bounds = (settings.steps, settings.tokens_per_parameter, settings.max_minutes)
    if bounds == (None, None, None) and not has_epochs:
        raise ValueError(
            "the run would never end (steps=null tokens_per_parameter=null max_minutes=null, and "
            "max_epochs does not limit it). fix: max_minutes=5"
        )
    return settings


def adopt_pretrained(settings: Settings, overrides: list[str]) -> tuple[Settings, Path]:
    """Return settings with the model of `init_from`, and its checkpoint, which has the tokenizer.

    With attention=NAME, the model has the attention that the overrides describe. Unless overridden,
    the context is the pretrained model's, and the run is named after its data, that model and, with
    attention=NAME, the attention. Raises ValueError for overrides that would change the tokenizer
    or another part of the model.
    """
    source = settings.init_from
    choices = dict(word.lstrip("+~").split("=", 1) for word in overrides if "=" in word)
    keys = choices.keys()
    pretrained = checkpoint.find_model(source)
    model = checkpoint.load_model_config(pretrained)
    if "attention" in keys:
        attention = {"attention": compose([*size_words(model), *overrides]).model["attention"]}
        model = model | attention
        settings = settings.model_copy(update={"model": settings.model | attention})
    # Other overrides must not change the model; an experiment's model is not used.
    words = [word for word in overrides if not word.startswith("experiment=")]
    saved = folder.by_name({"model": model, "data.tokenizer": None})
    tokenizer = settings.data.get("tokenizer")
    typed = folder.by_name({"model": settings.model, "data.tokenizer": tokenizer})
    changes = folder.changes_of(folder.keys_set_by(words, saved | typed), saved, typed)
    if changes:
        raise ValueError(
            f"init_from={source} determines the model and tokenizer "
            f"({', '.join(changes.values())}). fix: leave this out; to change the attention: "
            "attention=NAME attention.KEY=VALUE"
        )
    # The model keeps its shape, but it may be trained on shorter or longer sequences.
    context = settings.context if "context" in keys else model["context"]
    changes = {"context": context, "model": model | {"context": context}}
    if "context" in settings.data:  # a task's rows have this length
        changes["data"] = settings.data | {"context": context}
    if "name" not in keys:
        data = settings.name.partition("-")[0]  # the default name begins with the data preset
        names = [data, Path(source).resolve().name, choices.get("attention")]
        changes["name"] = re.sub(r"[^\w.-]", "-", "-".join(filter(None, names)))
    is_default = "optimizer.lr" not in keys and "reference" in settings.optimizer
    if is_default and settings.optimizer["reference"] is None:
        # New weights learn too little at the rate of fine-tuning (docs/formats.md).
        fix = "optimizer=adamw optimizer.lr=1e-4"
        if "attention" in keys:
            fix = "optimizer=muon optimizer.lr=0.005"
        print0(
            f"warning: the default optimizer.lr={settings.optimizer['lr']:g} is for training from "
            f"scratch. fix: use a lower rate, such as {fix}"
        )
    return settings.model_copy(update=changes), pretrained


def open_corpus(data: dict, pretrained: Path | None = None) -> Corpus:
    """Open the text for training and evaluation.

    The tokenizer comes from the checkpoint `pretrained`, if given, and otherwise from the settings
    `data`. Raises ValueError if the text cannot be used.
    """
    # A task has no tokenizer, because it generates token ids.
    if pretrained is not None and "tokenizer" in data:
        data = data | {"tokenizer": str(tokenizer_file(pretrained))}
    return prepare(instantiate(data, "data"), cache_folder())


def open_run_corpus(path: Path, config: dict) -> Corpus:
    """Reopen the text of a run, given its config and a checkpoint `path`, which has the tokenizer.

    Raises ValueError if the text has changed since the model was trained on it.
    """
    corpus = open_corpus(config["data"], path)
    if corpus.sha256 != config["text"]:
        raise ValueError(
            "the text has changed since the model was trained on it, or this version of the "
            f"program reads it differently ({path}: SHA-256 was {config['text'][:8]}, now "
            f"{corpus.sha256[:8]}). fix: restore the text or the version; to score another text: "
            "python -m tools.evaluate --text FILE"
        )
    return corpus


@errors.exit_on_invalid_input()
def open_data(settings: Settings, start: Start) -> tuple[Settings, Corpus, Loader]:
    """Prepare the text; return the settings, the text and its batches.

    The returned settings give a new model the tokenizer's vocabulary size. Exits with code 2 if the
    text is unusable, differs from a resumed run's, or has more token ids than a pretrained model.
    """
    if start.resumed is not None:
        config = checkpoint.load_config(start.resumed)
        corpus = open_run_corpus(start.resumed, config | {"data": settings.data})
        if corpus.identity.get("row_order") != config.get("row_order"):
            raise ValueError(
                f"{start.resumed} was saved by a version of this program that reads the rows of a "
                "text in a different order. fix: resume with that version, or start a new run from "
                f"the run's weights: {shlex.quote(f'init_from={settings.run_dir}')}"
            )
    else:
        corpus = open_corpus(settings.data, start.pretrained)
        # A pretrained model may have more token ids than its tokenizer, but not fewer.
        vocab_size = corpus.tokenizer.vocab_size
        if start.pretrained is None:
            model = settings.model | {"vocab_size": vocab_size}
            settings = settings.model_copy(update={"model": model})
        elif vocab_size > settings.model["vocab_size"]:
            raise ValueError(
                f"the model has fewer token ids than the data (init_from={settings.init_from}: "
                f"{settings.model['vocab_size']}, data.vocab_size={vocab_size}). "
                f"fix: data.vocab_size={settings.model['vocab_size']}"
            )
    batch_size = settings.batch_tokens // settings.context
    return settings, corpus, corpus.loader(settings.context, batch_size, settings.seed)


@contextmanager
def report_machine_errors(run_dir: Path, is_resumed: bool) -> Iterator[None]:
    """End with exit code 2 and one line if compilation fails or memory runs out."""
    try:
        yield
    except RuntimeError as error:
        problem = compilation.compile_problem(error)
        fix = "run the same command with compile=false"
        if not is_resumed and folder.has_checkpoint(run_dir):
            fix = f"{folder.resume_command(run_dir)} compile=false"
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            problem = str(error).partition(". ")[0]
            fix = "use a smaller micro_batch, model or context"
        if problem is None:
            raise
        errors.exit_with(errors.INPUT, f"{problem}. fix: {fix}")


@dataclass(frozen=True)
class Run:
    """The environment and the parts of a run."""

    env: Environment
    progress: Progress
    trainer: Trainer  # takes the steps
    micro_batch_size: int  # sequences per forward pass on one device
    meter: Meter  # sums the losses of steps and times the steps
    budget: TimeBudget  # fits the number of steps to max_minutes
    log: Logger
    evaluator: Evaluator  # evaluates and samples
    checkpointer: Checkpointer  # saves and restores


def build_run(env: Environment, start: Start = Start()) -> Run:
    """Build the parts of a run, in order, and load the weights with which it starts."""
    settings = env.settings
    ranks = env.ranks
    saved = None if start.resumed is None else read_saved_run(start.resumed)
    bound = planned_steps(settings, env.loader)
    progress = Progress(bound=bound, total_steps=bound, expected_steps=bound)

    # A run that is resumed on the same kind of device, with as many processes, keeps its number of
    # threads. With compile=auto, a resumed run is compiled only if it was compiled before. Both
    # change how sums are rounded.
    threads_kept = None
    is_long = compilation.is_long_run(bound, settings.max_minutes)
    is_compiled = compilation.pick_compile(settings.compile, ranks.device, is_long)
    if saved is not None and saved.machine.is_like(ranks):
        threads_kept = saved.machine.threads
    if saved is not None and settings.compile == "auto":
        is_compiled = saved.machine.compiled
    if ranks.device.type == "cpu" and (reason := threads.choose_threads(threads_kept)):
        print0(reason)
    trainer = Trainer(env, is_compiled)

    # With micro_batch=null, a resumed run keeps its micro-batch if it divides each process's rows.
    rows = settings.sequences_per_process(ranks.world_size)
    keeps_micro_batch = saved is not None and settings.micro_batch is None
    if keeps_micro_batch and rows % saved.machine.micro_batch == 0:
        micro_batch_size = saved.machine.micro_batch
    else:
        micro_batch_size = choose_micro_batch(trainer, settings)

    meter = Meter(env, trainer)
    budget = TimeBudget(env)
    log = Logger(env)
    evaluator = Evaluator(env, trainer, log, micro_batch_size)
    checkpointer = Checkpointer(env, trainer, micro_batch_size, meter, budget, evaluator, log)
    if saved is not None:
        checkpointer.restore(saved, progress)
    else:
        if start.pretrained is not None:
            adopt_weights(trainer.model, start.pretrained)
        log.open()
    return Run(
        env, progress, trainer, micro_batch_size, meter, budget, log, evaluator, checkpointer
    )


def describe_end(steps: float, minutes: float | None) -> str:
    """Describe the limits of a run, such as "500 steps or 5 minutes"; there is at least one."""
    limits = []
    if steps != math.inf:
        limits.append(f"{steps:,} step{'s' * (steps != 1)}")
    if minutes is not None:
        limits.append(f"{minutes:g} minute{'s' * (minutes != 1)}")
    return " or ".join(limits)


def summary(run: Run) -> str:
    """Return the lines printed before a run starts: its sizes, device, precision, and length."""
    env = run.env
    settings = env.settings
    trainer = run.trainer
    total_steps = run.progress.total_steps
    passes = total_steps * env.loader.batch_size / env.loader.rows_per_epoch
    text = (
        f"{env.run_dir}: {trainer.model.num_parameters() / 1e6:.1f} M parameters, "
        f"{run.meter.flops_per_token / 1e6:.0f} MFLOP per token, {env.corpus.description}\n"
        f"{env.ranks.world_size} x {env.ranks.device}, {trainer.precision}, "
        f"compile={trainer.is_compiled}, micro_batch={run.micro_batch_size}\n"
        f"ends after {describe_end(total_steps, settings.max_minutes)}"
    )
    if 1 < passes < math.inf:
        text += f", in at most {passes:.1f} passes over the text"
    held_out = env.corpus.validation_tokens(settings.context)
    if settings.eval_tokens is not None and settings.eval_tokens > held_out:
        text += f"\nevaluates on all {held_out:,} held-out tokens, because eval_tokens is larger"
    if run.budget.is_fitted:  # otherwise, the rates are printed when the number of steps is known
        text += f"\n{trainer.rates.describe(run.progress.expected_steps)}"
    return text
