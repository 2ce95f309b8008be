"""What a run reports: metrics.jsonl, samples.txt, loss.png, progress, Weights & Biases."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Thread
from time import monotonic

from omegaconf import OmegaConf
from tqdm import tqdm

from run import progress

METRICS = "metrics.jsonl"
FILES = (METRICS, "samples.txt")


class Logger:
    """The files and the messages of a run; silent unless it is enabled, as on rank 0 alone."""

    def __init__(self, run_dir: Path, settings: dict, *, is_enabled: bool):
        self.run_dir = run_dir
        self.settings = settings
        self.is_enabled = is_enabled
        self.sizes = dict.fromkeys(FILES, 0)  # bytes
        self.is_disk_full = False
        self.bar = None
        self.last_drawn = -math.inf  # when the bar was
        self.wandb = None
        self.wandb_id = None

    def open(self, state: dict) -> None:
        """Cut the files to the sizes in `state`, a checkpoint's: what came later is done again."""
        if not self.is_enabled:
            return
        for name in FILES:
            size = state.get(name, 0)
            if isinstance(size, tuple):  # of an earlier version: with a hash
                size = size[0]
            with (self.run_dir / name).open("ab") as file:
                if file.tell() > size:
                    file.truncate(size)
                self.sizes[name] = min(file.tell(), size)
        OmegaConf.save(self.settings, self.run_dir / "config.yaml")
        if self.settings["wandb"] != "disabled":
            self._start_wandb(state.get("wandb"))

    def state(self) -> dict:
        """What a checkpoint stores: the sizes of the files, and the id of the run at wandb."""
        return {**self.sizes, "wandb": self.wandb_id}

    # Messages

    def info(self, text: str) -> None:
        """Print a line on standard error."""
        if self.is_enabled:
            progress.say(text)

    def waiting(
        self, what: str, seconds: float | None = None, advice: str = ""
    ) -> AbstractContextManager:
        """Announce what may take long; see progress.waiting."""
        return progress.waiting(what, seconds, advice, is_shown=self.is_enabled)

    def wants_progress(self) -> bool:
        """Whether there is a terminal, on which nothing was drawn for a second."""
        return self.is_enabled and progress.is_watched() and monotonic() - self.last_drawn >= 1

    def progress(self, step: int, steps: float, text: str) -> None:
        """Show progress: a bar on a terminal, else a line. `steps` may be infinite."""
        if not self.is_enabled:
            return
        total = None
        line = f"step {step}  {text}"
        bar_format = line
        if steps < math.inf:
            total = int(steps)
            line = f"step {step}/{total}  {text}"
            bar_format = f"{step}/{total} |{{bar}}| {text}"
        if not progress.is_watched():
            self.info(line)
            return

        # Update all of the bar: the terminal may have been resized, and the steps fitted.
        columns = progress.terminal_columns()
        if self.bar is None:
            self.bar = tqdm(total=total, bar_format=bar_format, ncols=columns, nrows=progress.ROWS)
        self.bar.ncols = columns
        self.bar.bar_format = bar_format
        self.bar.total = total
        self.bar.n = step
        self.bar.refresh()
        self.last_drawn = monotonic()

    # Files

    def write(self, step: int, **values: float | dict | None) -> None:
        """Write a line of metrics.jsonl, to wandb too."""
        self.append(METRICS, json.dumps({"step": step, **values}) + "\n")
        if self.wandb is not None:
            with self._wandb_may_fail():
                self.wandb.log(values, step=step)

    def append(self, name: str, text: str) -> None:
        """Write all of a text or nothing. A full disk costs a warning, and not the run."""
        if not self.is_enabled:
            return
        path = self.run_dir / name
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
            self.sizes[name] += len(text.encode())
        except OSError as error:
            with suppress(OSError):  # a part may have been written
                os.truncate(path, self.sizes[name])
            if not self.is_disk_full:
                self.info(f"warning: not written ({path}: {error.strerror}): training goes on")
            self.is_disk_full = True

    def close(self) -> None:
        """Finish the bar, and wandb, which may wait for a network."""
        if self.bar is not None:
            self.bar.close()
        if self.wandb is not None:
            finishing = Thread(target=self.wandb.finish, daemon=True)
            finishing.start()
            with self.waiting("finishing wandb, 20 s at most"):
                finishing.join(timeout=20)

    def plot(self) -> None:
        """Draw loss.png."""
        if not self.is_enabled:
            return
        try:
            with self.waiting("drawing loss.png"):
                draw_loss(self.run_dir / METRICS, self.run_dir / "loss.png")
        except (OSError, ValueError, LookupError) as error:
            self.info(f"warning: no loss.png: {error}")

    # Weights & Biases

    def _start_wandb(self, wandb_id: str | None) -> None:
        """Begin a run at wandb, or go on with the one of this id."""
        with self._wandb_may_fail():
            import wandb

            self.wandb = wandb.init(
                project="attend",
                id=wandb_id,
                resume="allow",
                name=self.run_dir.name,
                dir=self.run_dir,
                config=self.settings,
                mode=self.settings["wandb"],
            )
            self.wandb_id = self.wandb.id

    @contextmanager
    def _wandb_may_fail(self) -> Iterator[None]:
        """Go on without wandb after any error of it: metrics.jsonl has it all."""
        try:
            yield
        except Exception as error:
            self.info(f"warning: no wandb: {' '.join(str(error).split())}")
            self.wandb = None


def is_evaluated(run_dir: Path, step: int) -> bool:
    """Whether the metrics of a run end with the evaluation of this step."""
    try:
        lines = (run_dir / METRICS).read_text().splitlines()
        last = json.loads(lines[-1])
        return last["step"] == step and "val_loss" in last
    except (OSError, ValueError, LookupError, TypeError):  # missing, empty or damaged
        return False


def draw_loss(metrics: Path, picture: Path) -> None:
    """Plot training and validation loss over tokens."""
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key, style, name in (("train_loss", "-", "training"), ("val_loss", "o-", "validation")):
        measured = [line for line in lines if key in line]
        tokens = [line["tokens"] for line in measured]
        losses = [line[key] for line in measured]
        axes.plot(tokens, losses, style, label=name)
    title = picture.parent.name
    for line in lines:
        if line.get("val_bpb"):
            title = f"{picture.parent.name}: {line['val_bpb']:.3f} bits per byte"
    axes.set(xlabel="tokens", ylabel="nats per token", title=title)
    axes.legend()
    figure.savefig(picture, dpi=120)
