"""What every attention would cost, before anything is trained:  python -m tools.cost model=124m context=4096

The words are those of train.py; gpus=8, or gpus=1,8,64, shows what that many would hold and reach. Nothing is computed:
weights and activations are shapes without memory.
"""

import sys
from functools import partial

import torch
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf.errors import OmegaConfBaseException
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from common import config, errors
from common.config import compose
from common.instantiate import ROOT, instantiate
from training.loss import LanguageModelLoss
from training.optimizers import init_state, state_by_parameter
from training.setup import validate

COLUMNS = (
    "attention",
    "parameters",
    "MFLOP/token",
    "KV bytes/token",
    "KV MB at context",
    "training GB",
)
SCALE = (
    "attention",
    "parameters",
    "GPUs",
    "GB each",
    "sharded",
    "and checkpointed",
    "tokens/s",
    "days",
)
PEAK, MFU, TOKENS = (
    989e12,
    0.4,
    20,
)  # of an H100; of it, what such runs reach; that a run sees for each parameter


def main(words: list[str]) -> None:
    gpus = listed(words, "gpus")
    if wrong := [n for n in gpus if not n.isdecimal() or int(n) < 1]:
        errors.exit_with(
            errors.INPUT, f"gpus must be a whole number from 1 (got {wrong[0]!r}). fix: gpus=8"
        )
    asked = listed(words, "attention")
    words = [word for word in words if not word.startswith(("attention=", "gpus="))]
    rows = []
    for name in asked or sorted(
        path.stem for path in (ROOT / "configs" / "attention").glob("*.yaml")
    ):
        try:
            found = Cost([*words, f"attention={name}"])
            rows += [(name, *found.at_scale(int(n))) for n in gpus] or [(name, *found.alone())]
        except ConfigCompositionException:  # a knob that this attention does not have
            if asked:
                raise
            rows.append((name, *["-"] * (len(SCALE if gpus else COLUMNS) - 1)))
    rows = [SCALE if gpus else COLUMNS, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]))
    note = f"tokens/s at {MFU:.0%} of {PEAK / 1e12:.0f} TFLOP/s each, assumed; days for {TOKENS} tokens a parameter."
    print(
        "\nGB: fp32 weights, gradients and optimizer, and what a forward of micro_batch sequences keeps in bf16 for its"
    )
    print(
        "backward without torch.compile, which keeps less.",
        note if gpus else "KV bytes are of one row in bf16.",
    )


def listed(words: list[str], key: str) -> list[str]:
    return [
        value
        for word in words
        if word.startswith(f"{key}=")
        for value in word.partition("=")[2].split(",")
    ]


class Cost:
    """Of the model and the batch that these words describe."""

    def __init__(self, words: list[str]):
        cfg = compose(["name=cost", *words])
        if not any(word.startswith("batch_tokens=") for word in words):
            cfg.batch_tokens = cfg.micro_batch * cfg.context
        cfg.sharded = False
        settings, *_ = validate(cfg)
        self.context, self.batch = settings["context"], config.micro_batch_size(settings, 1)
        with FakeTensorMode():
            self.model = instantiate(settings["model"])
            optimizers = instantiate(settings["optimizer"], "training")(self.model)
            init_state(optimizers)
            objective = LanguageModelLoss(self.model, z_loss=0.0, bos=None)
            tokens = torch.zeros(self.batch, self.context, dtype=torch.int64)
            self.kept = kept(objective, tokens)
            self.activations = (
                kept(objective, torch.cat((tokens, tokens))) - self.kept
            )  # without weights in bf16
        self.weights = sum(p.numel() for p in self.model.parameters())
        # weights and gradients in fp32, and what the optimizers keep
        leaves = tree_leaves([*state_by_parameter(optimizers).values()])
        kept_by_optimizers = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        self.state = 8 * self.weights + kept_by_optimizers  # bytes

    def alone(self) -> tuple[str, ...]:
        cached = partial(self.model.cache_bytes, dtype=torch.bfloat16)
        return (
            f"{self.weights / 1e6:.2f} M",
            f"{self.model.training_flops() / 1e6:.1f}",
            f"{cached(2) - cached(1):,}",
            f"{cached(self.context) / 1e6:.2f}",
            f"{(self.state + self.kept) / 1e9:.2f}",
        )

    def at_scale(self, gpus: int) -> tuple[str, ...]:
        """Sharded, two blocks in bf16, a block's gradient and the ends in fp32 are whole at a time; checkpointed, one
        block keeps all.
        """
        depth, width = len(self.model.blocks), self.model.embed.weight.shape[1]
        block = sum(p.numel() for p in self.model.blocks.parameters()) / depth
        gathered = (2 * 2 + 2 + 4) * block + 2 * 4 * (self.weights - depth * block)
        sharded = (
            self.state / gpus + gathered + 4 * self.model.unembedding.numel()
        )  # its gradient, until the backward
        inputs = 4 * depth * self.batch * self.context * width
        rate = MFU * PEAK * gpus / self.model.training_flops()
        spread = (sharded + self.activations, sharded + inputs + self.activations / depth)
        return (
            f"{self.weights / 1e9:.2f} B",
            str(gpus),
            f"{(self.state + self.kept) / 1e9:.1f}",
            *(f"{size / 1e9:.1f}" if gpus > 1 else "-" for size in spread),
            f"{rate:,.0f}",
            f"{TOKENS * self.weights / rate / 86400:,.1f}",
        )


def kept(objective: LanguageModelLoss, tokens: torch.Tensor) -> int:
    """Bytes that a forward keeps for its backward, the weights themselves left out."""
    weights, sizes = {p.untyped_storage()._cdata for p in objective.parameters()}, {}

    def see(x: torch.Tensor) -> torch.Tensor:
        sizes[x.untyped_storage()._cdata] = (
            x,
            x.untyped_storage().nbytes(),
        )  # x stays, so that no number is used twice
        return x

    with (
        torch.autograd.graph.saved_tensors_hooks(see, lambda x: x),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        objective(tokens, tokens)
    return sum(size for storage, (_, size) in sizes.items() if storage not in weights)


if __name__ == "__main__":
    with errors.report_errors(HydraException, OmegaConfBaseException):
        main(sys.argv[1:])
