"""Train a language model:  python train.py attention=mha max_minutes=10

torchrun --nproc_per_node=8 train.py ...  trains the same model on eight GPUs.
python train.py --help  lists the keys.
"""

from time import monotonic

BEFORE_IMPORTS = monotonic()

import shlex
import sys

from run import distributed, errors, folder, hardware
from run.compose import help_text
from run.progress import print0
from run.signals import Signals
from training import setup
from training.clock import Clock
from training.environment import Environment
from training.profiling import start_profiler

IMPORT_SECONDS = monotonic() - BEFORE_IMPORTS  # included in max_minutes


def main(overrides: list[str]) -> None:
    """Set up a run from its config, train, and exit with a code that shows how the run ended."""
    if {"-h", "--help"} & set(overrides):
        with errors.exit_on_invalid_input():
            print(help_text([word for word in overrides if not word.startswith("-")]))
        return
    clock = Clock(monotonic() - IMPORT_SECONDS)
    with Signals() as signals:
        # Errors in settings and data are reported here, before a new run's folder is created.
        ranks = distributed.init_distributed()
        settings, start, device = ranks.on_rank0(setup.read_settings, overrides)
        ranks = ranks.with_device(device)
        settings, corpus, loader = setup.open_data(settings, start)
        hardware.prepare_for_training(device)

        # The folder is locked until the run ends.
        with (
            folder.open_run_dir(settings, ranks, start.resumed) as run_dir,
            setup.report_machine_errors(run_dir, settings.resume),
        ):
            env = Environment(settings, corpus, loader, run_dir, ranks, signals, clock)
            run = setup.build_run(env, start)
            try:
                exit_code = train(run)
            finally:
                run.log.close()
            ranks.barrier()
    if exit_code:
        raise SystemExit(exit_code)


def train(run: setup.Run) -> int:
    """Train to the last step. Returns 0, or the exit code that a signal requests."""
    env = run.env
    settings = env.settings
    progress = run.progress
    print0(setup.summary(run))
    if progress.step == 0 and settings.init_from is not None:
        run.evaluator.evaluate(progress)
    if progress.is_finished:
        longer = f"steps={2 * progress.step}"
        if settings.max_minutes is not None:
            longer += " max_minutes=null"
        print0(
            f"the run is already finished, at step {progress.step}. To train longer: "
            f"{folder.resume_command(env.run_dir)} {longer}"
        )

    profiler = None
    if settings.profile is not None and env.ranks.is_main:
        profiler = start_profiler(settings.profile, env.run_dir, env.ranks.device, env.clock)

    # The checkpoint of a step is saved before the step's sample and evaluation. A resumed run makes
    # them if they are missing from its files.
    while True:
        if progress.is_due(settings.save_every):
            run.checkpointer.save(progress)
        if progress.is_due(settings.sample_every):
            run.evaluator.sample(progress)
        if progress.is_due(settings.eval_every):
            run.evaluator.evaluate(progress)
        if progress.is_finished or env.signals.agreed:
            break

        take_step(run)
        if profiler is not None:
            profiler.step()
        if run.budget.fit(progress):
            print0(run.trainer.rates.describe(progress.expected_steps))
        run.log.advance(progress, run.budget.expected_end(progress))
        if progress.is_due(settings.log_every):
            report(run)

    # A signal has asked the run to save a checkpoint and end.
    if env.signals.agreed:
        run.checkpointer.save(progress)
        run.log.close()
        print0(f"step {progress.step} is saved. To continue: {folder.resume_command(env.run_dir)}")
        return env.signals.agreed
    env.signals.finish()
    run.log.close()
    run.log.plot()
    print0(f'done. Now try: python generate.py --run {shlex.quote(str(env.run_dir))} "PROMPT"')
    return 0


def take_step(run: setup.Run) -> None:
    """Take an optimizer step, and count it."""
    result = run.trainer.step(run.progress, run.micro_batch_size)
    run.meter.add(result, run.progress)
    run.progress.step += 1
    run.env.signals.arm()  # from now on there is something to save
    run.env.signals.agree(run.env.ranks)


def report(run: setup.Run) -> None:
    """Log the metrics of the steps since the last report."""
    metrics = run.meter.report(run.progress)
    seconds_left = run.budget.time_to_end(run.progress, metrics["tokens_per_second"])
    run.log.report(run.progress, metrics, seconds_left)


if __name__ == "__main__":
    with errors.hard_exit(), errors.report_errors():
        main(sys.argv[1:])
