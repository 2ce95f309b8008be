"""What a run tells: metrics.jsonl, a progress bar or lines, Weights & Biases where wanted, loss.png at the end."""

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from threading import Thread
from time import monotonic

from omegaconf import OmegaConf
from tqdm import tqdm

from common import progress


class Logger:
    """Only the first rank has one that enabled."""

    FILES = ("metrics.jsonl", "samples.txt")

    def __init__(self, run: Path, config: dict, *, enabled: bool):
        self.run, self.config, self.enabled = run, config, enabled
        self.bar = self.wandb = self.wandb_id = None
        self.sizes, self.hashes, self.full = (
            dict.fromkeys(self.FILES, 0),
            {name: sha256() for name in self.FILES},
            False,
        )
        self.drawn = -math.inf  # when the bar was

    def open(self, kept: dict) -> None:
        """The files are cut to what a checkpoint has `kept` of them: what came later is done again."""
        if not self.enabled:
            return
        for name in self.FILES:
            size, digest = kept.get(name, (0, sha256().hexdigest()))
            with (self.run / name).open("ab+") as file:
                if file.tell() > size:
                    file.truncate(size)
                file.seek(0)
                self.hashes[name].update(file.read(size))
                self.sizes[name] = file.tell()
            if self.hashes[name].hexdigest() != digest:
                self.info(
                    f"warning: not what was written ({self.run / name}): it was changed after the checkpoint"
                )
        OmegaConf.save(self.config, self.run / "config.yaml")
        if self.config["wandb"] != "disabled":
            self.start_wandb(kept.get("wandb"))

    def state(self) -> dict:
        """For a checkpoint: how far the files go, and what the run is called elsewhere."""
        files = {name: (self.sizes[name], self.hashes[name].hexdigest()) for name in self.FILES}
        return files | {"wandb": self.wandb_id}

    def info(self, text: str) -> None:
        if self.enabled:
            progress.say(text)

    def waiting(
        self, what: str, seconds: float | None = None, advice: str = ""
    ) -> AbstractContextManager:
        """Announce what may take long; see progress.waiting."""
        return progress.waiting(what, seconds, advice, is_shown=self.enabled)

    def append(self, name: str, text: str) -> None:
        """All of it or nothing. A disk that is full costs a warning: it is no reason to lose a run."""
        if not self.enabled:
            return
        raw = text.encode()
        try:
            with (self.run / name).open("ab", buffering=0) as file:
                if (file.write(raw) or 0) < len(raw):
                    file.truncate(self.sizes[name])
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self.full:
                self.info(
                    f"warning: not written ({self.run / name}: {error.strerror}): training goes on"
                )
            self.full = True
            return
        self.sizes[name] += len(raw)
        self.hashes[name].update(raw)

    def write(self, step: int, **values: float | None) -> None:
        """A line of metrics.jsonl."""
        self.append("metrics.jsonl", json.dumps({"step": step, **values}) + "\n")
        if self.wandb is not None:
            with self._wandb_may_fail():
                self.wandb.log(values, step=step)

    def wants_progress(self) -> bool:
        """Whether somebody watches, and nothing was drawn for a second."""
        return self.enabled and progress.is_watched() and monotonic() - self.drawn >= 1

    def progress(self, step: int, steps: float, text: str) -> None:
        """How it goes: a bar where somebody watches, lines where a file does. `steps` may be infinite."""
        if not self.enabled:
            return
        total = None if steps == math.inf else int(steps)
        if not progress.is_watched():
            self.info(f"step {step}" + ("" if total is None else f"/{total}") + f"  {text}")
            return
        bar_format = f"step {step}  {text}"
        if total is not None:
            bar_format = f"{step}/{total} |{{bar}}| {text}"
        if self.bar is None:
            size = progress.terminal_size()
            self.bar = tqdm(initial=step, total=total, bar_format=bar_format, **size)
        self.bar.ncols = progress.terminal_size()["ncols"]
        self.bar.bar_format = bar_format
        self.bar.total = total
        self.bar.n = step
        self.bar.refresh()
        self.drawn = monotonic()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.wandb is not None:
            finishing = Thread(
                target=self.wandb.finish, daemon=True
            )  # which may wait for a network
            finishing.start()
            with self.waiting("finishing wandb, 20 s at most"):
                finishing.join(timeout=20)

    def start_wandb(self, known: str | None) -> None:
        with self._wandb_may_fail():
            import wandb

            given = {
                "name": self.run.name,
                "dir": self.run,
                "config": self.config,
                "mode": self.config["wandb"],
            }
            self.wandb = wandb.init(project="attend", id=known, resume="allow", **given)
            self.wandb_id = self.wandb.id

    @contextmanager
    def _wandb_may_fail(self) -> Iterator[None]:
        """After one warning there is none: metrics.jsonl is the truth."""
        try:
            yield
        except (
            Exception
        ) as error:  # whatever is wrong with an account or a network is no reason to lose a run
            self.info(f"warning: no wandb: {' '.join(str(error).split())}")
            self.wandb = None

    def plot(self) -> None:
        """loss.png: training and validation loss over tokens."""
        if not self.enabled:
            return
        try:
            with self.waiting("drawing loss.png"):
                draw_loss(self.run / "metrics.jsonl", self.run / "loss.png")
        except (OSError, ValueError, LookupError) as error:
            self.info(f"warning: no loss.png: {error}")


def draw_loss(metrics: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for key, style, name in (("train_loss", "-", "training"), ("val_loss", "o-", "validation")):
        points = [(line["tokens"], line[key]) for line in lines if key in line]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name)
    bpb = [line["val_bpb"] for line in lines if line.get("val_bpb")]
    axes.set(
        xlabel="tokens",
        ylabel="nats per token",
        title=f"{picture.parent.name}" + (f": {bpb[-1]:.3f} bits per byte" if bpb else ""),
    )
    if axes.lines:
        axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
