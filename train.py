"""Train a language model:  python train.py attention=mha max_minutes=10

torchrun --nproc_per_node=8 train.py ...  trains the same thing on eight GPUs. configs/train.yaml lists the keys.
"""

from time import monotonic

BEFORE_IMPORTS = monotonic()

import os
import re
import sys
from functools import partial
from pathlib import Path

import hydra
import torch
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from data.loader import Loader, check_enough
from data.prepare import Corpus, prepare
from model.build import build
from training import checkpoint, config, distributed, errors, hardware
from training.trainer import Trainer

IMPORTS = monotonic() - BEFORE_IMPORTS  # seconds: max_minutes counts them too


@hydra.main(config_path="configs", config_name="train", version_base="1.3")
def main(cfg: DictConfig) -> None:
    started = monotonic() - IMPORTS
    with errors.one_line():
        with errors.input_problems():
            settings = checked(cfg)
            device = hardware.pick_device(settings["device"])
            precision = hardware.pick_precision(settings["precision"], device)
            compiles, why = hardware.pick_compile(settings["compile"], device, config.is_long(settings))
            start = initial(settings)
            corpus, loader = opened(settings)
            if start is not None:
                shape = {key: value for key, value in settings["model"].items() if key != "context"}
                checkpoint.check_same(start, {"model": shape}, corpus.tokenizer)
            ranks = distributed.join(device)
            run = ranks.agree(config.claim(settings) if ranks.first else None)
            found = checkpoint.newest(run) if settings["resume"] else None
            if found is not None:
                checkpoint.check_same(found, config.identity(settings), corpus.tokenizer)
        try:
            trainer = Trainer(settings, corpus, loader, run, ranks, precision, started)
            trainer.log.say(introduction(trainer, f"{'compiled' if compiles else 'not compiled'} ({why})"))
            trainer.begin(found, start)
            train(trainer, compiles)
        except torch.OutOfMemoryError as error:
            errors.fail(errors.INPUT, out_of_memory(str(error), config.micro_batch(settings, ranks.world)))
    distributed.leave(trainer)


def train(trainer: Trainer, compiles: bool) -> None:
    if trainer.step >= trainer.steps:
        trainer.log.say(f"already at step {trainer.step} of {trainer.steps} ({trainer.run}). To go on: steps=N")
        return
    if trainer.step > 0:
        trainer.log.say(f"resuming step {trainer.step}")
    elif trainer.settings["resume"]:
        trainer.log.say(f"nothing to resume in {trainer.run}: a fresh start")
    trainer.log.open(trainer.metrics_bytes)
    if compiles:
        trainer.compile()
    while trainer.step < trainer.steps:
        trainer.optimize()
        trainer.fit()
        if trainer.due("log_every"):
            trainer.report()
        if trainer.due("eval_every"):
            trainer.evaluate()
        if trainer.due("sample_every"):
            trainer.sample()
        if trainer.due("save_every"):
            trainer.save()
    trainer.finish()


def checked(cfg: DictConfig) -> dict:
    """Plain settings that a model and an optimizer can be built from; ends with every fault at once."""
    settings = config.resolved(cfg)
    found = config.problems(settings, int(os.environ.get("WORLD_SIZE", "1")))
    if not any(problem.startswith(config.GROUPS) for problem in found):
        try:
            with torch.device("meta"):
                model = build(settings["model"])
                build(settings["optimizer"], "training")(model)
                model(torch.zeros(1, 2, dtype=torch.int64), model.new_cache(1, 2, torch.float32, "meta"))
            build(settings["schedule"], "training")(0, 1)
        except (ValueError, TypeError) as error:  # a knob of the wrong kind fails somewhere inside
            found.append(str(error))
    if found:
        errors.fail(errors.INPUT, *found, alike=True)
    return settings


def initial(settings: dict) -> Path | None:
    """The checkpoint to begin with; its tokenizer, the one that its weights know, becomes the run's."""
    if settings["init_from"] is None:
        return None
    start = checkpoint.newest(Path(settings["init_from"]).expanduser())
    if start is None:
        raise ValueError(f"no checkpoint (init_from={settings['init_from']}). fix: the folder of a run")
    settings["data"]["tokenizer"] = str(start / "tokenizer.model")
    return start


def opened(settings: dict) -> tuple[Corpus, Loader]:
    """The text, prepared; the model's vocabulary becomes its tokenizer's."""
    sizes = {"context": settings["context"], "batch": settings["batch_tokens"] // settings["context"]}
    first = os.environ.get("RANK", "0") == "0"
    source = build(settings["data"], "data")
    corpus = prepare(source, Path(".cache"), enough=partial(check_enough, **sizes), quiet=not first)
    settings["model"]["vocab_size"] = corpus.tokenizer.vocab_size
    return corpus, Loader(corpus.train, **sizes, seed=settings["seed"])


def out_of_memory(reason: str, micro: int) -> str:
    if micro == 1:
        return f"{reason.partition('. ')[0]} (micro_batch=1). fix: a smaller model or context"
    fix = f"micro_batch={micro // 2}, with the same batch_tokens: it changes nothing else"
    return f"{reason.partition('. ')[0]} (micro_batch={micro}). fix: {fix}"


def introduction(trainer: Trainer, compilation: str) -> str:
    settings, ranks = trainer.settings, trainer.ranks
    millions = sum(p.numel() for p in trainer.model.parameters()) / 1e6
    peak = "peak rate unknown, so no MFU" if trainer.peak is None else f"peak {trainer.peak / 1e12:.0f} TFLOP/s"
    forwards = trainer.loader.batch // ranks.world // trainer.micro
    return (
        f"{trainer.run}: {millions:.1f} M parameters, {trainer.flops / 1e6:.0f} MFLOP a token, "
        f"vocabulary {trainer.corpus.tokenizer.vocab_size}, "
        f"{sum(map(len, trainer.corpus.train)) / 1e6:.1f} M tokens of text\n"
        f"{ranks.device}, {str(trainer.precision).removeprefix('torch.')}, {compilation}, {peak}; "
        f"a step is {settings['batch_tokens']} tokens: "
        f"{trainer.micro} sequences of {settings['context']} x {forwards} forwards x {ranks.world} processes"
    )


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands its errors on instead of printing them
    keys = (*config.RULES, *config.GROUPS)
    for word in sys.argv[1:]:
        if word.startswith("--") and re.split("[=.]", word[2:])[0] in keys:
            errors.fail(errors.INPUT, f"keys are written without dashes (got {word}). fix: {word[2:]}")
    with errors.one_line(HydraException, OmegaConfBaseException):
        main()
    distributed.end()
