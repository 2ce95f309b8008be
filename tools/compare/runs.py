"""Read finished runs, record them, and group them by variant."""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from statistics import median

import torch

from model.build import build_model
from model.transformer import Transformer
from run import ROOT, checkpoint
from run.errors import IntegrityError
from run.instantiate import instantiate

# Settings that do not define a variant, such as a run's seed, length, machine and logging.
NOT_IDENTITY = (
    "name",
    "run_dir",
    "seed",
    "steps",
    "tokens_per_parameter",
    "max_epochs",
    "max_minutes",
    "resume",
    "wandb",
    "device",
    "compile",
    "machine",
    "eval_every",
    "save_every",
    "sample_every",
    "log_every",
)
RECORDS = "runs.jsonl"  # file in a comparison's folder

Groups = dict[str, list["Run"]]  # the runs of each variant, by its name


@dataclass
class Run:
    """A run: its settings, its lines of metrics, and whether it is finished.

    RECORDS in a comparison's folder has all runs that finished or diverged, so that a report needs
    no checkpoints, and a comparison can continue without them. A run of a comparison has the name
    of its variant.
    """

    folder: Path
    settings: dict
    lines: list[dict]  # empty for a run that diverged
    done: bool
    tokens_per_second: float = math.nan  # the median over the lines of metrics.jsonl
    factor: float | None = None  # of the learning rates, if the run is part of a search
    baseline: str | None = None  # the variant that it is compared with
    swept: list[str] = field(default_factory=list)  # keys that the comparison varies
    commit: str | None = None
    command: str | None = None  # command line of the comparison that trained it
    # Measured with the last checkpoint: losses by multiple of the context, ms by column title.
    lengths: dict[str, float] = field(default_factory=dict)
    decoding: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Read the folder of a run. Raises IntegrityError if the folder has no readable run."""
        newest = checkpoint.newest_checkpoint(folder)
        if newest is None:
            raise IntegrityError(f"the folder has no checkpoint ({folder})")
        state = checkpoint.load_state(newest, {"step", "steps"})
        metrics = folder / "metrics.jsonl"
        try:
            lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
            is_last = lines[-1]["step"] == state["step"] >= state["steps"]
            done = is_last and "val_bpb" in lines[-1]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise IntegrityError(
                f"cannot read the metrics ({metrics}: {error}). fix: repeat the run"
            ) from None
        speed = median_of_log(lines, "tokens_per_second")
        settings = checkpoint.load_config(newest)
        return cls(folder, settings, lines, done, math.nan if speed is None else speed)

    def append_to_records(self) -> None:
        """Append the run, with only its evaluations, to the records next to its folder."""
        evaluations = [line for line in self.lines if "val_loss" in line]
        for line in evaluations[:-1]:
            line.pop("slices", None)
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        record = values | {"folder": self.folder.name, "lines": evaluations}
        with (self.folder.parent / RECORDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    @property
    def name(self) -> str:
        """The name of the variant."""
        return self.settings["name"]

    @property
    def has_diverged(self) -> bool:
        return not self.lines

    @property
    def seed(self) -> int:
        return self.settings["seed"]

    @property
    def task(self) -> str:
        """The training data: "text", or the name of a task in data/tasks.py."""
        module, _, name = self.settings["data"]["_target_"].rpartition(".")
        return name.lower() if module == "data.tasks" else "text"

    @property
    def last(self) -> dict:
        return self.lines[-1]

    @property
    def metric(self) -> str:
        """The key of `loss` in an evaluation.

        It is the accuracy on a task. On text, it is bits per byte, or nats per token if the number
        of bytes is unknown.
        """
        if self.task != "text":
            return f"{self.task}_accuracy"
        return "val_loss" if self.last["val_bpb"] is None else "val_bpb"

    @property
    def held_out_bytes(self) -> int | None:
        """The size of the evaluated text in bytes, before tokenization; None if it is unknown."""
        if self.last.get("val_bpb") is None:
            return None
        # Every token but the first is a target.
        nats = self.last["val_loss"] * (self.last["eval_tokens"] - 1)
        return round(nats / math.log(2) / self.last["val_bpb"])

    @property
    def metric_name(self) -> str:
        names = {"val_loss": "nats per token", "val_bpb": "bits per byte"}
        return names.get(self.metric, f"{self.task} accuracy")

    @cached_property
    def floor(self) -> float:
        """The accuracy on a task if each row gets its best constant answer."""
        return instantiate(self.settings["data"], "data").floor()

    @property
    def loss(self) -> float:
        """The value of `metric` in the last evaluation."""
        return self.last[self.metric]

    @cached_property
    def model(self) -> Transformer:
        """The model on the meta device, without memory for its parameters."""
        return build_model(self.settings["model"], "meta")

    @property
    def cache_bytes(self) -> int:
        """The size in bytes of a bf16 cache for one full context."""
        return self.model.cache_bytes(self.model.context, torch.bfloat16)


def median_of_log(lines: list[dict], key: str) -> float | None:
    """Return the median of a metric over the lines that have it; None if no line has it.

    The first line counts only if there is no other, because it includes the slower first steps.
    """
    values = [line[key] for line in lines if line.get(key) is not None]
    if not values:
        return None
    return median(values[1:] or values)


def command() -> str:
    """Return the command line of this process."""
    return f"python -m tools.compare {shlex.join(sys.argv[1:])}"


@cache
def commit() -> str | None:
    """Return this code's commit, with -dirty if tracked files differ from it; None if unknown."""
    if not (ROOT / ".git").exists():  # the folder may be inside another repository
        return None
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(
            command, cwd=ROOT, stderr=subprocess.DEVNULL, encoding="utf-8"
        ).strip()
    return None


def read_records(folder: Path) -> dict[str, Run]:
    """Read the runs in RECORDS of a comparison's folder, by the names of the runs' folders.

    If a run has several lines, the last one counts. Raises IntegrityError for a line that is not a
    record.
    """
    runs = {}
    known = {each.name for each in fields(Run)}
    file = folder / RECORDS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            # Earlier versions recorded more.
            record = {key: value for key, value in json.loads(line).items() if key in known}
            run = Run(**record)
            run.folder = folder / run.folder
        except (ValueError, TypeError, AttributeError) as error:
            raise IntegrityError(
                f"invalid run record ({file}, line {number}: {error}). fix: remove the line"
            ) from None
        runs[run.folder.name] = run
    return runs


def differences(old: dict, new: dict, path: str = "") -> Iterator[str]:
    """Yield the dotted keys in which two trees of settings differ.

    A key that only one of them has does not count: the version that wrote the other lacked it.
    """
    for key in old.keys() & new.keys():
        if isinstance(old[key], dict) and isinstance(new[key], dict):
            yield from differences(old[key], new[key], f"{path}{key}.")
        elif old[key] != new[key]:
            yield path + key


def group_by_variant(runs: list[Run]) -> Groups:
    """Group runs with equal names and equal settings, apart from the settings in NOT_IDENTITY.

    A group has the name of its runs. If runs of train.py have the same name but different settings,
    each group has the path of its first run. Raises ValueError if runs of comparisons have the same
    name but different settings, or if two runs of a group have the same seed.
    """
    groups = []
    for run in runs:
        for group in groups:
            if group[0].name != run.name:
                continue
            different = [
                key
                for key in differences(group[0].settings, run.settings)
                if key.partition(".")[0] not in NOT_IDENTITY
            ]
            if not different:
                group.append(run)
                break
            if run.baseline is not None:
                raise ValueError(
                    f"two variants have the same name ({group[0].folder} and {run.folder} differ "
                    f"in {', '.join(sorted(different))}). fix: report on them separately"
                )
        else:
            groups.append([run])

    named = {}
    for group in groups:
        namesakes = [other for other in groups if other[0].name == group[0].name]
        named[group[0].name if len(namesakes) == 1 else str(group[0].folder)] = group
        by_seed = {}
        for run in group:
            other = by_seed.setdefault(run.seed, run)
            if other is not run:
                raise ValueError(
                    f"two runs have the same variant and seed ({other.folder}, {run.folder}). fix: "
                    "leave one out"
                )
    return named
