"""The configuration: its top keys as a typed class, and how the files of configs/ compose to it."""

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from run import errors
from run.instantiate import ROOT

CONFIGS = ROOT / "configs"
CPU_MICRO_BATCH = 8  # sequences, at most; more of them are not faster on a CPU
GROUPS = ("model", "attention", "ffn", "norm", "data", "optimizer", "schedule")
PARTS = ("attention", "ffn", "norm")  # groups that the model takes in

Text = Annotated[str, Field(min_length=1)]


class Settings(BaseModel):
    """The keys at the top of configs/train.yaml: their types, ranges and meanings.

    The groups are trees of `_target_` and arguments, which `instantiate` and the constructors check.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    model: dict
    """the network: its sizes, attention, ffn and norm"""
    data: dict
    """the text, its tokenizer and its split"""
    optimizer: dict
    """the optimizer and its learning rates"""
    schedule: dict
    """the learning rate over the steps"""

    name: str = Field(pattern=r"^\w[\w.-]*$")
    """of the run"""
    run_dir: Text | None
    """folder of the run; null: runs/NAME, or the next free runs/NAME-2"""
    seed: NonNegativeInt
    """of the weights, the order of the data and the dropout"""
    device: Literal["auto", "cpu", "cuda", "mps"]
    """auto: a GPU if there is one"""
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    """of matrix products; weights are in fp32"""
    compile: Literal["auto", True, False]
    """torch.compile; auto: in runs that are long enough"""

    steps: PositiveInt | None
    """optimizer steps; null: no bound"""
    max_minutes: PositiveFloat | None
    """from the start of the process; null: no bound"""
    max_epochs: PositiveInt | None
    """passes over the text, where steps is null; null: no bound. Up to 4 are nearly as good as new
    text (Muennighoff et al., 2305.16264)"""
    context: int = Field(ge=2)
    """tokens in a sequence"""
    batch_tokens: PositiveInt
    """tokens in an optimizer step, over all devices"""
    micro_batch: PositiveInt | None
    """sequences in a forward on one device, at most; null: 8, on a GPU what it holds"""
    sharded: bool
    """shard weights, gradients and optimizer over processes (FSDP)"""
    activation_checkpointing: bool
    """less memory, a third more time"""
    clip: PositiveFloat | None
    """largest norm of the gradients; null: no clipping"""
    z_loss: NonNegativeFloat
    """weight of log(Z)^2 in the loss, Z the sum over exp(logits)"""
    document_mask: bool
    """a token attends to its own document only"""

    eval_every: PositiveInt
    """steps"""
    eval_tokens: int | None = Field(ge=2)
    """held-out tokens of an evaluation; null: a tenth of those trained since the last"""
    save_every: PositiveInt
    """steps"""
    sample_every: PositiveInt
    """steps"""
    log_every: PositiveInt
    """steps"""
    resume: bool
    """continue from the newest checkpoint of run_dir"""
    init_from: Text | None
    """a run or a checkpoint, with whose weights to start"""
    distill: Text | None
    """a run or a checkpoint to learn from, of the same tokenizer"""
    distill_weight: float = Field(ge=0, le=1)
    """1: learn from its predictions alone; 0: from the text alone"""
    wandb: Literal["disabled", "offline", "online"]
    """whether Weights & Biases gets the metrics, too"""

    def check_combinations(self, world_size: int) -> None:
        """Raises ValueError for settings that do not go together on this number of processes."""
        if self.steps is None and self.max_minutes is None and self.max_epochs is None:
            raise ValueError(
                "the run has no end (steps=null, max_minutes=null, max_epochs=null). "
                "fix: max_minutes=5"
            )
        if self.sharded and world_size == 1:
            raise ValueError(
                "one process has nothing to shard over (sharded=true). "
                "fix: torchrun --nproc_per_node=N train.py, or sharded=false"
            )
        # A batch smaller than one micro-batch a process is a smaller micro-batch.
        sequence_tokens = self.context * world_size  # of one sequence on every process
        sequences = self.batch_tokens // sequence_tokens
        unit = sequence_tokens * min(self.micro_batch or 1, max(1, sequences))
        if self.batch_tokens % unit != 0:
            below = self.batch_tokens // unit * unit
            fixes = [f"batch_tokens={size}" for size in (below, below + unit) if size > 0]
            raise ValueError(
                "a batch must be whole micro-batches for every process "
                f"(batch_tokens={self.batch_tokens} micro_batch={self.micro_batch} "
                f"context={self.context} processes={world_size}). fix: {' or '.join(fixes)}"
            )

    def sequences_per_process(self, world_size: int) -> int:
        """The sequences of a batch that each process computes."""
        return self.batch_tokens // self.context // world_size

    def micro_batch_size(self, world_size: int) -> int:
        """Sequences per device and forward; where they are to be chosen (null), those of a CPU."""
        sequences = self.sequences_per_process(world_size)
        if self.micro_batch is not None:
            return min(self.micro_batch, sequences)
        return max(size for size in range(1, CPU_MICRO_BATCH + 1) if sequences % size == 0)


def from_config(cfg: DictConfig) -> Settings:
    """Validate a composed config. Raises ValueError with a line for each problem.

    An interpolation that leads nowhere raises OmegaConfBaseException.
    """
    keys = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    for part in PARTS:
        keys.pop(part, None)
    try:
        return Settings(**keys)
    except ValidationError as error:
        problems = [describe(problem) for problem in error.errors()]
        raise ValueError("\n".join(problems)) from None


def describe(problem: dict) -> str:
    """A line for a problem that pydantic found: what is wrong with which value, and a fix."""
    key = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return unknown(key)
    if key in GROUPS:
        return unknown(f"{key}={problem['input']}")
    if problem["type"] == "missing":
        return f"{key} is missing. fix: leave ~{key} out"
    rule = re.sub("^(Input|String) should", "must", problem["msg"])
    defaults = yaml.safe_load((CONFIGS / "train.yaml").read_text())
    default = json.dumps(defaults[key]).strip('"')
    if "$" in default:  # made of the names of the groups
        default = "NAME"
    return f"{key} {rule} (got {problem['input']!r}). fix: {key}={default}"


def unknown(word: str) -> str:
    """A line for a KEY or a GROUP=CHOICE that is not there, with the one that is nearest."""
    group, is_choice, _ = word.partition("=")
    known = (
        choices(group)
        if is_choice
        else [*Settings.model_fields, *GROUPS, *group_keys(), *choices()]
    )
    near = errors.suggest(word, known) or (is_choice and " or ".join(known))
    return f"unknown ({word}). fix: {near or 'python train.py --help, which lists all'}"


def choices(group: str = "*") -> list[str]:
    """What a group, or each of them, can be set to, as it is typed: attention=gqa."""
    return sorted(f"{file.parent.name}={file.stem}" for file in CONFIGS.glob(f"{group}/*.yaml"))


def group_keys() -> list[str]:
    """The keys of all files of the groups: attention.kv_heads."""
    keys = {}
    for group in GROUPS:
        for file in sorted((CONFIGS / group).glob("*.yaml")):
            for key, _ in flatten(yaml.safe_load(file.read_text()), f"{group}."):
                keys[key] = None
    return list(keys)


def flatten(tree: dict, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (key, value) for each leaf of nested dicts; keys are joined by dots."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def compose(overrides: list[str]) -> Settings:
    """The settings of `python train.py OVERRIDES`, for notebooks and other commands.

    Raises ValueError with a line for each problem, HydraException for overrides that do not fit.
    """
    import hydra  # takes a quarter of a second, which only commands that compose should spend
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    GlobalHydra.instance().clear()  # of train.py, or of a notebook
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        try:
            cfg = hydra.compose("train", overrides, return_hydra_config=True)
        except HydraException as error:  # some are an OSError, too, as if a file were missing
            raise HydraException(composing_problem(str(error))) from None
    # The name is made of the groups' choices, which are in Hydra's own part of the config.
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_struct(cfg, False)
    del cfg.hydra
    return from_config(cfg)


def check_command_line(arguments: list[str]) -> None:
    """Ends with exit code 2 for a key with dashes, to which Hydra would answer with its usage."""
    for argument in arguments:
        key, _, value = argument.lstrip("-").partition("=")
        if argument.startswith("--") and key.partition(".")[0] in (*Settings.model_fields, *GROUPS):
            errors.exit_with(
                errors.INPUT,
                f"keys are written without dashes (got {argument}). fix: {key}={value or 'VALUE'}",
            )


@contextmanager
def report_errors() -> Iterator[None]:
    """As errors.report_errors, and Hydra's errors of composing with exit code 1."""
    from hydra.errors import HydraException

    try:
        with errors.report_errors():
            yield
    except (HydraException, OmegaConfBaseException) as error:
        errors.exit_with(errors.BUG, composing_problem(str(error)))


def composing_problem(text: str) -> str:
    """What an error of Hydra says, without its advice, and a fix of ours."""
    if "fix: " in text:  # from compose
        return text
    refused = r"(?:In 'train': )?Could not (?:override|find|delete from config\.) '(.+?)'"
    if match := re.match(refused, text):
        return unknown(match[1].replace("/", "=", 1))
    if match := re.search(r"'([^']+?=.+)'(?:\n1\. | requires --multirun)", text):
        return (
            f"several values for one run ({match[1]}). "
            f"fix: python -m tools.compare {shlex.quote(match[1])} or, for a list, KEY=[A,B]"
        )
    text = re.split(r"\nTo append|\nConfig search path|\nSee https", text)[0]
    return (
        f"{text.rstrip('.')}. "
        "fix: KEY=VALUE; a value with spaces or commas is quoted twice: 'KEY=\"a b\"'"
    )
