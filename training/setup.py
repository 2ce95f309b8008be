"""Set up a run from its config: check the model, open the corpus, and build all parts."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from data.corpus import Corpus
from data.loader import Loader
from data.prepare import prepare
from data.tokenizer import tokenizer_file
from run import checkpoint, compilation, errors, folder, hardware, threads
from run.cache_folder import cache_folder
from run.distributed import DistEnv
from run.instantiate import instantiate
from run.progress import say
from run.settings import Settings
from run.signals import Signals
from training.budget import TimeBudget, planned_steps
from training.checkpointer import Checkpointer, read_saved_run
from training.clock import Clock
from training.distillation import find_teacher
from training.evaluation import Evaluator
from training.logger import Logger
from training.memory import choose_micro_batch
from training.meter import Meter
from training.steps import Progress
from training.trainer import Trainer

PRETRAINED = ("model", "attention", "ffn", "norm", "data.tokenizer")  # refused with init_from


def set_up_run(
    settings: Settings, overrides: list[str]
) -> tuple[Settings, Path | None, torch.device]:
    """Check a config on this machine; return settings, initial checkpoint and device.

    The settings have the model of `init_from`, if given. Raises ValueError for a config that
    cannot be trained on this machine.
    """
    settings, pretrained = adopt_pretrained(settings, overrides)
    device = hardware.pick_device(settings.device)
    # Only their errors matter here.
    hardware.pick_precision(settings.precision, device)
    compilation.pick_compile(settings.compile, device, is_long=True)
    check_buildable(settings)
    folder.check_before_text(settings)
    return settings, pretrained, device


def check_buildable(settings: Settings) -> Settings:
    """Build all parts without allocating memory, and run two tokens through the model.

    Raises ValueError for parts that cannot be built or do not fit together.
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


def adopt_pretrained(settings: Settings, overrides: list[str]) -> tuple[Settings, Path | None]:
    """Return settings with the model of `init_from`, and the checkpoint to load it from.

    The checkpoint also has the tokenizer. A resumed run has its own model and tokenizer, and no
    longer needs `init_from`. Context and name are taken from `init_from`, unless overridden.
    Raises ValueError for overrides of the model.
    """
    source = settings.init_from
    if source is None:
        return settings, None
    keys = [word.lstrip("+~").partition("=")[0] for word in overrides]
    refused = [word for word in overrides if word.lstrip("+~").startswith(PRETRAINED)]
    if refused:
        raise ValueError(
            f"the architecture of init_from cannot be changed ({' '.join(refused)}). fix: leave "
            f"these out; to change the attention: python -m tools.convert {source} "
            "attention=NAME --out Y, then init_from=Y"
        )

    # The run is named after its data and the pretrained model.
    if "name" not in keys:
        data = settings.name.partition("-")[0]
        name = re.sub(r"[^\w.-]", "-", f"{data}-{Path(source).resolve().name}")
        settings = settings.model_copy(update={"name": name})
    # A resumed run no longer needs `init_from`.
    if settings.resume and settings.run_dir is not None:
        run = Path(os.path.expanduser(settings.run_dir))
        source = run if folder.has_checkpoint(run) else source
    pretrained = checkpoint.find_model(source)
    model = checkpoint.load_model_config(pretrained)
    # The model keeps its shape, but it may be trained on shorter or longer sequences.
    context = settings.context if "context" in keys else model["context"]
    changes = {"context": context, "model": model | {"context": context}}
    if "context" in settings.data:  # a task's rows have this length
        changes["data"] = settings.data | {"context": context}
    # Learning rates are scaled only for randomly initialized weights.
    if "reference" in settings.optimizer and not any("reference" in key for key in keys):
        changes["optimizer"] = settings.optimizer | {"reference": None}
        if "optimizer.lr" not in keys:
            say(
                f"warning: the default optimizer.lr={settings.optimizer['lr']:g} is for training "
                "from scratch. fix: use a lower rate, such as optimizer=adamw optimizer.lr=1e-4"
            )
    return settings.model_copy(update=changes), pretrained


def open_corpus(data: dict, pretrained: Path | None = None) -> Corpus:
    """Open the text for training and evaluation.

    The tokenizer comes from the checkpoint `pretrained`, if given, and otherwise from the settings
    `data`. Raises ValueError if the text does not exist.
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
            f"the text has changed since the model was trained on it ({path}: SHA-256 was "
            f"{config['text'][:8]}, now {corpus.sha256[:8]}). fix: restore the original text; or "
            "python -m tools.evaluate --text FILE, which scores any text"
        )
    return corpus


def load_corpus(
    settings: Settings, pretrained: Path | None = None
) -> tuple[Settings, Corpus, Loader]:
    """Prepare the text; return the settings, the text and its batches.

    The tokenizer comes from the checkpoint `pretrained`, if given. The returned settings give a new
    model the tokenizer's vocabulary, and set `distill` to the teacher's checkpoint, so that a
    resumed run reports a different teacher.
    """
    corpus = open_corpus(settings.data, pretrained)
    # A pretrained model may have more rows than its tokenizer has tokens, but not fewer.
    vocab_size = corpus.tokenizer.vocab_size
    if settings.init_from is not None and vocab_size > settings.model["vocab_size"]:
        raise ValueError(
            f"the model has fewer token ids than the data (init_from={settings.init_from}: "
            f"{settings.model['vocab_size']}, data.vocab_size={vocab_size}). "
            f"fix: data.vocab_size={settings.model['vocab_size']}"
        )
    if settings.init_from is None:
        model = settings.model | {"vocab_size": vocab_size}
        settings = settings.model_copy(update={"model": model})
    teacher = find_teacher(settings, corpus)
    if teacher is not None:
        settings = settings.model_copy(update={"distill": str(teacher)})
    batch_size = settings.batch_tokens // settings.context
    loader = corpus.loader(settings.context, batch_size, settings.seed)
    return settings, corpus, loader


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
            fix = (
                "use a smaller micro_batch, which changes only rounding, or a smaller model or "
                "context"
            )
        if problem is None:
            raise
        errors.exit_with(errors.INPUT, f"{problem}. fix: {fix}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run."""

    settings: Settings
    corpus: Corpus
    run_dir: Path
    ranks: DistEnv
    signals: Signals
    clock: Clock
    progress: Progress
    trainer: Trainer  # takes the steps
    micro_batch_size: int  # sequences per forward pass on one device
    meter: Meter  # sums and times the results of steps
    budget: TimeBudget  # fits the number of steps to max_minutes
    log: Logger
    evaluator: Evaluator  # evaluates and samples
    checkpointer: Checkpointer  # saves and restores


def build_run(
    settings: Settings,
    corpus: Corpus,
    loader: Loader,
    run_dir: Path,
    ranks: DistEnv,
    signals: Signals,
    clock: Clock,
    *,
    overrides: Sequence[str] = (),
    pretrained: Path | None = None,
) -> Run:
    """Build the parts of a run, and restore its newest checkpoint if it is resumed.

    The settings were composed from `overrides`. A new run starts from `pretrained`, if given.
    """
    newest = ranks.on_rank0(checkpoint.prepare_run, run_dir, settings.resume)
    saved = None if newest is None else read_saved_run(newest)
    # A run resumed on the same kind of machine uses the same number of threads, and therefore
    # computes the same bits.
    if ranks.device.type == "cpu":
        kept = None
        if saved is not None and saved.machine.is_like(ranks):
            kept = saved.machine.threads
        if reason := threads.choose_threads(kept):
            say(reason)
    bound = planned_steps(settings, loader)
    progress = Progress(total_steps=bound, expected_steps=bound)

    # A resumed run is compiled if it was compiled before.
    is_long = compilation.is_long_run(progress.total_steps, settings.max_minutes)
    is_compiled = compilation.pick_compile(settings.compile, ranks.device, is_long)
    if saved is not None and settings.compile == "auto":
        is_compiled = saved.machine.compiled
    trainer = Trainer(
        settings,
        loader,
        ranks,
        bos=corpus.tokenizer.bos if settings.document_mask else None,
        is_compiled=is_compiled,
    )

    # A resumed run keeps its micro-batch, which affects rounding, unless the micro-batch no longer
    # divides the batch per process, because the number of processes has changed.
    rows = settings.sequences_per_process(ranks.world_size)
    keeps_micro_batch = saved is not None and settings.micro_batch is None
    if keeps_micro_batch and rows % saved.machine.micro_batch == 0:
        micro_batch_size = saved.machine.micro_batch
    else:
        micro_batch_size = choose_micro_batch(trainer, settings)

    meter = Meter(
        trainer.loss_names,
        flops_per_token=trainer.model.training_flops(),
        whole_flops_per_token=trainer.model.training_flops(whole_attention=True),
        batch_tokens=settings.batch_tokens,
        loader=loader,
        ranks=ranks,
        clock=clock,
    )
    budget = TimeBudget(
        settings,
        corpus,
        ranks,
        clock,
        schedule=trainer.schedule,
        is_compiled=is_compiled,
        bound=progress.total_steps,
        num_parameters=trainer.model.num_parameters(),
    )
    log = Logger(
        run_dir,
        settings,
        clock,
        steps_per_epoch=loader.rows_per_epoch / loader.batch_size,
        is_enabled=ranks.is_main,
    )
    evaluator = Evaluator(
        settings,
        corpus,
        trainer,
        log=log,
        signals=signals,
        clock=clock,
        batch_size=micro_batch_size,
    )
    checkpointer = Checkpointer(
        settings,
        overrides,
        run_dir,
        corpus=corpus,
        trainer=trainer,
        micro_batch_size=micro_batch_size,
        meter=meter,
        budget=budget,
        evaluator=evaluator,
        log=log,
        clock=clock,
    )

    # Restore or start.
    if saved is not None:
        checkpointer.restore(saved, progress)
    else:
        if pretrained is not None:
            checkpoint.load_weights(trainer.model, pretrained)
            say(f"starting from the weights of {pretrained}")
        log.open({})
    return Run(
        settings=settings,
        corpus=corpus,
        run_dir=run_dir,
        ranks=ranks,
        signals=signals,
        clock=clock,
        progress=progress,
        trainer=trainer,
        micro_batch_size=micro_batch_size,
        meter=meter,
        budget=budget,
        log=log,
        evaluator=evaluator,
        checkpointer=checkpointer,
    )


def describe_end(steps: float, minutes: float | None) -> str:
    """Describe the limits of a run, such as "500 steps or 5 minutes"; it has at least one."""
    limits = []
    if steps != math.inf:
        limits.append(f"{steps:,} step{'s' * (steps != 1)}")
    if minutes is not None:
        limits.append(f"{minutes:g} minute{'s' * (minutes != 1)}")
    return " or ".join(limits)


def summary(run: Run) -> str:
    """Return the lines printed before a run starts: its sizes, device, precision, and length."""
    settings = run.settings
    trainer = run.trainer
    total_steps = run.progress.total_steps
    passes = total_steps * trainer.loader.batch_size / trainer.loader.rows_per_epoch
    text = (
        f"{run.run_dir}: {trainer.model.num_parameters() / 1e6:.1f} M parameters, "
        f"{run.meter.flops_per_token / 1e6:.0f} MFLOP per token, {run.corpus.description}\n"
        f"{run.ranks.world_size} x {run.ranks.device}, "
        f"{hardware.describe_products(run.ranks.device, trainer.precision)}, "
        f"compile={trainer.is_compiled}, micro_batch={run.micro_batch_size}\n"
        f"ends after {describe_end(total_steps, settings.max_minutes)}"
    )
    if 1 < passes < math.inf:
        text += f", in at most {passes:.1f} passes over the text"
    held_out = run.corpus.validation_tokens(settings.context)
    if settings.eval_tokens is not None and settings.eval_tokens > held_out:
        text += f"\nevaluates on all {held_out:,} held-out tokens, because eval_tokens is larger"
    # After resuming, the rates may be scaled for another number of steps than the run's last step.
    steps = run.progress.expected_steps
    return f"{text}\n{trainer.describe_rates(None if steps == math.inf else steps)}"
