"""Runs as the report reads them, and which of them are one variant with different seeds."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from checkpoints import checkpoint
from common import config
from common.errors import IntegrityError
from common.instantiate import instantiate
from model.transformer import Transformer

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


Groups = dict[str, list["Run"]]  # the runs of each variant, by its name; the baseline first


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
        found = checkpoint.newest_checkpoint(folder)
        if found is None:
            raise IntegrityError(f"no checkpoint ({folder}). fix: the folder of a run")
        state, metrics = (checkpoint.load_state(found, {"step", "steps"}), folder / "metrics.jsonl")
        try:
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            is_last = lines[-1]["step"] == state["step"] >= state["steps"]
            done = is_last and "val_bpb" in lines[-1]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise IntegrityError(
                f"metrics cannot be read ({metrics}: {error}). fix: train it anew"
            ) from None
        return cls(folder, checkpoint.load_config(found), lines, done)

    @property
    def seed(self) -> int:
        return self.settings["seed"]

    @property
    def last(self) -> dict:
        return self.lines[-1]

    @property
    def evaluations(self) -> list[dict]:
        """The metrics of each evaluation, with its `loss` in the unit `metric_name`."""
        evaluations = []
        for line in self.lines:
            if "val_bpb" in line:
                loss = line["val_loss"] if line["val_bpb"] is None else line["val_bpb"]
                evaluations.append(line | {"loss": loss})
        return evaluations

    @property
    def metric_name(self) -> str:
        """Bits per byte, or nats per token where the bytes of the text are unknown."""
        return "nats per token" if self.evaluations[-1]["val_bpb"] is None else "bits per byte"

    @property
    def loss(self) -> float:
        """The loss of the last evaluation."""
        return self.evaluations[-1]["loss"]

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
        """The model on the meta device: shapes without memory."""
        with torch.device("meta"):
            return instantiate(self.settings["model"])

    @property
    def cache_bytes(self) -> int:
        """The bytes of a cache in bf16 that holds one full context."""
        return self.model.cache_bytes(self.model.context, torch.bfloat16)

    @property
    def cache_bytes_per_token(self) -> float:
        return self.cache_bytes / self.model.context

    @cached_property
    def compared_settings(self) -> dict[str, str]:
        """The settings by their dotted keys, and the number of tokens, without NOT_COMPARED."""
        tree = self.settings | {"tokens": self.last["tokens"]}
        pairs = config.flatten(tree)
        return {key: str(value) for key, value in pairs if not key.startswith(NOT_COMPARED)}

    @property
    def identity(self) -> dict[str, str]:
        """The settings that make the run this variant: its length, machine and intervals do not."""
        identity = {}
        for key, value in self.compared_settings.items():
            if not key.startswith(("tokens", "machine.")) and not key.endswith("_every"):
                identity[key] = value
        return identity


def group_by_variant(runs: list[Run]) -> Groups:
    """Groups runs that differ by their seed alone, and names each group.

    A group has the name of its runs; where several have the same name, the settings that set them
    apart follow it. Raises ValueError where two runs of a group have one seed.
    """
    # The key of a group is what its runs have in common; in it, each run has a seed of its own.
    groups = {}
    for run in runs:
        key = (run.settings["name"], *run.identity.items())
        by_seed = groups.setdefault(key, {})
        if run.seed in by_seed:
            both = f"{by_seed[run.seed].folder}, {run.folder}"
            raise ValueError(f"two runs are of one variant and seed ({both}). fix: leave out one")
        by_seed[run.seed] = run

    # Name each group by its first run. Those of the same name say what must be told apart.
    named = {}
    first_runs = [next(iter(by_seed.values())) for by_seed in groups.values()]
    for run, by_seed in zip(first_runs, groups.values(), strict=True):
        name = run.settings["name"]
        namesakes = [other.identity for other in first_runs if other.settings["name"] == name]
        for key, value in run.identity.items():
            if any(identity.get(key) != value for identity in namesakes):
                name += f" {key.rpartition('.')[2]}={value}"
        named[name] = list(by_seed.values())
    return named


def differences(runs: list[Run]) -> dict[str, str]:
    """Maps each setting that all runs have, but not with one value, to a text of its values."""
    values_by_key = {}
    for key in runs[0].compared_settings:
        if all(key in run.compared_settings for run in runs):
            values = dict.fromkeys(run.compared_settings[key] for run in runs)
            if len(values) > 1:
                values_by_key[key] = ", ".join(values)
    return values_by_key
