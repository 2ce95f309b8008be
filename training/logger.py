"""Reports of a run: metrics.jsonl, samples.txt, loss.png, progress, Weights & Biases."""

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path

from omegaconf import OmegaConf
from tqdm import tqdm

from run.progress import duration, print0
from training.environment import Environment
from training.steps import Progress

METRICS = "metrics.jsonl"
SAMPLES = "samples.txt"
SAMPLE_END = "\n---\n"
EVERY_BYTE = "surrogateescape"  # a character at the end of a file may have been cut off
PICTURE = "loss.png"
MIN_RISE = 1.01  # factor; a smaller rise of the held-out loss is not reported


class Logger:
    """The files and messages of a run. Only rank 0 writes them."""

    def __init__(self, env: Environment):
        self.env = env
        self.run_dir = env.run_dir
        self.settings = env.settings
        self.is_enabled = env.ranks.is_main
        # May be a fraction, and is infinite if rows never repeat.
        self.steps_per_epoch = env.loader.rows_per_epoch / env.loader.batch_size
        self.logged = {}  # the step of the last "evaluation" and "sample" of earlier processes
        self.is_disk_full = False
        self.bar = None  # disabled unless standard error is a terminal
        self.wandb = None
        self.wandb_id = None

    def open(self, step: int | None = None) -> None:
        """Open the files, the progress bar and wandb, and save the settings.

        The files of a resumed run are cut after its `step`. If the sample or the evaluation of this
        step is missing, the run makes it (`has`). A new run begins with empty files.
        """
        if not self.is_enabled:
            return
        for name, find_end in ((METRICS, self.end_of_metrics), (SAMPLES, self.end_of_samples)):
            with (self.run_dir / name).open(
                "a+", encoding="utf-8", errors=EVERY_BYTE, newline=""
            ) as file:
                file.seek(0)
                text = file.read()
                size = 0 if step is None else find_end(text, step)
                file.truncate(len(text[:size].encode("utf-8", EVERY_BYTE)))
        self.bar = tqdm(
            bar_format="{n_fmt}/{total_fmt} |{bar}| {desc}",
            disable=True if has_no_size() else None,  # None: shown on a terminal only
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
                    id=self.wandb_id,
                    resume="allow",
                    name=self.run_dir.name,
                    dir=self.run_dir,
                    config=self.settings.model_dump(),
                    mode=self.settings.wandb,
                )
                self.wandb_id = self.wandb.id

    def end_of_metrics(self, text: str, step: int) -> int:
        """Return the number of characters in the complete lines up to a step."""
        end = 0
        for line in text.splitlines(keepends=True):
            try:
                values = json.loads(line)
            except ValueError:
                break
            if values["step"] > step or not line.endswith("\n"):
                break
            if "val_loss" in values:
                self.logged["evaluation"] = values["step"]
            end += len(line)
        return end

    def end_of_samples(self, text: str, step: int) -> int:
        """Return the number of characters in the complete samples up to a step."""
        end = 0
        headings = [*re.finditer(r"^--- step (\d+)\n", text, re.MULTILINE)]
        for heading, following in zip_longest(headings, headings[1:]):
            sample_end = len(text) if following is None else following.start()
            is_cut = following is None and not text.endswith(SAMPLE_END)
            if int(heading[1]) > step or is_cut:
                break
            self.logged["sample"] = int(heading[1])
            end = sample_end
        return end

    def has(self, kind: str, step: int) -> bool:
        """Whether the evaluation or the sample of a step was logged by an earlier process."""
        return self.env.ranks.on_rank0(self.logged.get, kind) == step

    def advance(self, progress: Progress, total: float) -> None:
        """Advance the progress bar of a run of `total` steps, at most once a second.

        If `total` is infinite, because it is not known yet, the bar shows the `steps` of the
        settings, if set.
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
            print0(f"step {self.bar.n}/{self.bar.total or '?'}  {text}")

    def write(self, progress: Progress, metrics: dict[str, float | dict | None]) -> None:
        """Write metrics to wandb, and to metrics.jsonl as a line."""
        values = {
            "tokens": progress.step * self.settings.batch_tokens,
            "epoch": round(progress.step / self.steps_per_epoch, 4),
            "seconds": round(self.env.clock.total(), 3),
            **metrics,
        }
        self.append(METRICS, json.dumps({"step": progress.step, **values}) + "\n")
        if self.wandb is not None:
            with self._wandb_may_fail():
                self.wandb.log(values, step=progress.step)

    def append(self, name: str, text: str) -> None:
        """Append text completely or not at all. If writing fails, warn once and continue."""
        if not self.is_enabled:
            return
        path = self.run_dir / name
        size = None
        try:
            with path.open("a", encoding="utf-8") as file:
                size = file.tell()
                file.write(text)
        except OSError as error:
            if size is not None:
                with suppress(OSError):  # a part may have been written
                    os.truncate(path, size)
            if not self.is_disk_full:
                print0(f"warning: cannot write ({path}: {error.strerror}); training continues")
            self.is_disk_full = True

    def close(self) -> None:
        """Close the progress bar and wandb."""
        if self.bar is not None:
            self.bar.close()
        if self.wandb is not None:
            with self._wandb_may_fail():
                self.wandb.finish()
            self.wandb = None

    def plot(self) -> None:
        """Draw loss.png, and report if the held-out loss has risen from its minimum."""
        if not self.is_enabled:
            return
        try:
            losses = draw_loss(self.run_dir / METRICS, self.run_dir / PICTURE)
            lowest = min(losses)
            if losses[-1] > MIN_RISE * lowest:
                print0(
                    f"the held-out loss rose from its minimum, {lowest:.3f}, to {losses[-1]:.3f} "
                    "nats per token. A lower optimizer.lr may help. If the run made several passes "
                    "over the text, so may more text or fewer steps"
                )
        except (OSError, ValueError, LookupError) as error:
            print0(f"warning: cannot draw loss.png ({error})")

    @contextmanager
    def _wandb_may_fail(self) -> Iterator[None]:
        """Continue without wandb after any error that it raises; metrics.jsonl has all metrics."""
        try:
            yield
        except Exception as error:
            print0(f"warning: continuing without wandb ({' '.join(str(error).split())})")
            self.wandb = None


def has_no_size() -> bool:
    """Whether standard error is a terminal without columns, as in some containers."""
    with suppress(OSError):
        return os.get_terminal_size(2).columns == 0
    return False


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
