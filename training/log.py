"""What a run tells: metrics.jsonl, a progress bar or lines, Weights & Biases where wanted, loss.png at the end."""

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from omegaconf import OmegaConf
from tqdm import tqdm


class Log:
    """Only the first rank has one that speaks."""

    FILES = ("metrics.jsonl", "samples.txt")

    def __init__(self, run: Path, config: dict, *, speaks: bool):
        self.run, self.config, self.speaks = run, config, speaks
        self.bar = self.wandb = self.wandb_id = None
        self.full = False

    def open(self, kept: dict) -> None:
        """The files are cut to what a checkpoint has `kept` of them: what came later is done again."""
        if not self.speaks:
            return
        for name in self.FILES:
            size = kept.get(name, 0)
            with (self.run / name).open("ab") as file:
                if file.tell() > size:
                    file.truncate(size)
        OmegaConf.save(self.config, self.run / "config.yaml")
        if self.config["wandb"] != "disabled":
            self.start_wandb(kept.get("wandb"))

    def kept(self) -> dict:
        """For a checkpoint: how far the files go, and what the run is called elsewhere."""
        if not self.speaks:
            return {}
        return {name: (self.run / name).stat().st_size for name in self.FILES} | {"wandb": self.wandb_id}

    def say(self, text: str) -> None:
        if self.speaks:
            with suppress(OSError):  # nobody reads on, or it is a file on a full disk
                tqdm.write(text, file=sys.stderr)

    def append(self, name: str, text: str) -> None:
        """All of it or nothing. A disk that is full costs a warning: it is no reason to lose a run."""
        if not self.speaks:
            return
        raw = text.encode()
        try:
            with (self.run / name).open("ab", buffering=0) as file:
                before = file.tell()
                if (file.write(raw) or 0) < len(raw):
                    file.truncate(before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self.full:
                self.say(f"warning: not written ({self.run / name}: {error.strerror}): training goes on")
            self.full = True

    def write(self, step: int, **values: float | None) -> None:
        """A line of metrics.jsonl."""
        self.append("metrics.jsonl", json.dumps({"step": step, **values}) + "\n")
        if self.wandb is not None:
            with self._wandb_may_fail():
                self.wandb.log(values, step=step)

    def progress(self, step: int, steps: float, values: dict[str, float | None], memory: int) -> None:
        """How it goes: a bar where somebody watches, lines where a file does."""
        if not self.speaks:
            return
        speed, left = values["tokens_per_second"], (steps - step) * values["tokens"] / step
        mfu = f"{values['flops_per_second'] / 1e9:,.0f} GFLOP/s"
        if values["mfu"] is not None:
            mfu = f"mfu {values['mfu']:.1%}"
        news = f"loss {values['train_loss']:.3f}  {speed:,.0f} tokens/s  {mfu}  {memory / 2**30:.1f} GiB"
        if steps < float("inf"):
            news += f"  {timedelta(seconds=round(left / speed))} left"
        if not sys.stderr.isatty():
            self.say(f"step {step}  {news}")
            return
        if self.bar is None:
            self.bar = tqdm(dynamic_ncols=True, bar_format="{n_fmt}/{total_fmt} |{bar}| {postfix}")
        self.bar.total = None if steps == float("inf") else int(steps)
        self.bar.set_postfix_str(news, refresh=False)
        self.bar.update(step - self.bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.wandb is not None:
            with self._wandb_may_fail():
                self.wandb.finish()

    def start_wandb(self, known: str | None) -> None:
        with self._wandb_may_fail():
            import wandb

            given = {"name": self.run.name, "dir": self.run, "config": self.config, "mode": self.config["wandb"]}
            self.wandb = wandb.init(project="attend", id=known, resume="allow", **given)
            self.wandb_id = self.wandb.id

    @contextmanager
    def _wandb_may_fail(self) -> Iterator[None]:
        """After one warning there is none: metrics.jsonl is the truth."""
        try:
            yield
        except Exception as error:  # whatever is wrong with an account or a network is no reason to lose a run
            self.say(f"warning: no wandb: {' '.join(str(error).split())}")
            self.wandb = None

    def plot(self) -> None:
        """loss.png: training and validation loss over tokens."""
        if not self.speaks:
            return
        from matplotlib.figure import Figure

        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for key, style in (("train_loss", "-"), ("val_loss", "o-")):
            points = [(line["tokens"], line[key]) for line in lines if key in line]
            axes.plot([x for x, _ in points], [y for _, y in points], style, label=key)
        axes.set(xlabel="tokens", ylabel="nats per token", title=self.run.name)
        axes.legend()
        figure.savefig(self.run / "loss.png", dpi=120)
