"""The keys of a config: their types and ranges, and the combinations that are refused."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from run.ranges import AtLeastTwo, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

CPU_MICRO_BATCH = 8  # sequences, by default; larger micro-batches are not faster on a CPU

# Keys that mirror another key and cannot be overridden: the other key sets them.
MIRRORED_KEYS = {
    "model.vocab_size": "data.vocab_size",
    "model.context": "context",
    "model.attention": "attention",
    "model.ffn": "ffn",
    "model.norm": "norm",
    "data.context": "context",
}

Text = Annotated[str, Field(min_length=1)]


class Settings(BaseModel):
    """The types and ranges of the keys of configs/train.yaml, whose comments explain them.

    The groups are trees of `_target_` and arguments, which `instantiate` checks.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: dict
    data: dict
    optimizer: dict
    schedule: dict

    name: str = Field(pattern=r"^\w[\w.-]*$")
    run_dir: Text | None
    resume: bool
    init_from: Text | None
    seed: NonNegativeInt

    steps: PositiveInt | None
    tokens_per_parameter: PositiveFloat | None
    max_minutes: PositiveFloat | None
    max_epochs: PositiveInt | None

    context: AtLeastTwo
    batch_tokens: PositiveInt
    micro_batch: PositiveInt | None
    document_mask: bool

    clip: PositiveFloat | None
    z_loss: NonNegativeFloat

    device: Literal["auto", "cpu", "cuda", "mps"]
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    compile: Literal["auto", True, False]
    sharded: bool
    activation_checkpointing: bool

    eval_every: PositiveInt
    eval_tokens: AtLeastTwo | None
    save_every: PositiveInt
    sample_every: PositiveInt
    log_every: PositiveInt
    profile: PositiveInt | None
    wandb: Literal["disabled", "offline", "online"]

    def check_combinations(self, world_size: int) -> None:
        """Raise ValueError for settings that conflict, given this number of processes."""
        if self.sharded and world_size == 1:
            raise ValueError(
                "sharding needs more than one process (sharded=true). "
                "fix: torchrun --nproc_per_node=N train.py, or sharded=false"
            )
        # If the batch is smaller than one micro-batch per process, the micro-batch shrinks.
        sequence_tokens = self.context * world_size  # if every process has one sequence
        sequences = self.batch_tokens // sequence_tokens
        unit = sequence_tokens * min(self.micro_batch or 1, max(1, sequences))
        if self.batch_tokens % unit != 0:
            size = max(unit, self.batch_tokens // unit * unit)
            raise ValueError(
                f"batch_tokens must be a multiple of {unit}, so that each process has whole "
                f"micro-batches (got {self.batch_tokens} with context={self.context} "
                f"micro_batch={self.micro_batch} processes={world_size}). fix: batch_tokens={size}"
            )

    def sequences_per_process(self, world_size: int) -> int:
        """Return the number of sequences in each process's share of a batch."""
        return self.batch_tokens // self.context // world_size

    def micro_batch_size(self, world_size: int, most: int = CPU_MICRO_BATCH) -> int:
        """Return the number of sequences per forward pass.

        By default, it is the largest divisor of a process's share of a batch that is at most
        `most`.
        """
        sequences = self.sequences_per_process(world_size)
        if self.micro_batch is not None:
            return min(self.micro_batch, sequences)
        return max(size for size in range(1, most + 1) if sequences % size == 0)


def describe(key: str, value: object, rule: str) -> str:
    """Return an error line for a value that breaks `rule`, which is in pydantic's words."""
    return f"{key}={as_typed(value)}: {rule}"


def flatten(tree: dict, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (key, value) for each leaf of nested dicts; keys are joined by dots."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def as_typed(value: object) -> str:
    """Return a config value as the user would type it: null for None, true for True."""
    names = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return names[value]
    if isinstance(value, list):
        return f"[{','.join(as_typed(item) for item in value)}]"
    return str(value)
