"""Train for four tiny steps in forks that can be killed at any point, and check their files."""

import gc
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import RLock
from time import monotonic, sleep
from unittest import mock

import torch
from tqdm import tqdm

from data.corpus import Corpus
from data.loader import Loader
from data.prepare import Source
from data.sources import Text
from run import checkpoint, errors, folder
from run.distributed import Ranks
from run.signals import Signals
from tests.conftest import LONG, TINY, settings_of
from train import train
from training import logger, setup
from training.clock import Clock
from training.environment import Environment

tqdm.set_lock(RLock())  # tqdm's default lock is shared between forks, and a killed fork may hold it
CONTEXT = 8  # also the length of samples
WORDS = (
    f"context={CONTEXT}",
    "batch_tokens=32",
    "model.depth=1",
    "attention.dropout=0.1",
    "data=text",
)
STEPS = ("steps=4", "save_every=1", "eval_every=2", "sample_every=2", "log_every=3")
FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}
TIMED = {"seconds", "tokens_per_second", "peak_memory_bytes", "mfu", "mfu_whole_attention"}
Action = Callable[[], object]


@dataclass
class Job:
    """A run in `root`/run on a prepared corpus."""

    corpus: Corpus
    root: Path

    def __call__(self) -> int:
        return self.with_words()()

    def with_words(self, *words: str) -> Action:
        """The run with additional overrides, composed once in this process for all forks."""
        words = (*TINY, *WORDS, *STEPS, *words)
        settings_of(*words)
        return partial(self.train, words)

    def train(self, words: tuple[str, ...]) -> int:
        """Run train.py, with resume=true if the folder exists; return the exit code."""
        run = self.root / "run"
        settings = settings_of(*words)
        settings.run_dir = str(run)
        settings.resume = run.exists()
        settings.model["vocab_size"] = self.corpus.tokenizer.vocab_size
        begin = setup.Start()
        with errors.report_errors():
            if settings.resume and folder.has_checkpoint(run):
                begin = setup.Start(checkpoint.newest_checkpoint(run))
                saved = checkpoint.load_config(begin.resumed)
                with mock.patch.object(folder, "compose", lambda words: settings_of(*words)):
                    settings, _ = folder.resume_settings([*words], saved, run)
        loader = Loader(
            self.corpus.train,
            context=CONTEXT,
            batch_size=settings.batch_tokens // CONTEXT,
            seed=settings.seed,
        )
        ranks = Ranks(0, 1, torch.device("cpu"))
        # Plotting with matplotlib would take as long as the four steps and their saves.
        picture = mock.patch.object(logger, "draw_loss", lambda _, path: path.touch() or [0.0])
        with (
            picture,
            Signals() as signals,
            errors.report_errors(),
            folder.open_run_dir(settings, ranks, begin.resumed) as run_dir,
        ):
            clock = Clock(monotonic())
            env = Environment(settings, self.corpus, loader, run_dir, ranks, signals, clock)
            return train(setup.build_run(env, begin))

    def fresh(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.root / "run" / "checkpoints").glob("step-*"))

    def curve(self) -> list:
        """Results that interruptions must not change: metrics without times, samples, weights."""
        curve = []
        for text in (self.root / "run" / "metrics.jsonl").read_text("utf-8").splitlines():
            line = json.loads(text)
            curve.append({key: line[key] for key in line.keys() - TIMED})
        last = self.checkpoints[-1]
        samples = (self.root / "run" / "samples.txt").read_text("utf-8")
        weights = sha256((last / "model.safetensors").read_bytes()).hexdigest()
        return [*curve, samples, last.name, weights]

    def leftovers(self) -> list[str]:
        """Names of files that should have been removed."""
        there = {path.name for path in (self.root / "run" / "checkpoints").iterdir()}
        return sorted(there - {"step-00000003", "step-00000004"})


def forked(action: Action, *before: Action) -> int:
    """Run `action` in a fork; return its exit code, or minus the number of a fatal signal."""
    return finish(start(action, *before))


def start(action: Action, *before: Action) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid > 0:
        return pid
    code = 1
    # OpenMP threads do not survive a fork: a parallel region would wait for them forever.
    torch.set_num_threads(1)
    gc.freeze()  # garbage collection would copy the memory shared with the parent
    signal.alarm(LONG // 2)  # a fork may inherit a held lock
    try:
        for prepare in before:
            prepare()
        code = action() or 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def finish(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def copying(root: Path, copies: Path, killed_at: int | None = None) -> Action:
    """Copy `root` to `copies`/1, 2, ... before each file operation below it.

    SIGKILL is sent after copy number `killed_at`.
    """
    numbers = itertools.count(1)
    inside = []

    def hook(name: str, arguments: tuple) -> None:
        if name not in FILE_EVENTS or not arguments or inside:
            return
        # rmtree uses names relative to an open folder.
        is_relative = name in ("os.remove", "os.rmdir") and arguments[1] >= 0
        if is_relative or str(arguments[0]).startswith(str(root)):
            inside.append(name)  # copying does not count
            number = next(numbers)
            shutil.copytree(root, copies / str(number))
            if number == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            inside.clear()

    return partial(sys.addaudithook, hook)


def at_most(nbytes: int) -> Action:
    """Simulate a full disk: no file can grow beyond `nbytes`."""
    return partial(resource.setrlimit, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def losing_power(record: Path) -> Action:
    """Record the name of every file that is synced to disk, such as step-00000001/state.pt."""

    def patch() -> None:
        fsync = os.fsync

        def noted(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            with record.open("a", encoding="utf-8") as file:
                file.write(f"{path.parent.name.removeprefix('.tmp-')}/{path.name}\n")

        os.fsync = noted

    return patch


def lose_power(record: Path, checkpoints: list[Path]) -> None:
    """Truncate the files that were never synced to disk."""
    synced = record.read_text("utf-8").split() if record.exists() else []
    for checkpoint_path in checkpoints:
        for path in checkpoint_path.iterdir():
            if f"{checkpoint_path.name}/{path.name}" not in synced:
                os.truncate(path, 0)


def source(path: Path, **options) -> Text:
    given = {
        "text_field": "text",
        "separator": "<|endoftext|>",
        "holdout": 20,
        "vocab_size": 400,
        "tokenizer": None,
    }
    return Text(path=str(path), **(given | options))


def documents_of(found: Source) -> list[tuple[str, bool]]:
    """The documents of a source, each with a flag that is true if it is held out."""
    documents = []
    text = ""
    for part in found.parts():
        text += part.text
        if part.is_last:
            documents.append((text, part.is_held_out))
            text = ""
    assert text == ""
    return documents


def wait_for(condition: Callable[[], object], seconds: float = LONG) -> None:
    end = monotonic() + seconds
    while not condition():
        if monotonic() > end:
            raise TimeoutError(condition)
        sleep(0.01)


def count_lines(path: Path) -> int:
    """The number of lines of a file, 0 if it does not exist yet."""
    return path.read_text("utf-8").count("\n") if path.exists() else 0
