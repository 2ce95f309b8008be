"""What a run tells: metrics.jsonl, a progress bar or lines, Weights & Biases where wanted, loss.png at the end."""

import json
import sys
from datetime import timedelta
from pathlib import Path

from omegaconf import OmegaConf
from tqdm import tqdm


class Log:
    """Only the first rank has one that speaks."""

    def __init__(self, run: Path, config: dict, *, speaks: bool):
        self.run, self.config, self.speaks, self.path = run, config, speaks, run / "metrics.jsonl"
        self.bar = self.wandb = None

    def open(self, kept: int) -> None:
        """Only the first `kept` bytes of metrics.jsonl stand: what came later is done again."""
        if not self.speaks:
            return
        with self.path.open("ab") as file:
            file.truncate(min(kept, file.tell()))
        OmegaConf.save(self.config, self.run / "config.yaml")
        if self.config["wandb"] != "disabled":
            self.wandb = start_wandb(self.run, self.config)

    @property
    def nbytes(self) -> int:
        return self.path.stat().st_size if self.speaks else 0

    def say(self, text: str) -> None:
        if self.speaks:
            tqdm.write(text, file=sys.stderr)

    def write(self, step: int, **values: float | None) -> None:
        """A line of metrics.jsonl."""
        if self.speaks:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            if self.wandb is not None:
                self.wandb.log(values, step=step)

    def progress(self, step: int, steps: float, values: dict[str, float | None], memory: int) -> None:
        """How it goes: a bar where somebody watches, lines where a file does."""
        if not self.speaks:
            return
        speed, left = values["tokens_per_second"], (steps - step) * values["tokens"] / step
        mfu = (
            f"{values['flops_per_second'] / 1e9:,.0f} GFLOP/s" if values["mfu"] is None else f"mfu {values['mfu']:.1%}"
        )
        news = f"loss {values['train_loss']:.3f}  {speed:,.0f} tokens/s  {mfu}  {memory / 2**30:.1f} GiB"
        if steps < float("inf"):
            news += f"  {timedelta(seconds=round(left / speed))} left"
        if not sys.stderr.isatty():
            self.say(f"step {step}" + (f"/{steps}" if steps < float("inf") else "") + f"  {news}")
            return
        if self.bar is None:
            self.bar = tqdm(dynamic_ncols=True, bar_format="{n_fmt}/{total_fmt} |{bar}| {postfix}")
        self.bar.total = None if steps == float("inf") else int(steps)
        self.bar.set_postfix_str(news, refresh=False)
        self.bar.update(step - self.bar.n)

    def close(self) -> None:
        if not self.speaks:
            return
        if self.bar is not None:
            self.bar.close()
        plot(self.path, self.run / "loss.png")
        if self.wandb is not None:
            self.wandb.finish()


def start_wandb(run: Path, config: dict):
    """A wandb run, or None after one warning: metrics.jsonl is the truth, and training goes on."""
    try:
        import wandb

        return wandb.init(project="attend", name=run.name, dir=run, config=config, mode=config["wandb"], resume="allow")
    except Exception as error:  # whatever is wrong with an account or a network is no reason to lose a run
        print(f"warning: no wandb: {' '.join(str(error).split())}", file=sys.stderr)
        return None


def plot(metrics: Path, picture: Path) -> None:
    """Training and validation loss over tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for key, style, name in (("train_loss", "-", "training"), ("val_loss", "o-", "validation")):
        points = [(line["tokens"], line[key]) for line in lines if key in line]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name)
    bpb = [line["val_bpb"] for line in lines if "val_bpb" in line]
    axes.set(
        xlabel="tokens",
        ylabel="nats per token",
        title=f"{picture.parent.name}" + (f": {bpb[-1]:.3f} bits per byte" if bpb else ""),
    )
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
