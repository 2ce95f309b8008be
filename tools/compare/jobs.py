"""Train many runs, each in its own process: one at a time, one per GPU, or several on a CPU."""

import math
import os
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import sleep

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from run import ROOT, checkpoint, errors
from run.errors import IntegrityError
from run.progress import print0
from run.settings import as_typed
from run.signals import Signals
from run.threads import cores, cpu_quota
from tools.compare.runs import Run, command, commit, differences, read_records

# Keys of a run that may differ when a comparison continues, because they do not affect training.
MAY_DIFFER = ("run_dir", "resume", "wandb")
Environment = dict[str, str]  # environment variables, which may assign a GPU


@dataclass
class Job:
    """A run to train: its folder, the overrides for train.py, and the settings that it will save.

    The baseline trains first, and may determine how long this run trains and whether it compiles.
    """

    run_dir: Path
    overrides: list[str]
    settings: dict  # with the SHA-256 of the text
    swept: list[str]  # keys that the comparison varies
    compared_with: str  # the baseline of the same size
    factor: float | None = None  # multiplies the learning rates, in a search for the best ones
    baseline: "Job | None" = None
    run: Run | None = None  # set once it is trained, even if it diverged
    outcome: str | None = None  # set once it has ended

    @property
    def log_path(self) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    def set(self, key: str, value: object) -> None:
        self.overrides.append(f"{key}={as_typed(value)}")
        *parents, last = key.split(".")
        group = self.settings
        for parent in parents:
            group = group[parent]
        group[last] = value

    def end(self, outcome: str) -> None:
        self.outcome = outcome
        print0(f"{self.run_dir.name}: {outcome}")

    def prepare(self) -> None:
        """End the job if it cannot or need not be trained; else set an outdated run aside."""
        self.match_baseline()
        if self.outcome is not None:
            return
        run = read_records(self.run_dir.parent).get(self.run_dir.name)
        previous = None if run is None else run.settings
        if run is None:
            with suppress(IntegrityError):  # train.py will report it
                newest = checkpoint.newest_checkpoint(self.run_dir)
                previous = None if newest is None else checkpoint.load_config(newest)
        different = []
        if previous is not None:
            keys = differences(previous, self.settings)
            different = sorted(key for key in keys if key not in MAY_DIFFER)
        if run is not None and not different:
            self.run = run
            self.end("already finished")
        elif is_in_use(self.run_dir):
            self.end("still being trained by an earlier command. fix: repeat this command later")
        elif different:
            print0(f"{self.run_dir.name}: training again, with different {', '.join(different)}")
            set_aside(self.run_dir)

    def match_baseline(self) -> None:
        """Compile as the baseline did; with equal length limits, train on equally many tokens."""
        if self.baseline is None:
            return
        ends = ("max_minutes", "tokens_per_parameter", "steps")
        # With the same minutes or tokens per parameter, the numbers of steps would differ.
        is_timed = all(self.settings[key] == self.baseline.settings[key] for key in ends) and (
            self.settings["max_minutes"] is not None
            or (
                self.settings["steps"] is None and self.settings["tokens_per_parameter"] is not None
            )
        )
        run = self.baseline.run
        if run is None or run.has_diverged:
            if is_timed:
                self.end(
                    "the baseline, which sets the number of steps, did not finish. fix: steps=N "
                    "max_minutes=null tokens_per_parameter=null"
                )
            return
        self.set("compile", run.settings["machine"]["compiled"])
        if is_timed:
            self.set("max_minutes", None)
            self.set("steps", run.last["tokens"] // self.settings["batch_tokens"])

    def start(self, gpu: Environment) -> subprocess.Popen:
        """Start train.py, with its output in the log, which begins with the command."""
        self.run_dir.mkdir(parents=True, exist_ok=True)  # resume=true requires a folder
        with self.log_path.open("w", encoding="utf-8") as log:
            print("$ python train.py", shlex.join(self.overrides), file=log, flush=True)
            return subprocess.Popen(
                [sys.executable, ROOT / "train.py", *self.overrides],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | gpu,
            )

    def finish(self, code: int) -> None:
        """End the job, given train.py's exit code; record the run if it finished or diverged."""
        if code == 0:
            self.run = Run.read(self.run_dir)
            outcome = f"{self.run.loss:.4f} {self.run.metric_name}"
        else:
            lines = self.log_path.read_text(errors="replace", encoding="utf-8").strip().splitlines()
            outcome = f"exit {code}: {lines[-1].removeprefix('error: ')}"
        if code == errors.DIVERGED:
            self.run = Run(self.run_dir, self.settings, [], done=True)
        if self.run is not None:
            self.run = replace(
                self.run,
                factor=self.factor,
                baseline=self.compared_with,
                swept=self.swept,
                commit=commit(),
                command=command(),
            )
            self.run.append_to_records()
        self.end(outcome)


def is_in_use(run_dir: Path) -> bool:
    """Whether a process is training in a run's folder, such as one whose comparison was killed."""
    file = run_dir / ".lock"
    if not file.exists():
        return False
    lock = FileLock(file, blocking=False, fallback_to_soft=False)
    try:
        checkpoint.acquire(lock)
    except Timeout:
        return True
    lock.release()
    return False


def set_aside(run_dir: Path) -> None:
    """Rename the folder of a run, if there is one, to NAME.old-1 or the next free number."""
    for number in count(1):
        place = run_dir.with_name(f"{run_dir.name}.old-{number}")
        if not place.exists():
            break
    if run_dir.exists():
        run_dir.rename(place)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a comparison's folder. Exits with code 2 if another process has locked it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", blocking=False, fallback_to_soft=False)
    try:
        checkpoint.acquire(lock)
    except Timeout:
        errors.exit_with(errors.INPUT, f"another comparison is training in this folder ({folder})")
    try:
        yield
    finally:
        lock.release()


def train_all(jobs: list[Job]) -> None:
    """Train the unfinished jobs, one at a time in each environment; baselines must come first.

    On a signal, all runs that finished a step save, and the process exits.
    """
    waiting = deque(enumerate(jobs, 1))
    running = {}  # process -> its job and GPU
    free_gpus = environments(jobs[0].settings["device"])
    with Signals() as signals, tqdm(total=len(jobs), unit="run", disable=None) as bar:
        signals.arm()
        try:
            while (waiting or running) and not signals.received:
                while waiting and free_gpus and not signals.received:
                    number, job = waiting[0]
                    if job.baseline is not None and job.baseline.outcome is None:
                        break  # until the baseline ends
                    waiting.popleft()
                    job.prepare()
                    if job.outcome is None:
                        print0(f"{job.run_dir.name}: training (run {number} of {len(jobs)})")
                        gpu = free_gpus.pop()
                        running[job.start(gpu)] = (job, gpu)
                for process in [process for process in running if process.poll() is not None]:
                    job, gpu = running.pop(process)
                    free_gpus.append(gpu)
                    job.finish(process.returncode)
                bar.update(sum(job.outcome is not None for job in jobs) - bar.n)
                if running:
                    sleep(0.5)
        finally:
            # Signal all processes before waiting for any, so that they save at the same time. A
            # Ctrl-C in the terminal has already reached them.
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


def environments(device: str) -> list[Environment]:
    """Return the environment variables of each concurrent run: one set for each NVIDIA GPU.

    If runs use no GPU, they take turns, unless OMP_NUM_THREADS leaves cores for further runs.
    """
    num_gpus = 0
    # device_count also counts GPUs whose driver is too old for torch.
    if device in ("auto", "cuda") and torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        num_cores = int(min(len(cores()), cpu_quota() or math.inf))
        return [{}] * max(1, num_cores // int(os.environ.get("OMP_NUM_THREADS", num_cores)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible.split(",")]
