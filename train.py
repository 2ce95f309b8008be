"""Train a language model:  python train.py attention=mha max_minutes=10

torchrun --nproc_per_node=8 train.py ...  trains the same thing on eight GPUs. configs/train.yaml lists the keys.
"""

import sys
from time import monotonic

from training.setup import (
    adopt_pretrained,
    choose_machine,
    load_corpus,
    out_of_memory,
    summary,
    validate,
)

BEFORE_IMPORTS = monotonic()
if __name__ == "__main__" and sys.stderr.isatty():
    print("loading PyTorch", end="", file=sys.stderr, flush=True)

import os
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from common import compilation, config, errors, hardware
from common.instantiate import instantiate
from training import distributed, run_dir
from training.signals import Signals
from training.trainer import Trainer

IMPORTS = monotonic() - BEFORE_IMPORTS  # seconds: max_minutes counts them too


@hydra.main(config_path="configs", config_name="train", version_base="1.3")
def main(cfg: DictConfig) -> None:
    started = monotonic() - IMPORTS
    with Signals() as signals, errors.report_errors():
        with errors.user_input():
            begun = partial(adopt_pretrained, words=HydraConfig.get().overrides.task)
            found = validate(
                cfg, choose_machine, begun, lambda settings: instantiate(settings["data"], "data")
            )
            settings, (device, precision, (compiles, why)), start, source = found
            corpus, loader = load_corpus(settings, source)
            ranks = distributed.init_distributed(device)
        hardware.keep_freed_memory(device)
        if compiles:
            compilation.use_cache()
        with run_dir.open_run_dir(
            settings, ranks, HydraConfig.get().mode == RunMode.MULTIRUN
        ) as run:
            try:
                trainer = Trainer(settings, corpus, loader, run, ranks, precision, signals, started)
                plan = f"{'to be compiled' if compiles else 'not compiled'} ({why})"
                trainer.log.info(summary(trainer, plan))
                code = train(trainer, compiles, start)
            except RuntimeError as error:
                if compilation.is_compile_error(error):
                    fix = "compile=false resume=true"
                    errors.exit_with(
                        errors.INPUT,
                        f"compilation failed ({compilation.first_error_line(error)}). fix: {fix}",
                    )
                errors.exit_with(
                    errors.INPUT,
                    out_of_memory(error, config.micro_batch_size(settings, ranks.world_size)),
                )
            ranks.barrier()
    if code:
        raise SystemExit(code)


def train(trainer: Trainer, compiles: bool, start: Path | None = None) -> int:
    """From where it stands to the end -> 0, or the exit code where a signal ended it."""
    if compiles:
        trainer.compile()
    with trainer.log.waiting("reading the weights"):
        trainer.restore_or_start(start)
    if trainer.step >= trainer.steps and not trainer.pending:
        trainer.log.info(
            f"already at step {trainer.step} of {trainer.steps} ({trainer.run}). To go on: steps=N"
        )
        return 0
    if compiles and trainer.step < trainer.steps:
        trainer.compile_first_step()
    trainer.log.open(trainer.kept)
    while trainer.pending or trainer.step < trainer.steps:
        if not trainer.pending:
            trainer.train_step()
            trainer.fit_steps_to_budget()
            if trainer.due("log_every"):
                trainer.log_metrics()
            trainer.show_progress()
            trainer.pending = [what for what in ("eval", "sample") if trainer.due(f"{what}_every")]
        if "eval" in trainer.pending and not trainer.exit_code:
            trainer.evaluate()
        if "sample" in trainer.pending and not trainer.exit_code:
            trainer.sample()
        if trainer.due("save_every") or trainer.exit_code:
            trainer.save()
        if trainer.exit_code:
            trainer.log.close()
            trainer.log.info(
                f"step {trainer.step} is saved in {trainer.run}. To go on: the same words and resume=true"
            )
            return trainer.exit_code
    trainer.finish()
    return 0


if __name__ == "__main__":
    errors.start_line()
    os.environ.setdefault(
        "HYDRA_FULL_ERROR", "1"
    )  # Hydra hands its errors on instead of printing them
    sys.argv[1:] = sorted(
        sys.argv[1:], key=lambda word: word not in ("-m", "--multirun")
    )  # Hydra wants it first
    for word in sys.argv[1:]:
        key, _, value = word.lstrip("-").partition("=")
        if word.startswith("--") and key.split(".")[0] in (*config.RULES, *config.GROUPS):
            errors.exit_with(
                errors.INPUT, f"keys are written without dashes (got {word}). fix: {word[2:]}"
            )
        if key in config.GROUPS and value in ("", "null"):
            errors.exit_with(
                errors.INPUT, f"nothing is chosen (got {word}). fix: {key}= one of configs/{key}/"
            )
    with (
        distributed.hard_exit_on_error(),
        errors.report_errors(HydraException, OmegaConfBaseException),
    ):
        main()
