"""Train many runs, each in its own process: one at a time, or one per GPU."""

import fcntl
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import sleep
from typing import IO

import torch
from tqdm import tqdm

from run import ROOT, errors
from run.compose import compose
from run.progress import say, warn_once
from run.signals import Signals
from tools.compare.runs import Run, command, commit, read_records

FINISHED = "finished before"  # the outcome of a run that an earlier call trained
Environment = dict[str, str]  # environment variables, which may assign a GPU
COMMAND = "$ python train.py"  # the first line of a log, followed by the overrides


@dataclass
class Job:
    """A run to train: its folder, and the overrides for train.py, which define it completely.

    The baseline trains first, and determines how long this run trains and whether it compiles.
    """

    run_dir: Path
    overrides: list[str]
    baseline: "Job | None" = None
    factor: float | None = None  # multiplies the learning rates, in a search for the best ones
    compared_with: str | None = None  # the baseline of the same size
    run: Run | None = None  # set once it is trained, even if it diverged
    outcome: str | None = None  # set once it has ended
    # During training: the process, the environment that assigns it a GPU, and the locked log.
    process: subprocess.Popen | None = None
    gpu: Environment | None = None
    log: IO | None = None

    @property
    def log_path(self) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    def end(self, outcome: str) -> None:
        self.outcome = outcome
        say(f"{self.run_dir.name}: {outcome}")

    def update(self, free_gpus: list[Environment], position: str) -> None:
        """Start the job on a free GPU once its baseline has ended.

        Mark it as ended when its process exits. `position` is "run 1 of 4", for the message.
        """
        is_ready = self.baseline is None or self.baseline.outcome is not None
        if self.process is None and is_ready and free_gpus:
            self.try_start(free_gpus, position)
        elif self.process is not None and self.process.poll() is not None:
            free_gpus.append(self.gpu)
            self.finish()

    def try_start(self, free_gpus: list[Environment], position: str) -> None:
        """Start train.py, unless another call is training the run or the run is finished."""
        self.run_dir.mkdir(parents=True, exist_ok=True)  # resume=true requires a folder
        log = open_locked(self.log_path)
        if log is None:
            return
        try:
            self.match_baseline()
            self.check_previous(log)
            if self.outcome is None:
                say(f"{self.run_dir.name}: training ({position})")
                self.gpu = free_gpus.pop()
                self.start(log)
        finally:
            # The log of a process that has started stays locked until the run is recorded.
            if self.process is None:
                log.close()

    def start(self, log: IO) -> None:
        """Start train.py, with its output in the log."""
        log.truncate(0)
        print(COMMAND, shlex.join(self.overrides), file=log, flush=True)
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "train.py", *self.overrides],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | self.gpu,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the runs
        )
        self.log = log

    def match_baseline(self) -> None:
        """Compile if the baseline did; if time is limited, train on the baseline's token count."""
        if self.baseline is None:
            return
        settings = compose(self.overrides)
        others = compose(self.baseline.overrides)
        # With the same minutes or tokens per parameter, the numbers of steps would differ.
        gives_tokens = settings.steps is None and settings.tokens_per_parameter is not None
        is_timed = (
            (settings.max_minutes is not None or gives_tokens)
            and settings.max_minutes == others.max_minutes
            and settings.tokens_per_parameter == others.tokens_per_parameter
            and settings.steps == others.steps
        )
        run = self.baseline.run
        if run is None or run.has_diverged:
            if is_timed:
                self.end(
                    "the baseline, which sets the number of steps, did not finish. fix: steps=N "
                    "max_minutes=null tokens_per_parameter=null, or different learning rates"
                )
            return
        self.overrides.append(f"compile={run.settings['machine']['compiled']}".lower())
        if is_timed:
            steps = run.last["tokens"] // settings.batch_tokens
            self.overrides += ["max_minutes=null", f"steps={steps}"]

    def check_previous(self, log: IO) -> None:
        """End the job if the run is finished, or was trained with different overrides."""
        # A finished run is in the records. A run that has started has a log, whose first line is
        # its command.
        run = read_records(self.run_dir.parent).get(self.run_dir.name)
        log.seek(0)
        first_line = log.readline()
        if run is not None:
            previous = run.overrides
        else:
            previous = shlex.split(first_line.removeprefix(COMMAND))

        # The folder may have been moved, so run_dir may differ.
        different = set(previous) ^ set(self.overrides)
        changed = sorted(word for word in different if "run_dir=" not in word)
        if previous and changed:
            words = " ".join(changed)
            self.end(
                f"the folder contains a run with different overrides ({words}). fix: choose a "
                "different --dir"
            )
        elif run is not None:
            self.run = run
            self.end(FINISHED)

    def finish(self) -> None:
        """Record the run that the process trained, and end the job with its outcome."""
        code = self.process.returncode
        if code == 0:
            self.run = Run.read(self.run_dir)
            outcome = f"{self.run.loss:.4f} {self.run.metric_name}"
        else:
            lines = self.log_path.read_text(errors="replace", encoding="utf-8").strip().splitlines()
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
        self.log.close()
        self.end(outcome)


def open_locked(path: Path) -> IO | None:
    """Open and lock the log of a run; return None if another call has locked it.

    The training process inherits the lock with its standard output. So if this process is killed
    during training, the log stays locked until the training process has also ended. The lock is
    not a FileLock of the filelock library, because child processes do not inherit a FileLock.
    """
    log = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.close()
        return None
    except OSError as error:
        if error.errno not in errors.UNSUPPORTED:
            raise
        warn_once(
            f"the file system of {path.parent} does not support locks: do not run the same "
            "comparison twice at once"
        )
    return log


def train_all(jobs: list[Job]) -> None:
    """Train the unfinished jobs, one at a time on each GPU.

    Waits for runs that another call trains. On a signal, all runs save, and the process exits.
    """
    device = compose(jobs[0].overrides).device
    free_gpus = gpu_environments(device)
    say("training (see the .log of each run)")
    with Signals() as signals, tqdm(total=len(jobs), unit="run", disable=None) as bar:
        signals.arm()
        try:
            while bar.n < len(jobs) and not signals.received:
                for number, job in enumerate(jobs, 1):
                    if job.outcome is None and not signals.received:
                        job.update(free_gpus, f"run {number} of {len(jobs)}")
                # The bar estimates the time left from the runs that this call has trained.
                bar.initial = sum(job.outcome == FINISHED for job in jobs)
                bar.n = sum(job.outcome is not None for job in jobs)
                sleep(0.5)
        finally:
            # Signal all processes before waiting for any, so that they save at the same time.
            running = []
            for job in jobs:
                if job.process is not None and job.outcome is None:
                    running.append(job.process)
            for process in running:
                process.terminate()
        # A second Ctrl-C raises SystemExit above or here, and skips this wait.
        for process in running:
            process.wait()
    if signals.received:
        errors.exit_with(
            signals.received,
            "stopped; runs that finished a step are saved. fix: run the same command to continue",
        )


def gpu_environments(device: str) -> list[Environment]:
    """Return one environment for each concurrent run, each with a different GPU.

    With at most one GPU, the runs take turns in an unchanged environment.
    """
    count = 0
    if device in ("auto", "cuda"):
        count = torch.cuda.device_count()
    if count < 2:
        return [{}]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(index) for index in range(count)]
    if visible:
        gpus = visible.split(",")
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
