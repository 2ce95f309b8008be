"""What every attention would cost in a run:  python -m tools.cost model=124m context=4096

The overrides are those of train.py; gpus=8, or gpus=1,8,64, shows what each of that many GPUs would
hold and how fast they would train, and --gpu H100,A100 how fast one of each would be and where its
time goes. Nothing is computed: tensors are shapes without memory.
"""

import sys
from functools import cached_property, partial

import torch
from hydra.errors import ConfigCompositionException

from model.build import build_model
from run import cli, config, errors
from run.config import compose
from tools.roofline import MACHINES, PARTS, step_seconds, token_seconds
from training.memory import TrainingMemory
from training.setup import load_settings

COLUMNS = (
    "attention",
    "parameters",
    "MFLOP/token",
    "KV bytes/token",
    "KV MB at context",
    "training GB",
)
SCALE_COLUMNS = (
    "attention",
    "parameters",
    "GPUs",
    "GB each",
    "sharded",
    "and checkpointed",
    "tokens/s",
    "days",
)
GPU_COLUMNS = ("attention", "GPU", "ms/step", "tokens/s", "MFU", *PARTS, "1 row", "8 rows")
PEAK_FLOPS = 989e12  # FLOP/s of an H100 in bf16
CELL = 16  # characters of a name
MFU = 0.4  # fraction of the peak that such runs reach
TOKENS_PER_PARAMETER = 20  # that a run trains on
MEMORY_NOTE = (
    "GB: at the peak of a training step on micro_batch sequences in bf16, without "
    "torch.compile,\nwhich takes less."
)
SCALE_NOTE = (
    f"tokens/s at {MFU:.0%} of {PEAK_FLOPS / 1e12:.0f} TFLOP/s each, assumed; "
    f"days for {TOKENS_PER_PARAMETER} tokens a parameter."
)

GPU_NOTE = (
    "ms: an optimizer step of batch_tokens (by default one micro_batch), and how much of it each "
    "part takes.\n1 row, 8 rows: tokens/s in decoding at the end of the context, bf16. -: an "
    "attention that is not one fused kernel.\nAll of it is predicted by arithmetic."
)


def main(arguments: list[str]) -> None:
    parser = cli.Parser(
        "python -m tools.cost", description=__doc__, epilog="such as model=124m --gpu H100"
    )
    parser.add_argument(
        "--gpu",
        default="",
        metavar="NAME",
        help=f"predict the speed on {', '.join(MACHINES)}; several by commas",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py")
    args = parser.parse_intermixed_args(arguments)
    gpus = args.gpu.split(",") if args.gpu else []
    if not set(gpus) <= MACHINES.keys():
        parser.error(f"--gpu {args.gpu} is not of {', '.join(MACHINES)}")

    # Take out the two keys that are lists here.
    gpu_counts = [parse_gpus(value) for value in values_of(args.overrides, "gpus")]
    chosen = values_of(args.overrides, "attention")
    overrides = [text for text in args.overrides if not text.startswith(("attention=", "gpus="))]
    presets = sorted(path.stem for path in (config.CONFIGS / "attention").glob("*.yaml"))
    columns = COLUMNS
    note = f"{MEMORY_NOTE} KV bytes are of one row in bf16."
    if gpus:
        columns = GPU_COLUMNS
        note = GPU_NOTE
    elif gpu_counts:
        columns = SCALE_COLUMNS
        note = f"{MEMORY_NOTE} {SCALE_NOTE}"

    rows = [columns]
    for name in chosen or presets:
        try:
            cost = Cost([*overrides, f"attention={name}"])
        except ConfigCompositionException:
            # An override that this attention does not have is an error only if it was asked for.
            if chosen:
                raise
            rows.append((name, "-"))
            continue
        if gpus:
            rows += [(name, *gpu_row(cost, gpu)) for gpu in gpus]
        elif gpu_counts:
            rows += [(name, *scale_row(cost, gpus)) for gpus in gpu_counts]
        else:
            rows.append((name, *row(cost)))

    width = max(map(len, columns))
    for name, *cells in rows:
        print(name.ljust(CELL), *[cell.rjust(width) for cell in cells])
    print(f"\n{note}")


def values_of(overrides: list[str], key: str) -> list[str]:
    """The values, separated by commas, of the overrides of `key`."""
    values = []
    for override in overrides:
        if override.startswith(f"{key}="):
            values += override.removeprefix(f"{key}=").split(",")
    return values


def parse_gpus(value: str) -> int:
    """Ends with exit code 2 for what is not a whole number from 1."""
    if value.isdecimal() and int(value) > 0:
        return int(value)
    errors.exit_with(
        errors.INPUT, f"gpus must be a whole number of at least 1 (got {value!r}). fix: gpus=8"
    )


class Cost:
    """The model of a run with these overrides, and the memory that its training takes."""

    def __init__(self, overrides: list[str]):
        settings = compose(["name=cost", *overrides, "sharded=false"])
        if not values_of(overrides, "batch_tokens"):
            micro_batch = settings["micro_batch"] or config.CPU_MICRO_BATCH
            settings["batch_tokens"] = micro_batch * settings["context"]
        load_settings(settings)
        self.micro_batch = config.micro_batch_size(settings, 1)
        self.batch_tokens = settings["batch_tokens"]
        self.settings = settings
        self.model = build_model(settings["model"])
        self.parameters = self.model.num_parameters()

    @cached_property
    def memory(self) -> TrainingMemory:
        return TrainingMemory(self.settings)


def row(cost: Cost) -> tuple[str, ...]:
    """The cells of COLUMNS after the name."""
    cache_bytes = partial(cost.model.cache_bytes, dtype=torch.bfloat16)
    return (
        f"{cost.parameters / 1e6:.2f} M",
        f"{cost.model.training_flops() / 1e6:.1f}",
        f"{cache_bytes(2) - cache_bytes(1):,}",
        f"{cache_bytes(cost.model.context) / 1e6:.2f}",
        f"{cost.memory.peak(cost.micro_batch) / 1e9:.2f}",
    )


def scale_row(cost: Cost, gpus: int) -> tuple[str, ...]:
    """The cells of SCALE_COLUMNS after the name, for a run on that many GPUs."""
    tokens_per_second = MFU * PEAK_FLOPS * gpus / cost.model.training_flops()
    seconds = TOKENS_PER_PARAMETER * cost.parameters / tokens_per_second
    sharded = "-"
    checkpointed = "-"
    if gpus > 1:
        peak = partial(cost.memory.peak, cost.micro_batch, shards=gpus)
        sharded = f"{peak() / 1e9:.1f}"
        checkpointed = f"{peak(is_checkpointed=True) / 1e9:.1f}"
    return (
        f"{cost.parameters / 1e9:.2f} B",
        str(gpus),
        f"{cost.memory.peak(cost.micro_batch) / 1e9:.1f}",
        sharded,
        checkpointed,
        f"{tokens_per_second:,.0f}",
        f"{seconds / 86400:,.1f}",
    )


def gpu_row(cost: Cost, name: str) -> tuple[str, ...]:
    """The cells of GPU_COLUMNS after the name of the attention."""
    machine = MACHINES[name]
    model = cost.model
    try:
        parts = step_seconds(machine, model, cost.micro_batch, cost.batch_tokens)
    except ValueError:
        return (name, "-")
    seconds = sum(parts.values())
    tokens_per_second = cost.batch_tokens / seconds
    mfu = tokens_per_second * model.training_flops() / machine.peak_flops
    return (
        name,
        f"{1e3 * seconds:,.1f}",
        f"{tokens_per_second:,.0f}",
        f"{mfu:.1%}",
        *[f"{parts[part] / seconds:.1%}" for part in PARTS],
        f"{1 / token_seconds(machine, model, 1):,.0f}",
        f"{8 / token_seconds(machine, model, 8):,.0f}",
    )


if __name__ == "__main__":
    with config.report_errors():
        main(sys.argv[1:])
