"""Train a language model:  python train.py attention=mha max_minutes=10

torchrun --nproc_per_node=8 train.py ...  trains the same thing on eight GPUs. configs/train.yaml lists the keys.
"""

import sys
from time import monotonic

BEFORE_IMPORTS = monotonic()
if __name__ == "__main__" and sys.stderr.isatty():
    print("loading PyTorch", end="", file=sys.stderr, flush=True)

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from data.loader import Loader, check_enough
from data.prepare import Corpus, prepare
from data.sources import Source
from model.build import ROOT, build
from model.materialize import build_model
from training import checkpoint, compilation, config, distributed, errors, folder, hardware
from training.signals import Signals
from training.trainer import Trainer
from training.weights import dtype_name

IMPORTS = monotonic() - BEFORE_IMPORTS  # seconds: max_minutes counts them too


@hydra.main(config_path="configs", config_name="train", version_base="1.3")
def main(cfg: DictConfig) -> None:
    started = monotonic() - IMPORTS
    with Signals() as signals, errors.one_line():
        with errors.input_problems():
            begun = partial(initial, words=HydraConfig.get().overrides.task)
            found = checked(cfg, chosen_machine, begun, lambda settings: build(settings["data"], "data"))
            settings, (device, precision, (compiles, why)), start, source = found
            corpus, loader = opened(settings, source)
            ranks = distributed.join(device)
        hardware.keep_freed_memory(device)
        if compiles:
            compilation.use_cache()
        with folder.claimed(settings, ranks, HydraConfig.get().mode == RunMode.MULTIRUN) as run:
            try:
                trainer = Trainer(settings, corpus, loader, run, ranks, precision, signals, started)
                plan = f"{'to be compiled' if compiles else 'not compiled'} ({why})"
                trainer.log.say(introduction(trainer, plan))
                code = train(trainer, compiles, start)
            except RuntimeError as error:
                if compilation.failed(error):
                    fix = "compile=false resume=true"
                    errors.fail(errors.INPUT, f"compilation failed ({compilation.reason(error)}). fix: {fix}")
                errors.fail(errors.INPUT, out_of_memory(error, config.micro_batch(settings, ranks.world)))
            ranks.meet()
    if code:
        raise SystemExit(code)


def train(trainer: Trainer, compiles: bool, start: Path | None = None) -> int:
    """From where it stands to the end -> 0, or the exit code where a signal ended it."""
    if compiles:
        trainer.compile()
    with trainer.log.waiting("reading the weights"):
        trainer.begin(start)
    if trainer.step >= trainer.steps and not trainer.pending:
        trainer.log.say(f"already at step {trainer.step} of {trainer.steps} ({trainer.run}). To go on: steps=N")
        return 0
    if compiles and trainer.step < trainer.steps:
        trainer.compile_first_step()
    trainer.log.open(trainer.kept)
    while trainer.pending or trainer.step < trainer.steps:
        if not trainer.pending:
            trainer.optimize()
            trainer.fit()
            if trainer.due("log_every"):
                trainer.report()
            trainer.show_progress()
            trainer.pending = [what for what in ("eval", "sample") if trainer.due(f"{what}_every")]
        if "eval" in trainer.pending and not trainer.stopping:
            trainer.evaluate()
        if "sample" in trainer.pending and not trainer.stopping:
            trainer.sample()
        if trainer.due("save_every") or trainer.stopping:
            trainer.save()
        if trainer.stopping:
            trainer.log.close()
            trainer.log.say(f"step {trainer.step} is saved in {trainer.run}. To go on: the same words and resume=true")
            return trainer.stopping
    trainer.finish()
    return 0


def composed(words: list[str]) -> DictConfig:
    """What these words make of the configs, for other commands."""
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        try:
            return hydra.compose("train", words)
        except MissingConfigException as error:  # which would pass for a missing file
            raise HydraException(str(error)) from None


def checked(cfg: DictConfig, *more: Callable[[dict], object]) -> list:
    """Plain settings that a model and an optimizer can be built from, and what each of `more` makes of them.

    Ends with every fault at once.
    """
    settings = config.resolved(cfg)
    found = config.problems(settings, int(os.environ.get("WORLD_SIZE", "1")))
    made, apart = [], (*config.GROUPS, "device", "precision", "compile", "init_from")
    if not any(problem.startswith(apart) for problem in found):
        for attempt in (meta_build, lambda settings: build(settings["schedule"], "training")(0, 1), *more):
            try:
                made.append(attempt(settings))
            except (ValueError, TypeError, RuntimeError) as error:  # a knob of the wrong kind fails somewhere inside
                found.append(str(error))
    if found:
        errors.fail(errors.INPUT, *found, alike=True)
    return [settings, *made[2:]]


def meta_build(settings: dict) -> None:
    """The model and its optimizer, as shapes without memory.

    Raises ValueError for what cannot be built, trained or saved.
    """
    model = build_model(settings["model"]).to("meta")
    for name, tensor in model.state_dict().items():
        dtype_name(name, tensor)
    with torch.device("meta"):
        build(settings["optimizer"], "training")(model)
        model(torch.zeros(1, 2, dtype=torch.int64), model.new_cache(1, 2, torch.float32, "meta"))


def chosen_machine(settings: dict) -> tuple[torch.device, torch.dtype, tuple[bool, str]]:
    device = hardware.pick_device(settings["device"])
    precision = hardware.pick_precision(settings["precision"], device)
    return device, precision, compilation.pick_compile(settings["compile"], device, config.is_long(settings))


def initial(settings: dict, words: list[str]) -> Path | None:
    """The model to begin with. Its shape and tokenizer become the run's, and context and name unless `words` say some.

    Raises ValueError for words about a model.
    """
    if settings["init_from"] is None:
        return None
    if said := [word for word in words if re.match(r"[+~]*(model|attention|data\.tokenizer)\b", word)]:
        raise ValueError(f"init_from has a model of its own ({' '.join(said)}). fix: leave these words out")
    source = Path(settings["init_from"]).expanduser()
    start = folder.newest_model(source)
    tree = checkpoint.config_of(start)["model"]
    if not any(word.startswith("context=") for word in words):
        settings["context"] = tree["context"]
        if found := config.problems(settings, int(os.environ.get("WORLD_SIZE", "1"))):
            raise ValueError(found[0])
    if not any(word.startswith("name=") for word in words):
        known = source.resolve().name.removesuffix(".bin")
        settings["name"] = re.sub(r"[^\w.-]+", "-", f"{settings['name'].partition('-')[0]}-{known}", flags=re.ASCII)
    settings["model"] = tree | {"context": settings["context"]}
    settings["data"]["tokenizer"] = str(checkpoint.tokenizer_of(start))
    with torch.device("meta"):
        checkpoint.check_weights(build(settings["model"]), start)
    return start


def opened(settings: dict, source: Source) -> tuple[Corpus, Loader]:
    """The text, prepared; the model's vocabulary becomes its tokenizer's."""
    sizes = {"context": settings["context"], "batch": settings["batch_tokens"] // settings["context"]}
    first = os.environ.get("RANK", "0") == "0"
    corpus = prepare(source, Path(".cache"), enough=partial(check_enough, **sizes), quiet=not first)
    settings["model"]["vocab_size"] = corpus.tokenizer.vocab_size
    return corpus, Loader(corpus.train, **sizes, seed=settings["seed"])


def out_of_memory(error: RuntimeError, micro: int) -> str:
    """What there is to do, if that is the error; raises any other."""
    if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
        raise error
    fix = f"micro_batch={micro // 2}, which changes nothing else" if micro > 1 else "a smaller model or context"
    return f"{str(error).partition('. ')[0]} (micro_batch={micro}). fix: {fix}"


def introduction(trainer: Trainer, plan: str) -> str:
    millions = sum(p.numel() for p in trainer.model.parameters()) / 1e6
    text = f"{sum(map(len, trainer.corpus.train)) / 1e6:.1f} M tokens of text"
    peak = "peak rate unknown, so no MFU" if trainer.peak is None else f"peak {trainer.peak / 1e12:.0f} TFLOP/s"
    return (
        f"{trainer.run}: {millions:.1f} M parameters, {trainer.flops / 1e6:.0f} MFLOP a token, {text}\n"
        f"{trainer.ranks.world} x {trainer.ranks.device}, {trainer.precision}, {plan}, {peak}"
    )


if __name__ == "__main__":
    errors.start_line()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands its errors on instead of printing them
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))  # Hydra wants it first
    for word in sys.argv[1:]:
        key, _, value = word.lstrip("-").partition("=")
        if word.startswith("--") and key.split(".")[0] in (*config.RULES, *config.GROUPS):
            errors.fail(errors.INPUT, f"keys are written without dashes (got {word}). fix: {word[2:]}")
        if key in config.GROUPS and value in ("", "null"):
            errors.fail(errors.INPUT, f"nothing is chosen (got {word}). fix: {key}= one of configs/{key}/")
    with distributed.ended(), errors.one_line(HydraException, OmegaConfBaseException):
        main()
