"""Train a language model:  python train.py attention=mha max_minutes=10

torchrun --nproc_per_node=8 train.py ...  trains the same thing on eight GPUs.
python train.py --help  lists the keys.
"""

import sys
from time import monotonic

BEFORE_IMPORTS = monotonic()
if __name__ == "__main__" and sys.stderr.isatty():
    print("loading PyTorch", end="", file=sys.stderr, flush=True)

import os
from pathlib import Path

from run import distributed, errors, folder, hardware, progress
from run.settings import compose, help_text
from run.signals import Signals
from training import setup
from training.budget import Clock
from training.trainer import Trainer

IMPORT_SECONDS = monotonic() - BEFORE_IMPORTS  # which max_minutes counts too


def main(overrides: list[str]) -> None:
    """Set up a run from its config, train it, and exit with a code that says how it ended."""
    clock = Clock(monotonic() - IMPORT_SECONDS)
    with Signals() as signals, errors.report_errors():
        # Whatever is wrong with the input shows here, before the run has a folder.
        with errors.user_input():
            settings = compose(overrides)
            pretrained, device = setup.set_up_run(settings, overrides)
            corpus, loader = setup.load_corpus(settings)
            ranks = distributed.init_distributed(device)
        hardware.prepare_for_training(device)

        # The folder is locked until the run ends.
        with (
            folder.open_run_dir(settings, ranks, corpus.sha256) as run,
            setup.report_machine_errors(),
        ):
            trainer = Trainer(settings, corpus, loader, run, ranks, signals, clock)
            exit_code = train(trainer, pretrained)
            ranks.barrier()
    if exit_code:
        raise SystemExit(exit_code)


def train(trainer: Trainer, pretrained: Path | None = None) -> int:
    """Train to the last step -> 0, or the exit code that a signal asks for.

    The run starts with `pretrained` weights if they are given, or resumes.
    """
    settings = trainer.settings
    trainer.restore_or_start(pretrained)
    progress.say(setup.summary(trainer))
    if trainer.step == 0 and pretrained is not None:
        trainer.evaluate()
    if trainer.is_finished:
        progress.say(f"already at step {trainer.step} of {trainer.steps}. To go on: steps=N")

    # A checkpoint is saved before the sample and the evaluation of its step: where these are cut
    # off, a resumed run does them again.
    while True:
        if trainer.is_due(settings.save_every):
            trainer.save()
        if trainer.is_due(settings.sample_every):
            trainer.sample()
        if trainer.is_due(settings.eval_every):
            trainer.evaluate()
        if trainer.is_finished or trainer.exit_code:
            break
        trainer.train_step()
        trainer.fit_steps()
        if trainer.is_due(settings.log_every):
            trainer.report()

    # A signal asks to save what was trained and to end.
    if trainer.exit_code:
        trainer.save()
        trainer.log.close()
        progress.say(
            f"step {trainer.step} is saved in {trainer.run_dir}. "
            "To go on: the same overrides and resume=true"
        )
        return trainer.exit_code
    trainer.log.close()
    trainer.log.plot()
    progress.say(f'done. Now try: python generate.py --run {trainer.run_dir} "PROMPT"')
    return 0


if __name__ == "__main__":
    errors.start_line()
    if {"-h", "--help"} & {*sys.argv}:
        print(help_text())
        sys.exit()
    # Under torchrun, gloo's destructor can hang.
    with distributed.hard_exit("RANK" in os.environ):
        main(sys.argv[1:])
