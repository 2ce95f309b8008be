"""Trains many runs, each by a process of its own: one after the other, or one on each GPU."""

import fcntl
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import IO

import torch
from tqdm import tqdm

from run import errors
from run.errors import IntegrityError
from run.instantiate import ROOT
from run.progress import duration, say
from run.sealed import flock
from run.signals import Signals
from tools.compare.runs import Run
from training import resume

SET_BY_RUN = ("model.vocab_size", "data.tokenizer")  # settings that training itself may change


@dataclass
class Job:
    """A run to train: the overrides for train.py, and the settings that they compose to."""

    run_dir: Path
    overrides: list[str]
    settings: dict
    problem: str | None = None  # why the run did not finish
    # Of a run that trains: its process, and the environment that gives it a GPU.
    process: subprocess.Popen | None = None
    gpu: dict[str, str] | None = None

    @property
    def log_path(self) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    def try_lock(self) -> IO | None:
        """Opens and locks the log, or returns None where another call has locked it.

        The lock lasts until this process and the training process, which inherits it, close it.
        """
        self.run_dir.parent.mkdir(parents=True, exist_ok=True)
        log = self.log_path.open("a")
        try:
            flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.close()
            return None
        return log

    def is_finished(self) -> bool:
        """Whether nothing is left to train; sets `problem` if the run there has other settings."""
        try:
            run = Run.read(self.run_dir)
        except IntegrityError:  # train.py decides whether it can resume from this
            return False
        # What training adds to the settings of a run is not compared.
        changes = []
        for key, text in resume.changed_settings(run.settings, self.settings).items():
            if key.partition(".")[0] in self.settings and key not in SET_BY_RUN:
                changes.append(text)
        if changes:
            self.problem = (
                f"the run there has other settings: {', '.join(changes)}. fix: another --dir"
            )
        return run.done or self.problem is not None

    def start(self, log: IO, gpu: dict[str, str]) -> None:
        """Starts train.py, which writes into the log; on one GPU if there are several."""
        log.truncate(0)
        print("$ python train.py", shlex.join(self.overrides), file=log, flush=True)
        self.run_dir.mkdir(exist_ok=True)  # resume=true needs a folder
        self.gpu = gpu
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "train.py", *self.overrides],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | gpu,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the runs
        )

    def finish(self) -> str:
        """Sets `problem` where training failed, and describes the outcome in a line."""
        if self.process.returncode != 0:
            lines = self.log_path.read_text(errors="replace").strip().splitlines()
            problems = [line for line in lines if line.startswith("error: ")]
            message = (problems or lines)[-1].removeprefix("error: ")
            self.problem = f"exit {self.process.returncode}: {message}"
            return self.problem
        try:
            run = Run.read(self.run_dir)
            return f"{run.loss:.4f} {run.metric_name}"
        except (IntegrityError, LookupError):
            return "cannot be read"


class JobRunner:
    """Trains as many jobs at a time as there are GPUs, and waits for those of another call."""

    def __init__(self, jobs: list[Job]):
        self.waiting = list(jobs)
        self.running: list[Job] = []
        self.free_gpus = visible_gpus(jobs[0].settings["device"])

        # What is shown; runs that had finished before this call are not among the trained.
        self.total = len(jobs)
        self.num_finished = 0
        self.num_trained = 0
        self.start_time = monotonic()

    def start_ready(self) -> None:
        """Starts waiting jobs while a GPU is free, and skips those that are finished."""
        # Iterate over copies, because jobs leave the list.
        for job in list(self.waiting):
            if not self.free_gpus:
                return
            log = job.try_lock()
            if log is None:  # another call trains it
                continue
            self.waiting.remove(job)
            # Closing our copy leaves the lock to the training process, or frees it.
            with log:
                if job.is_finished():
                    self.report(job, job.problem or "finished before")
                else:
                    job.start(log, self.free_gpus.pop())
                    self.running.append(job)

    def collect_finished(self) -> None:
        """Reports jobs whose process has ended, and frees their GPUs."""
        for job in list(self.running):
            if job.process.poll() is not None:
                self.running.remove(job)
                self.free_gpus.append(job.gpu)
                self.num_trained += 1
                self.report(job, job.finish())

    def report(self, job: Job, outcome: str) -> None:
        """Counts a job that has finished, and says how it ended."""
        self.num_finished += 1
        counts = f"{self.num_finished}/{self.total}, {self.time_left()}"
        say(f"{counts}. {job.run_dir.name}: {outcome}")

    def time_left(self) -> str:
        """Estimates the time for the rest from the average of the runs trained in this call."""
        if self.num_trained == 0:
            return "? left"
        seconds_per_run = (monotonic() - self.start_time) / self.num_trained
        return f"{duration(seconds_per_run * (self.total - self.num_finished))} left"

    def stop(self) -> None:
        """Ends the runs that still train; each saves first."""
        # Signal all before waiting for any, so that they save at the same time.
        for job in self.running:
            job.process.terminate()
        for job in self.running:
            job.process.wait()


def train_all(jobs: list[Job]) -> None:
    """Trains the jobs that are not finished. On a signal, all runs save, and the process exits."""
    runner = JobRunner(jobs)
    # `disable=None` shows the bar on a terminal only.
    bar = tqdm(total=runner.total, bar_format="{desc} |{bar}| {elapsed}", disable=None)
    with Signals() as signals, bar:
        signals.arm()
        try:
            while (runner.waiting or runner.running) and not signals.code:
                runner.start_ready()
                runner.collect_finished()
                bar.n = runner.num_finished
                bar.set_description_str(f"{bar.n} of {bar.total} runs, {runner.time_left()}")
                sleep(0.5)
        finally:
            runner.stop()
    if signals.code:
        finished = f"{runner.num_finished} of {runner.total} runs are finished"
        errors.exit_with(
            signals.code,
            f"stopped, what was trained is saved ({finished}). fix: the same call goes on",
        )


def visible_gpus(device: str) -> list[dict[str, str]]:
    """The environment of each run that trains at the same time: a GPU if there are several."""
    count = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if count < 2:
        return [{}]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible.split(",")]
