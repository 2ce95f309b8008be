"""What every attention would cost, before anything is trained:  python -m tools.cost model=124m context=4096

The words are those of train.py. Nothing is computed: weights and activations are shapes without memory.
"""

import sys

import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf.errors import OmegaConfBaseException
from torch._subclasses.fake_tensor import FakeTensorMode

from model.build import ROOT, build
from train import checked
from training import config, errors
from training.objective import Objective

COLUMNS = ("attention", "parameters", "MFLOP/token", "KV bytes/token", "KV MB at context", "training GB")


def main(words: list[str]) -> None:
    asked = [word for word in OverridesParser.create().parse_overrides(words) if word.key_or_group == "attention"]
    names = sorted(path.stem for path in (ROOT / "configs" / "attention").glob("*.yaml"))
    if asked:
        words = [word for word in words if not word.startswith("attention=")]
        names = [str(name) for override in asked for name in values(override)]
    rows = []
    for name in names:
        try:
            rows.append(cost(name, [*words, f"attention={name}"]))
        except ConfigCompositionException:  # a knob that this attention does not have
            if asked:
                raise
            rows.append((name, *["-"] * (len(COLUMNS) - 1)))
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for row in (COLUMNS, *rows):
        print("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]))
    print(
        "\nKV bytes are of one row in bf16. training GB: fp32 weights, gradients and optimizer, and what a forward of"
    )
    print("micro_batch sequences keeps for its backward in bf16 without torch.compile, which keeps less.")


def values(override) -> list:
    return list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]


def cost(name: str, words: list[str]) -> tuple[str, ...]:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", ["name=cost", *words])
    if not any(word.startswith("batch_tokens=") for word in words):
        cfg.batch_tokens = cfg.micro_batch * cfg.context
    settings = checked(cfg)
    context, batch = settings["context"], config.micro_batch(settings, 1)
    with FakeTensorMode():
        model = build(settings["model"])
        optimizers = build(settings["optimizer"], "training")(model)
        activations = kept(Objective(model), torch.zeros(batch, context, dtype=torch.int64))
    weights = sum(p.numel() for p in model.parameters())
    moments = sum(
        p.numel() * (1 if "momentum" in group else 2)  # Muon's one, AdamW's two
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    )

    def cached(tokens: int) -> int:
        return sum(block.attention.cache_bytes(tokens, torch.bfloat16) for block in model.blocks)

    return (
        name,
        f"{weights / 1e6:.2f} M",
        f"{model.training_flops() / 1e6:.1f}",
        f"{cached(2) - cached(1):,}",
        f"{cached(context) / 1e6:.2f}",
        f"{(4 * (2 * weights + moments) + activations) / 1e9:.2f}",
    )


def kept(objective: Objective, tokens: torch.Tensor) -> int:
    """Bytes that a forward keeps for its backward, the weights themselves left out."""
    weights, sizes = {p.untyped_storage()._cdata for p in objective.parameters()}, {}

    def see(x: torch.Tensor) -> torch.Tensor:
        sizes[x.untyped_storage()._cdata] = x, x.untyped_storage().nbytes()  # x stays, so that no number is used twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x), torch.autocast("cpu", dtype=torch.bfloat16):
        objective(tokens, tokens)
    return sum(size for storage, (_, size) in sizes.items() if storage not in weights)


if __name__ == "__main__":
    with errors.one_line(HydraException, OmegaConfBaseException):
        main(sys.argv[1:])
