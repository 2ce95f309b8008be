"""What runs say of themselves, and which of them are one variant with different seeds."""

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

# Of a run alone, or told by others: `tokens` says how long it was, `machine.` on what, `model.` which attention.
LABELS = (
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


@dataclass
class Run:
    """`lines` are those of its metrics; it is `done` when nothing of it is left to do."""

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
        state, metrics = (
            checkpoint.load_state(found, {"step", "steps", "pending"}),
            folder / "metrics.jsonl",
        )
        try:
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            whole = lines[-1]["step"] == state["step"] >= state["steps"] and not state["pending"]
            done = whole and any("val_bpb" in line for line in lines)
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
    def looks(self) -> list[dict]:
        """At the held-out text, each with its `loss` in `unit`."""
        looks = [line for line in self.lines if "val_bpb" in line]
        return [
            look | {"loss": look["val_loss"] if look["val_bpb"] is None else look["val_bpb"]}
            for look in looks
        ]

    @property
    def unit(self) -> str:
        """Bits per byte, or nats per token where nobody knows the bytes."""
        return "nats per token" if self.looks[-1]["val_bpb"] is None else "bits per byte"

    @property
    def loss(self) -> float:
        return self.looks[-1]["loss"]

    @property
    def command(self) -> str:
        """As its log has it, where a comparison trained it."""
        log = self.folder.with_name(f"{self.folder.name}.log")
        first = log.read_text(errors="replace").partition("\n")[0] if log.exists() else ""
        return first.removeprefix("$ ") or f"# {self.folder / 'config.yaml'} has its settings"

    @cached_property
    def model(self) -> Transformer:
        """Its shapes."""
        with torch.device("meta"):
            return instantiate(self.settings["model"])

    @cached_property
    def flat(self) -> dict[str, str]:
        """Its settings by their paths, those apart that only label it, and its tokens."""
        tree = self.settings | {"tokens": self.last["tokens"]}
        return {
            key: str(value) for key, value in config.flatten(tree) if not key.startswith(LABELS)
        }

    @property
    def identity(self) -> dict[str, str]:
        """What makes it this variant, and no other."""
        kept = (
            key
            for key in self.flat
            if not key.startswith(("tokens", "machine.")) and not key.endswith("_every")
        )
        return {key: self.flat[key] for key in kept}


def variants(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs that differ by their seed alone, by their name; where several go by one name, with what sets them apart.

    Raises ValueError where two runs of a variant have one seed.
    """
    alike: dict[tuple, list[Run]] = {}
    for run in runs:
        group = alike.setdefault((run.settings["name"], *run.identity.items()), [])
        if other := [other for other in group if other.seed == run.seed]:
            both = f"{other[0].folder}, {run.folder}"
            raise ValueError(f"two runs are of one variant and seed ({both}). fix: leave out one")
        group.append(run)
    named = {}
    for (name, *_), group in alike.items():
        others = [other[0].identity for (called, *_), other in alike.items() if called == name]
        mine = group[0].identity
        apart = [key for key in mine if any(other.get(key) != mine[key] for other in others)]
        named[" ".join([name, *(f"{key.rpartition('.')[2]}={mine[key]}" for key in apart)])] = group
    return named


def differences(runs: list[Run]) -> dict[str, list[str]]:
    """The values of what all runs have, settings and tokens, but not the same."""
    keys = [key for key in runs[0].flat if all(key in run.flat for run in runs)]
    values = {key: [*dict.fromkeys(run.flat[key] for run in runs)] for key in keys}
    return {key: found for key, found in values.items() if len(found) > 1}
