"""Train a language model:  python train.py attention=mha max_minutes=10

torchrun --nproc_per_node=8 train.py ...  trains the same thing on eight GPUs.
configs/train.yaml lists the keys.
"""

import sys
from time import monotonic

BEFORE_IMPORTS = monotonic()
if __name__ == "__main__" and sys.stderr.isatty():
    print("loading PyTorch", end="", file=sys.stderr, flush=True)

import os
import re
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from run import config, distributed, errors, folder, hardware
from run.signals import Signals
from training.memory import choose_micro_batch, measure_memory
from training.setup import load_corpus, report_machine_errors, set_up_run, summary
from training.trainer import Trainer

IMPORT_SECONDS = monotonic() - BEFORE_IMPORTS  # which max_minutes counts too


@hydra.main(config_path="configs", config_name="train", version_base="1.3")
def main(cfg: DictConfig) -> None:
    """Set up a run from its config, train it, and exit with a code that says how it ended."""
    started = monotonic() - IMPORT_SECONDS
    overrides = HydraConfig.get().overrides.task
    is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    with Signals() as signals, errors.report_errors():
        # Whatever is wrong with the input shows here, before anything is written.
        with errors.user_input():
            setup = set_up_run(config.resolve(cfg), overrides)
            settings = setup.settings
            corpus, loader = load_corpus(settings, setup.source)
            memory = measure_memory(settings, setup.device, setup.precision)
            ranks = distributed.init_distributed(setup.device)
        micro_batch_size = choose_micro_batch(memory, settings, ranks)
        hardware.prepare_for_training(setup.device)

        # The folder is locked until the run ends. A compilation that fails and a lack of memory are
        # reported as one line.
        with folder.open_run_dir(settings, ranks, is_sweep) as run:
            with report_machine_errors(None):
                trainer = Trainer(
                    settings,
                    corpus,
                    loader,
                    run,
                    ranks,
                    setup.precision,
                    signals,
                    started,
                    micro_batch_size,
                )
            trainer.log.info(summary(trainer, setup))
            with report_machine_errors(trainer):
                exit_code = train(trainer, setup.pretrained)
                ranks.barrier()
    if exit_code:
        raise SystemExit(exit_code)


def train(trainer: Trainer, pretrained: Path | None = None) -> int:
    """Train to the last step -> 0, or the exit code that a signal asks for.

    The run starts with `pretrained` weights if they are given, or resumes.
    """
    # Start or resume. With compile=true, a compilation that fails shows before the first step.
    with trainer.log.waiting("reading the weights"):
        trainer.restore_or_start(pretrained)
    if trainer.is_complete():
        trainer.log.info(
            f"already at step {trainer.step} of {trainer.steps} ({trainer.run_dir}). "
            "To go on: steps=N"
        )
        return 0
    if trainer.is_compiled and not trainer.is_finished:
        trainer.compile_first_step()
    trainer.log.open(trainer.log_state)

    # A checkpoint is saved before the sample and the evaluation of its step: where these are cut
    # off, a resumed run does them again. The evaluation comes last, as the mark of a whole step.
    while True:
        if trainer.is_due("save_every"):
            trainer.save()
        if trainer.is_due("sample_every"):
            trainer.sample()
        if trainer.is_due("eval_every"):
            trainer.evaluate()
        if trainer.is_finished or trainer.exit_code:
            break
        trainer.train_step()
        trainer.fit_steps_to_budget()
        if trainer.is_due("log_every"):
            trainer.log_metrics()
        trainer.show_progress()
        trainer.choose_compilation()

    # A signal asks to save what was trained and to end.
    if trainer.exit_code:
        trainer.save()
        trainer.log.close()
        trainer.log.info(
            f"step {trainer.step} is saved in {trainer.run_dir}. "
            "To go on: the same overrides and resume=true"
        )
        return trainer.exit_code
    trainer.finish()
    return 0


def check_arguments(arguments: list[str]) -> None:
    """Refuse two slips that Hydra would answer with its usage, or with an error of our code."""
    for argument, following in zip(arguments, [*arguments[1:], "VALUE"], strict=False):
        key, equals, value = argument.lstrip("-").partition("=")
        is_key = key.split(".")[0] in (*config.RULES, *config.GROUPS)
        if argument.startswith("--") and is_key:
            # `--steps 5`, but not `--sharded steps=5`.
            if not equals:
                value = "VALUE" if "=" in following or following.startswith("-") else following
            fix = f"{key}={value}"
            errors.exit_with(
                errors.INPUT, f"keys are written without dashes (got {argument}). fix: {fix}"
            )
        # Hydra would take these for a number or nothing, which is no choice.
        if key in config.GROUPS and re.fullmatch(r"[\d.]*|null|true|false", value):
            errors.exit_with(errors.INPUT, config.unknown(argument, arguments))


if __name__ == "__main__":
    errors.start_line()
    # Have Hydra raise its errors instead of printing them; it wants --multirun in front.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))
    check_arguments(sys.argv[1:])
    with distributed.hard_exit_on_error(), config.report_errors():
        main()
