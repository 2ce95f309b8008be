"""Trains many runs, each by a process of its own: one after the other, or one on each GPU."""

import fcntl
import json
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

from common import errors
from common.atomic_dir import flock
from common.errors import IntegrityError
from common.instantiate import ROOT
from common.progress import duration, say
from tools.compare.runs import Run
from training import resume
from training.signals import Signals

SET_BY_RUN = ("model.vocab_size", "data.tokenizer")  # settings that training itself may change


@dataclass
class Job:
    """A run to train: the overrides for train.py, and the settings that they compose to."""

    run_dir: Path
    overrides: list[str]
    settings: dict
    problem: str | None = None  # why the run did not finish

    @property
    def log_path(self) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    def try_lock(self) -> IO | None:
        """Opens and locks the log, or returns None where another call has locked it.

        The lock lasts until both this process and the training process, which inherits it, close it.
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
        """Whether nothing is left to train; sets `problem` where the run there has other settings."""
        try:
            run = Run.read(self.run_dir)
        except IntegrityError:  # train.py decides whether it can resume from this
            return False
        before = {key: value for key, value in run.settings.items() if key in self.settings}
        changes = resume.changes(before, self.settings)
        changes = [text for key, text in changes.items() if key not in SET_BY_RUN]
        if changes:
            self.problem = (
                f"the run there has other settings: {', '.join(changes)}. fix: another --dir"
            )
        return run.done or self.problem is not None

    def start(self, log: IO, gpu: str | None) -> subprocess.Popen:
        """Starts train.py, which writes into the log, on one GPU if there are several."""
        log.truncate(0)
        print("$ python train.py", shlex.join(self.overrides), file=log, flush=True)
        self.run_dir.mkdir(exist_ok=True)  # resume=true needs a folder
        environment = dict(os.environ)
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        return subprocess.Popen(
            [sys.executable, ROOT / "train.py", *self.overrides],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the runs
        )

    def progress(self) -> float:
        """The fraction of the run that is trained, from 0 to 1, by the last line of its metrics."""
        try:
            line = json.loads((self.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
            if self.settings["steps"]:
                fraction = line["step"] / self.settings["steps"]
            else:
                fraction = line["seconds"] / (60 * self.settings["max_minutes"])
        except (OSError, ValueError, LookupError):  # nothing is written yet
            return 0.0
        return min(1.0, fraction)

    def finish(self, exit_code: int) -> str:
        """Sets `problem` where training failed, and describes the outcome in a line."""
        if exit_code != 0:
            message = self.error_line().removeprefix("error: ")
            self.problem = f"exit {exit_code}: {message}"
            return self.problem
        try:
            run = Run.read(self.run_dir)
            return f"{run.loss:.4f} {run.metric_name}"
        except (IntegrityError, LookupError):
            return "cannot be read"

    def error_line(self) -> str:
        """The last error in the log, else its last line."""
        lines = [
            line for line in self.log_path.read_text(errors="replace").splitlines() if line.strip()
        ]
        for line in reversed(lines):
            if line.startswith("error: "):
                return line
        return lines[-1]


class JobRunner:
    """Trains as many jobs at a time as there are GPUs, and waits for those of another call.

    `num_later` more jobs follow in a later runner; they count in the total that is shown.
    """

    def __init__(self, jobs: list[Job], num_later: int):
        self.waiting = list(jobs)
        self.running: list[tuple[Job, subprocess.Popen, str | None]] = []
        self.free_gpus = visible_gpus(jobs[0].settings["device"])

        # What the progress bar shows.
        self.total = len(jobs) + num_later
        self.num_finished = 0
        self.num_skipped = 0  # finished before this call
        self.start_time = monotonic()

    def start_ready(self) -> None:
        """Starts waiting jobs while a GPU is free, and skips those that are finished."""
        for job in list(self.waiting):
            if not self.free_gpus:
                return
            log = job.try_lock()
            if log is None:
                continue
            self.waiting.remove(job)
            with log:
                if job.is_finished():
                    self.num_finished += 1
                    self.num_skipped += 1
                    outcome = job.problem or "finished before"
                    say(f"{self.num_finished}/{self.total} {job.run_dir.name}: {outcome}")
                else:
                    gpu = self.free_gpus.pop()
                    self.running.append((job, job.start(log, gpu), gpu))

    def collect_finished(self) -> None:
        """Reports jobs whose process has ended, and frees their GPUs."""
        for entry in list(self.running):
            job, process, gpu = entry
            if process.poll() is None:
                continue
            self.running.remove(entry)
            self.free_gpus.append(gpu)
            self.num_finished += 1
            outcome = job.finish(process.returncode)
            time_left = self.time_left(self.num_finished)
            say(f"{self.num_finished}/{self.total}, {time_left}. {job.run_dir.name}: {outcome}")

    def show_progress(self, bar: tqdm) -> None:
        bar.n = self.num_finished + sum(job.progress() for job, _, _ in self.running)
        time_left = self.time_left(bar.n)
        bar.set_description_str(f"{self.num_finished} of {self.total} runs, {time_left}")

    def time_left(self, done: float) -> str:
        """Estimates the time for the rest from the average of what this call has trained."""
        trained = done - self.num_skipped
        if trained < 0.02:  # of a run
            return "? left"
        seconds_per_run = (monotonic() - self.start_time) / trained
        return f"{duration(seconds_per_run * (self.total - done))} left"

    def stop(self) -> None:
        """Ends the runs that still train; each saves first."""
        for _, process, _ in self.running:
            process.terminate()
        for _, process, _ in self.running:
            if process.wait() == 0:
                self.num_finished += 1


def train_all(jobs: list[Job], num_later: int = 0) -> None:
    """Trains the jobs that are not finished. On a signal, all runs save, and the process exits."""
    runner = JobRunner(jobs, num_later)
    bar = tqdm(total=runner.total, bar_format="{desc} |{bar}|", disable=None)
    with Signals() as signals, bar:
        signals.arm()
        try:
            while (runner.waiting or runner.running) and not signals.code:
                runner.start_ready()
                runner.collect_finished()
                runner.show_progress(bar)
                sleep(0.5)
        finally:
            runner.stop()
    if signals.code:
        finished = f"{runner.num_finished} of {runner.total} runs are finished"
        problem = f"stopped, what was trained is saved ({finished})"
        errors.exit_with(signals.code, f"{problem}. fix: the same call goes on")


def visible_gpus(device: str) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES for each run that trains at the same time; None leaves it as it is."""
    count = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if count < 2:
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")
    return [str(index) for index in range(count)]
