"""Reports of a run: metrics.jsonl, samples.txt, loss.png, progress, Weights & Biases."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from omegaconf import OmegaConf
from tqdm import tqdm

from run.progress import duration, say, waiting
from run.settings import Settings
from training.clock import Clock
from training.steps import Progress

METRICS = "metrics.jsonl"
FILES = (METRICS, "samples.txt")
PICTURE = "loss.png"
MIN_RISE = 1.01  # factor; a smaller rise of the held-out loss is noise


class Logger:
    """The files and messages of a run. Does nothing unless `is_enabled`, which is true on rank 0.

    `steps_per_epoch` may be a fraction, and is infinite if the text never repeats.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: Settings,
        clock: Clock,
        *,
        steps_per_epoch: float,
        is_enabled: bool,
    ):
        self.run_dir = run_dir
        self.settings = settings
        self.clock = clock
        self.steps_per_epoch = steps_per_epoch
        self.is_enabled = is_enabled
        self.sizes = dict.fromkeys(FILES, 0)  # bytes
        # Stored in the checkpoint of this step: the file sizes, to which resuming truncates the
        # files, and the run's wandb id.
        self.resume_point: dict[str, int | str | None] = {}
        self.is_disk_full = False
        self.bar = None  # disabled unless standard error is a terminal
        self.wandb = None
        self.wandb_id = None

    def open(self, state: dict[str, int | str | None]) -> None:
        """Truncate the files to the sizes in a checkpoint's `state`, and append to them from there.

        The resumed run logs everything after that point again. A new run has no state.
        """
        self.resume_point = state
        if not self.is_enabled:
            return
        for name in FILES:
            with (self.run_dir / name).open("ab") as file:
                # A power cut may have shortened the file, because log files are not synced.
                self.sizes[name] = min(file.tell(), state.get(name, 0))
                file.truncate(self.sizes[name])
        self.bar = tqdm(
            bar_format="{n_fmt}/{total_fmt} |{bar}| {desc}",
            disable=None,  # shown on a terminal only
            dynamic_ncols=True,
            mininterval=1.0,  # seconds
            miniters=1,
        )
        OmegaConf.save(self.settings.model_dump(), self.run_dir / "config.yaml")
        if self.settings.wandb != "disabled":
            with self._wandb_may_fail():
                import wandb

                self.wandb = wandb.init(
                    project="attend",
                    id=state.get("wandb"),
                    resume="allow",
                    name=self.run_dir.name,
                    dir=self.run_dir,
                    config=self.settings.model_dump(),
                    mode=self.settings.wandb,
                )
                self.wandb_id = self.wandb.id

    def has_end(self, state: dict[str, int | str | None], step: int) -> bool:
        """Return whether the files contain the sample and the evaluation of a run's last step.

        Both are written after the last checkpoint, whose `state` has the file sizes at that time.
        """
        ends = {}
        try:
            for name in FILES:
                content = (self.run_dir / name).read_bytes()
                ends[name] = content[state.get(name, 0) :].decode()
            lines = [json.loads(line) for line in ends[METRICS].splitlines()]
        except (OSError, ValueError):  # missing or truncated
            return False
        is_evaluated = any("val_loss" in line for line in lines)
        is_sampled = f"--- step {step}\n" in ends["samples.txt"]
        is_whole = all(end.endswith("\n") for end in ends.values())
        return is_evaluated and is_sampled and is_whole

    def mark_resume_point(self) -> None:
        """Record the current sizes of the files for a checkpoint of this step.

        Called after a step and its report. The sample and the evaluation of the step come later,
        so a run resumed from its checkpoint repeats them.
        """
        self.resume_point = {**self.sizes, "wandb": self.wandb_id}

    def advance(self, progress: Progress, total: float) -> None:
        """Advance the progress bar of a run of `total` steps, at most once a second.

        If `total` is infinite because `max_minutes` may end the run at any step, the bar shows the
        `steps` of the settings.
        """
        if self.bar is not None:
            self.bar.n = progress.step
            self.bar.total = self.settings.steps if total == math.inf else total
            self.bar.update(0)

    def report(
        self, progress: Progress, metrics: dict[str, float | int | None], seconds_left: float
    ) -> None:
        """Log the training metrics, and show them next to the progress bar or on a line."""
        self.write(progress, metrics)
        if self.bar is None:
            return
        text = f"loss {metrics['train_loss']:.3f}  "
        if metrics["tokens_per_second"] is not None:
            text += f"{metrics['tokens_per_second']:,.0f} tokens/s  "
        if metrics["mfu"] is not None:
            text += f"mfu {metrics['mfu']:.1%}  "
        text += f"{metrics['peak_memory_bytes'] / 2**30:.1f} GiB  {duration(seconds_left)} left"
        self.bar.set_description_str(text)
        if self.bar.disable:
            say(f"step {self.bar.n}/{self.bar.total or '?'}  {text}")

    def write(self, progress: Progress, metrics: dict[str, float | dict | None]) -> None:
        """Write a line to metrics.jsonl, and to wandb."""
        values = {
            "tokens": progress.step * self.settings.batch_tokens,
            "epoch": round(progress.step / self.steps_per_epoch, 4),
            "seconds": round(self.clock.total(), 3),
            **metrics,
        }
        self.append(METRICS, json.dumps({"step": progress.step, **values}) + "\n")
        if self.wandb is not None:
            with self._wandb_may_fail():
                self.wandb.log(values, step=progress.step)

    def append(self, name: str, text: str) -> None:
        """Append text completely or not at all. On a full disk, warn and continue the run."""
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
                say(f"warning: cannot write ({path}: {error.strerror}): training continues")
            self.is_disk_full = True

    def close(self) -> None:
        """Close the progress bar and wandb."""
        if self.bar is not None:
            self.bar.close()
        if self.wandb is not None:
            with self._wandb_may_fail(), waiting("finishing wandb"):
                self.wandb.finish()

    def plot(self) -> None:
        """Draw loss.png, and report if the held-out loss has risen."""
        if not self.is_enabled:
            return
        try:
            with waiting("drawing loss.png"):
                losses = draw_loss(self.run_dir / METRICS, self.run_dir / PICTURE)
            lowest = min(losses)
            if losses[-1] > MIN_RISE * lowest:
                say(
                    f"the held-out loss rose from {lowest:.3f} to {losses[-1]:.3f} nats per token. "
                    "fix: use a lower optimizer.lr or, if the run made several passes over the "
                    "text, more text or fewer steps"
                )
        except (OSError, ValueError, LookupError) as error:
            say(f"warning: cannot draw loss.png: {error}")

    @contextmanager
    def _wandb_may_fail(self) -> Iterator[None]:
        """Continue without wandb after any error that it raises; metrics.jsonl has all metrics."""
        try:
            yield
        except Exception as error:
            say(f"warning: continuing without wandb: {' '.join(str(error).split())}")
            self.wandb = None


def draw_loss(metrics: Path, picture: Path) -> list[float]:
    """Plot training and held-out loss over tokens; return the held-out losses."""
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key, style in (("train_loss", "-"), ("val_loss", "o-")):
        losses = {line["tokens"]: line[key] for line in lines if key in line}
        axes.plot(losses.keys(), losses.values(), style, label=key)
    axes.set(xlabel="tokens", ylabel="nats per token", title=picture.parent.name)
    axes.legend()
    figure.savefig(picture, dpi=120)
    return list(losses.values())
