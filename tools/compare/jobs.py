"""Trains many runs, each by a process of its own: one after the other, or one on each GPU."""

import fcntl
import os
import shlex
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import sleep
from typing import IO

import torch

from run import errors
from run.instantiate import ROOT
from run.progress import say, waiting
from run.settings import compose
from run.signals import Signals
from tools.compare.runs import Run, command, commit, read_records

FINISHED = "finished before"  # the outcome of a run that an earlier call has trained
Environment = dict[str, str]  # variables, which may give a run a GPU
COMMAND = "$ python train.py"  # the first line of a log, followed by the overrides


@dataclass
class Job:
    """A run to train: its folder, and the overrides for train.py, which say all about it.

    Its baseline is trained before it, and decides how long it trains and whether it is compiled.
    """

    run_dir: Path
    overrides: list[str]
    baseline: "Job | None" = None
    factor: float | None = None  # of the learning rates, where it looks for the best of these
    compared_with: str | None = None  # the baseline of its size
    run: Run | None = None  # once it has been trained, also where it diverged
    outcome: str | None = None  # once it has ended
    # While it trains: its process, and the environment that gives it a GPU.
    process: subprocess.Popen | None = None
    gpu: Environment | None = None
    lock: ExitStack | None = None

    @property
    def log_path(self) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    def end(self, outcome: str) -> None:
        self.outcome = outcome
        say(f"{self.run_dir.name}: {outcome}")

    def update(self, free_gpus: list[Environment]) -> None:
        """Start the job on a free GPU once its baseline has ended; end it once its process has."""
        is_ready = self.baseline is None or self.baseline.outcome is not None
        if self.process is None and is_ready and free_gpus:
            self.try_start(free_gpus)
        elif self.process is not None and self.process.poll() is not None:
            free_gpus.append(self.gpu)
            self.finish()

    def try_start(self, free_gpus: list[Environment]) -> None:
        """Start train.py, unless another call trains the run, or nothing is left to train."""
        self.run_dir.mkdir(parents=True, exist_ok=True)  # resume=true needs a folder
        # The lock of the log lasts until the run is recorded, or until this process and the
        # training process, which inherits it, have ended.
        with ExitStack() as stack:
            log = stack.enter_context(self.log_path.open("a+"))
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            self.match_baseline()
            self.check_previous(log)
            if self.outcome is not None:
                return
            say(f"{self.run_dir.name}: training")
            self.gpu = free_gpus.pop()
            log.truncate(0)
            print(COMMAND, shlex.join(self.overrides), file=log, flush=True)
            self.process = subprocess.Popen(
                [sys.executable, ROOT / "train.py", *self.overrides],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self.gpu,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the runs
            )
            self.lock = stack.pop_all()

    def match_baseline(self) -> None:
        """Compile if the baseline did; with the same limit of time, train on as many tokens."""
        if self.baseline is None:
            return
        settings = compose(self.overrides)
        others = compose(self.baseline.overrides)
        length = (settings.max_minutes, settings.steps)
        is_timed = length[0] is not None and length == (others.max_minutes, others.steps)
        run = self.baseline.run
        if run is None or run.has_diverged:
            if is_timed:
                self.end(
                    "the baseline did not finish, which decides how long it trains. "
                    "fix: steps=N max_minutes=null, or other rates"
                )
            return
        self.overrides.append(f"compile={run.settings['machine']['compiled']}".lower())
        if is_timed:
            steps = run.last["tokens"] // settings.batch_tokens
            self.overrides += ["max_minutes=null", f"steps={steps}"]

    def check_previous(self, log: IO) -> None:
        """End the job if the run is finished, or was trained with other overrides."""
        # The records know a run that has finished, and the log one that has begun.
        run = read_records(self.run_dir.parent).get(self.run_dir.name)
        log.seek(0)
        previous = run.overrides if run else shlex.split(log.readline().removeprefix(COMMAND))
        # The folder may have been moved.
        changed = {word for word in set(previous) ^ set(self.overrides) if "run_dir=" not in word}
        if previous and changed:
            words = " ".join(sorted(changed))
            self.end(f"the run there has other overrides ({words}). fix: another --dir")
        elif run:
            self.run = run
            self.end(FINISHED)

    def finish(self) -> None:
        """End the job by how its process has ended, and record what it has trained."""
        code = self.process.returncode
        if code == 0:
            self.run = Run.read(self.run_dir)
            outcome = f"{self.run.loss:.4f} {self.run.metric_name}"
        else:
            lines = self.log_path.read_text(errors="replace").strip().splitlines()
            outcome = f"exit {code}: {lines[-1].removeprefix('error: ')}"
        if code == errors.DIVERGED:
            self.run = Run(self.run_dir, compose(self.overrides).model_dump(), [], done=True)
        if self.run is not None:
            self.run = replace(
                self.run,
                factor=self.factor,
                baseline=self.compared_with,
                commit=commit(),
                command=command(),
                overrides=self.overrides,
            )
            self.run.append_to_records()
        self.lock.close()
        self.end(outcome)


def train_all(jobs: list[Job]) -> None:
    """Train the jobs that are not finished, as many at a time as there are GPUs.

    Runs that another call trains are waited for. On a signal, all runs save, and the process exits.
    """
    # The environment of each run that trains at the same time: a GPU if there are several.
    free_gpus = [{}]
    device = compose(jobs[0].overrides).device
    count = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if count > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        free_gpus = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible.split(",")]
    with Signals() as signals, waiting("what each run reports is in its .log", len(jobs)) as bar:
        signals.is_armed = True
        try:
            while bar.n < len(jobs) and not signals.code:
                for job in jobs:
                    if job.outcome is None:
                        job.update(free_gpus)
                # The time left follows from the runs that this call has trained.
                bar.initial = sum(job.outcome == FINISHED for job in jobs)
                bar.n = sum(job.outcome is not None for job in jobs)
                sleep(0.5)
        finally:
            # Signal all before waiting for any, so that they save at the same time.
            running = [job.process for job in jobs if job.process and job.outcome is None]
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
    if signals.code:
        errors.exit_with(
            signals.code, "stopped, what was trained is saved. fix: the same call goes on"
        )
