"""Runs as the report reads them, and which of them are one variant with different seeds."""

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import median

import torch

from model.build import build_model
from model.transformer import Transformer
from run import checkpoint, config
from run.errors import IntegrityError

# Settings that are not compared: they name a run, or repeat what another setting says. Its length
# is in `tokens`, its machine in `machine.`, its attention in `model.`.
NOT_COMPARED = (
    "name",
    "run_dir",
    "seed",
    "attention.",
    "steps",
    "max_minutes",
    "resume",
    "wandb",
    "device",
    "compile",
)
# Nor do these make a run another variant: its length, its machine and its intervals.
NOT_IDENTITY = (
    *NOT_COMPARED,
    "tokens",
    "machine.",
    "eval_every",
    "save_every",
    "sample_every",
    "log_every",
)

SIZES = ("model.dim", "model.depth", "model.heads", "model.hidden")
Groups = dict[str, list["Run"]]  # the runs of each variant, by its name; the baseline first
Curve = dict[int, float]  # tokens -> a metric


@dataclass
class Run:
    """A run on disk: its settings, the lines of its metrics, and whether nothing is left to do."""

    folder: Path
    settings: dict
    lines: list[dict]
    done: bool

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Raises IntegrityError where there is no run, or none that can be read."""
        newest = checkpoint.newest_checkpoint(folder)
        if newest is None:
            raise IntegrityError(f"no checkpoint ({folder}). fix: --report runs/NAME")
        state = checkpoint.load_state(newest, {"step", "steps"})
        metrics = folder / "metrics.jsonl"
        try:
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            is_last = lines[-1]["step"] == state["step"] >= state["steps"]
            done = is_last and "val_bpb" in lines[-1]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise IntegrityError(
                f"metrics cannot be read ({metrics}: {error}). fix: train it anew"
            ) from None
        settings = checkpoint.load_config(newest)
        # Runs are compared on the same text only: where none was asked for, what was read.
        if settings.get("eval_tokens") is None:
            settings["eval_tokens"] = lines[-1].get("eval_tokens")
        return cls(folder, settings, lines, done)

    @property
    def seed(self) -> int:
        return self.settings["seed"]

    @property
    def task(self) -> str:
        """What the run was trained on: text, or a task of data/tasks.py by its name."""
        module, _, name = self.settings["data"]["_target_"].rpartition(".")
        return name.lower() if module == "data.tasks" else "text"

    @property
    def last(self) -> dict:
        return self.lines[-1]

    @property
    def tokens_per_second(self) -> float:
        """The median over the lines of the log."""
        rates = [line["tokens_per_second"] for line in self.lines if "train_loss" in line]
        # The first line includes compilation; a short run has no other.
        return median(rates[1:] or rates)

    @property
    def metric(self) -> str:
        """The accuracy in a task; the loss in bits per byte, or per token if bytes are unknown."""
        if self.task != "text":
            return f"{self.task}_accuracy"
        return "val_loss" if self.last["val_bpb"] is None else "val_bpb"

    @property
    def metric_name(self) -> str:
        names = {"val_loss": "nats per token", "val_bpb": "bits per byte"}
        return names.get(self.metric, f"{self.task} accuracy")

    @property
    def loss(self) -> float:
        """The metric of the last evaluation."""
        return self.last[self.metric]

    def logged(self, key: str) -> Curve:
        """A metric by the number of tokens trained on."""
        return {line["tokens"]: line[key] for line in self.lines if key in line}

    def losses_by_position(self) -> Curve:
        """The loss in the last evaluation by the longest context of each bin of positions."""
        curve = {}
        for name, values in self.last.get("slices", {}).items():
            if name.startswith("position"):
                curve[int(re.findall(r"\d+", name)[-1])] = values["loss"]
        return curve

    @property
    def command(self) -> str:
        """The command that trained the run: the first line of the log that a comparison keeps."""
        log = self.folder.with_name(f"{self.folder.name}.log")
        if not log.exists():
            return f"# {self.folder / 'config.yaml'} has its settings"
        first_line = log.read_text(errors="replace").partition("\n")[0]
        return first_line.removeprefix("$ ")

    @cached_property
    def model(self) -> Transformer:
        """The model without memory for its parameters."""
        return build_model(self.settings["model"])

    @property
    def cache_bytes(self) -> int:
        """The bytes of a cache in bf16 that holds one full context."""
        return self.model.cache_bytes(self.model.context, torch.bfloat16)

    @property
    def cache_is_fixed(self) -> bool:
        """Whether a longer text needs no larger cache: a state, or a window within the context."""
        longer = self.model.cache_bytes(2 * self.model.context, torch.bfloat16)
        return longer == self.cache_bytes

    def settings_except(self, ignored: tuple[str, ...]) -> dict[str, str]:
        """The settings by their dotted keys, and the number of tokens, without these prefixes."""
        pairs = config.flatten(self.settings | {"tokens": self.last["tokens"]})
        return {key: str(value) for key, value in pairs if not key.startswith(ignored)}

    @cached_property
    def identity(self) -> dict[str, str]:
        """The settings that make the run this variant."""
        return self.settings_except(NOT_IDENTITY)


def group_by_variant(runs: list[Run]) -> Groups:
    """Groups runs that differ by their seed alone, and names each group.

    A group has the name of its runs; where several have the same name, the settings that set them
    apart follow it. Raises ValueError where two runs of a group have one seed.
    """
    # The key of a group is what its runs have in common.
    groups = {}
    for run in runs:
        group = groups.setdefault((run.settings["name"], *run.identity.items()), [])
        for other in group:
            if other.seed == run.seed:
                raise ValueError(
                    f"two runs are of one variant and seed ({other.folder}, {run.folder}). "
                    "fix: leave out one"
                )
        group.append(run)

    # Name each group. The other runs of its name say what must be told apart.
    named = {}
    for group in groups.values():
        name = group[0].settings["name"]
        namesakes = [run.identity for run in runs if run.settings["name"] == name]
        for key, value in group[0].identity.items():
            if any(identity.get(key) != value for identity in namesakes):
                name += f" {key.rpartition('.')[2]}={value}"
        named[name] = group
    return named


def group_by_shape(groups: Groups) -> Groups:
    """Joins the groups that differ by the size of their model alone, named by what names share.

    As many KV heads as heads are one shape at all sizes.
    """
    joined = defaultdict(dict)
    for name, runs in groups.items():
        heads = str(runs[0].settings["model"]["heads"])
        shape = []
        for key, value in runs[0].identity.items():
            is_size = key in SIZES or (key.endswith(".kv_heads") and value == heads)
            if not is_size:
                shape.append((key, value))
        joined[tuple(shape)][name] = runs

    named = {}
    for members in joined.values():
        parts = [name.split("-") for name in members]
        shared = set.intersection(*map(set, parts)) - {"dim"}  # of names such as gqa-dim-64
        name = "-".join(part for part in parts[0] if part in shared)
        if not name or name in named:
            name = next(iter(members))
        named[name] = [*chain(*members.values())]
    return named


def differences(groups: Groups) -> dict[str, str]:
    """Maps each setting in which variants differ to its values and who has them.

    An option of several kinds of layers in one attention is one setting of several values.
    """
    settings = defaultdict(lambda: defaultdict(dict))  # by key and variant: values, in order
    for name, runs in groups.items():
        for run in runs:
            for key, value in run.settings_except(NOT_COMPARED).items():
                settings[re.sub(r"\.kinds\.\w+", "", key)][name][value] = None

    texts = {}
    for key, values in settings.items():
        names = defaultdict(list)
        for name in groups:
            names[", ".join(values[name]) or "not an option"].append(name)
        if len(names) > 1:
            texts[key] = "; ".join(f"{value} ({', '.join(each)})" for value, each in names.items())
    return texts
