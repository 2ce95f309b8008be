"""Train a language model:  python train.py attention=mha max_minutes=10

torchrun --nproc_per_node=8 train.py ...  trains the same thing on eight GPUs. configs/train.yaml lists the keys.
"""

from time import monotonic

BEFORE_IMPORTS = monotonic()

import os
from pathlib import Path

import hydra
import torch
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from data.loader import Loader
from data.prepare import Corpus, prepare
from model.build import build
from training import checkpoint, config, distributed, errors, hardware
from training.trainer import Trainer

IMPORTS = monotonic() - BEFORE_IMPORTS  # seconds: max_minutes counts them too


@hydra.main(config_path="configs", config_name="train", version_base="1.3")
def main(cfg: DictConfig) -> None:
    started = monotonic() - IMPORTS
    with errors.one_line():
        train(cfg, started)
    distributed.leave()


def train(cfg: DictConfig, started: float) -> None:
    with errors.input_problems():
        settings = checked(cfg)
        device = hardware.pick_device(settings["device"])
        precision = hardware.pick_precision(settings["precision"], device)
        compiles, why = hardware.pick_compile(settings["compile"], device, config.is_long(settings))
        start = initial(settings)
        corpus, loader = opened(settings)
        ranks = distributed.join(device)
        run = ranks.agree(config.claim(settings) if ranks.first else None)
        found = checkpoint.newest(run) if settings["resume"] else None
        if found is not None:
            checkpoint.check_same(found, settings["model"], corpus.tokenizer)

    trainer = Trainer(settings, corpus, loader, run, ranks, precision, started)
    say = trainer.log.say
    say(introduction(trainer, f"{'compiled' if compiles else 'not compiled'}, {why}"))
    if found is not None:
        trainer.resume(found)
        say(f"resuming step {trainer.step}")
    else:
        trainer.log.cut(0)
        if settings["resume"]:
            say(f"nothing to resume in {run}: a fresh start")
        if start is not None:
            checkpoint.load_weights(trainer.model, start, ranks.device)
    if trainer.step >= trainer.steps:
        say(f"already at step {trainer.step} of {trainer.steps} ({run}). To go on: steps=N")
        return
    if compiles:
        trainer.compile()
    try:
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
    except torch.OutOfMemoryError as error:
        reason, smaller = str(error).partition(". ")[0], max(1, trainer.micro // 2)
        errors.fail(errors.INPUT, f"{reason} (micro_batch={trainer.micro}). fix: micro_batch={smaller}, which changes nothing else")
    trainer.finish()


def checked(cfg: DictConfig) -> dict:
    """Plain settings that a model and an optimizer can be built from; ends with every fault at once."""
    settings = config.resolved(cfg)
    found = config.problems(settings, int(os.environ.get("WORLD_SIZE", "1")))
    if not found:
        try:
            with torch.device("meta"):
                build(settings["optimizer"], "training")(build(settings["model"]))
            build(settings["schedule"], "training")(0, 1)
        except ValueError as error:
            found.append(str(error))
    if found:
        errors.fail(errors.INPUT, *found)
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
    source = build(settings["data"], "data")
    corpus = prepare(source, Path(".cache/data"), quiet=os.environ.get("RANK", "0") != "0")
    settings["model"]["vocab_size"] = corpus.tokenizer.vocab_size
    sequences = settings["batch_tokens"] // settings["context"]
    return corpus, Loader(corpus.train, context=settings["context"], batch=sequences, seed=settings["seed"])


def introduction(trainer: Trainer, compilation: str) -> str:
    settings, ranks = trainer.settings, trainer.ranks
    millions = sum(p.numel() for p in trainer.model.parameters()) / 1e6
    forwards = trainer.loader.batch // ranks.world // trainer.micro
    return (
        f"{trainer.run}: {millions:.1f} M parameters, {trainer.flops / 1e6:.0f} MFLOP a token, "
        f"vocabulary {trainer.corpus.tokenizer.vocab_size}, "
        f"{sum(map(len, trainer.corpus.train)) / 1e6:.1f} M tokens of text\n"
        f"{ranks.device}, {str(trainer.precision).removeprefix('torch.')}, {compilation}; "
        f"a step is {settings['batch_tokens']} tokens: "
        f"{trainer.micro} sequences of {settings['context']} x {forwards} forwards x {ranks.world} processes"
    )


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands its errors on instead of printing them
    with errors.one_line(HydraException, OmegaConfBaseException):
        main()
