"""Many runs, each a process of its own: one after the other, or one on each GPU."""

import fcntl
import json
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import IO

import torch
from tqdm import tqdm

from common import errors
from common.atomic_dir import flock
from common.errors import IntegrityError
from common.instantiate import ROOT
from tools.compare.runs import Run
from training import resume
from training.signals import Signals

MADE = ("model.vocab_size", "data.tokenizer")  # settings that a run may find out for itself


@dataclass
class Job:
    """A run to come: `words` are for train.py, `settings` what they come to."""

    run: Path
    words: list[str]
    settings: dict
    problem: str | None = None  # why it has no end

    @property
    def log(self) -> Path:
        return self.run.with_name(f"{self.run.name}.log")

    def claimed(self) -> IO | None:
        """Its log, locked as long as this process or one that it is handed to has it open. None: another has it."""
        self.run.parent.mkdir(parents=True, exist_ok=True)
        log = self.log.open("a")
        try:
            flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return log
        except BlockingIOError:
            log.close()
            return None

    def is_finished(self) -> bool:
        """Whether nothing is left to train. Sets `problem` where what is there was trained with other words."""
        with suppress(IntegrityError):  # train.py tells of it
            run = Run.read(self.run)
            then = {key: value for key, value in run.settings.items() if key in self.settings}
            other = resume.changes(then, self.settings)
            if told := [text for key, text in other.items() if key not in MADE]:
                self.problem = (
                    f"there is a run with other words: {', '.join(told)}. fix: another --dir"
                )
            return run.done or self.problem is not None
        return False

    def begin(self, log: IO, gpu: str | None) -> subprocess.Popen:
        log.truncate(0)
        print("$ python train.py", shlex.join(self.words), file=log, flush=True)
        where = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self.run.mkdir(exist_ok=True)  # where there is nothing, resume=true would be an error
        words = [sys.executable, ROOT / "train.py", *self.words]
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        return subprocess.Popen(
            words, **streams, env=os.environ | where, start_new_session=True
        )  # Ctrl-C is for us

    def share(self) -> float:
        """How much of it is done, about."""
        with suppress(OSError, ValueError, LookupError):
            line = json.loads((self.run / "metrics.jsonl").read_text().splitlines()[-1])
            steps, minutes = self.settings["steps"], self.settings["max_minutes"]
            return min(1.0, line["step"] / steps if steps else line["seconds"] / (60 * minutes))
        return 0.0

    def end(self, code: int) -> str:
        """What came of it, in a line."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        told = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])
        self.problem = f"exit {code}: {told.removeprefix('error: ')}" if code else None
        with suppress(IntegrityError, LookupError):
            return self.problem or f"{(run := Run.read(self.run)).loss:.4f} {run.unit}"
        return "cannot be read"


def train_all(jobs: list[Job], later: int = 0) -> None:
    """Trains what is not finished, and waits for what another call trains. A signal ends it, with all saved.

    `later`: how many more will come, for who watches.
    """
    waiting, running, ended, before, began, total = (
        list(jobs),
        {},
        0,
        0,
        monotonic(),
        len(jobs) + later,
    )
    free = gpus_of(jobs[0].settings["device"])

    def left(done: float) -> str:
        if done - before < 0.02:
            return "? left"
        return f"{timedelta(seconds=round((monotonic() - began) * (total - done) / (done - before)))} left"

    with Signals() as signals, tqdm(total=total, bar_format="{desc} |{bar}|", disable=None) as bar:
        signals.arm()
        try:
            while (waiting or running) and not signals.code:
                for job in [*waiting]:
                    if not free or (log := job.claimed()) is None:
                        continue
                    waiting.remove(job)
                    with log:
                        if job.is_finished():
                            ended, before = ended + 1, before + 1
                            told = job.problem or "finished before"
                            tqdm.write(f"{ended}/{total} {job.run.name}: {told}", file=sys.stderr)
                        else:
                            process = job.begin(log, free[-1])
                            running[process.pid] = job, process, free.pop()
                for job, process, gpu in [*running.values()]:
                    if process.poll() is not None:
                        del running[process.pid]
                        free.append(gpu)
                        ended += 1
                        told = job.end(process.returncode)
                        tqdm.write(
                            f"{ended}/{total}, {left(ended)}. {job.run.name}: {told}",
                            file=sys.stderr,
                        )
                bar.n = ended + sum(job.share() for job, _, _ in running.values())
                bar.set_description_str(f"{ended} of {total} runs, {left(bar.n)}")
                sleep(0.5)
        finally:
            for _, process, _ in running.values():
                process.terminate()
            ended += sum(process.wait() == 0 for _, process, _ in running.values())
    if signals.code:
        problem = f"stopped, what was trained is saved ({ended} of {total} runs are finished)"
        errors.exit_with(signals.code, f"{problem}. fix: the same call goes on")


def gpus_of(device: str) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES for each of the runs that are trained at a time; None: as it is."""
    count = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (
        [None]
        if count < 2
        else named.split(",")
        if named
        else [str(number) for number in range(count)]
    )
