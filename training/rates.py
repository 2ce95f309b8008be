"""Learning rates that fit the size of a model, its batches and the length of its run.

`optimizer.lr` is the peak rate of the matrices in the blocks of a `reference`: a model of `dim`
features, trained with `batch_tokens` tokens in a step and `tokens` tokens in all. Everything else
follows from it. docs/rates.md has the measurements.

Roles. Embedding, head and vectors have rates of their own, as multiples of `lr`.

Width. The step of a matrix is to change its outputs as much at every width. Adam moves each element
by about its rate, and the elements of a row add up: so the rate of a matrix falls as 1 / fan_in, that
of the head too (muP: Yang, 2203.03466). Muon's step has a spectral norm that is its rate, and needs no
factor (Bernstein, 2409.20325). An embedding is looked up and a vector multiplies features one by one:
they need none either.

Depth. No factor: output projections start at zero, and the best rate is the same at 2 to 16 layers.

Batch and length. A gradient over few tokens is mostly noise, and what it is worth is a matter of the
batch B beside the noise scale N, the tokens at which noise and signal are equal (McCandlish,
1812.06162). The best rate of optimizers that normalize their steps is 1 / sqrt(1 + N / B) of what it
is in large batches (Malladi, 2205.10287; Li, 2405.14578). The noise scale grows as the loss falls: with
the tokens of a run as critical batches do (Zhang, 2410.21676), and with the width.

All of this is for training from scratch. Without a reference, as for pretrained weights, `lr` is
literally the rate of all parameters.
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

# The noise scale grows with these powers of the tokens of a run and of the width. Fitted to the best
# rates of 27 models and runs (docs/rates.md).
NOISE_TOKENS_EXPONENT = 0.75
NOISE_DIM_EXPONENT = 0.5

# Roles of parameters, and the names of their rates in metrics.jsonl.
ROLES = {
    "matrices": "lr",  # inside the blocks, (out, in)
    "embedding": "embedding_lr",
    "head": "head_lr",  # the embedding too, where it is the head
    "vectors": "vector_lr",  # gains, biases, decays, and the taps of convolutions
}


@dataclass(frozen=True)
class Reference:
    """The model and run that `optimizer.lr` is right for, and the rates of other roles there."""

    dim: int
    batch_tokens: int  # in an optimizer step
    tokens: float  # of the whole run
    noise_scale: float  # in tokens: batches far below it need lower rates
    # Rates as multiples of lr.
    embedding: float
    head: float
    vectors: float

    def __post_init__(self):
        """Raise ValueError for a number that is not above zero."""
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(
                    f"optimizer.reference.{name} must be above 0 (got {value}). "
                    f"fix: leave optimizer.reference.{name} out"
                )

    def width_factor(self, fan_in: int) -> float:
        """What Adam's rate of a matrix with so many inputs is multiplied by."""
        return self.dim / fan_in

    def run_factor(self, dim: int, batch_tokens: int, steps: float) -> float:
        """What all rates are multiplied by; 1 as long as the number of steps is infinite."""
        if math.isinf(steps):
            return 1.0
        noise_scale = (
            self.noise_scale
            * (batch_tokens * steps / self.tokens) ** NOISE_TOKENS_EXPONENT
            * (dim / self.dim) ** NOISE_DIM_EXPONENT
        )
        at_reference = 1 + self.noise_scale / self.batch_tokens
        return math.sqrt(at_reference / (1 + noise_scale / batch_tokens))


def split_parameters(model: nn.Module) -> dict[str, list[Tensor]]:
    """The parameters of each of ROLES. Raises ValueError for one that has none, by its name."""
    in_blocks = {*model.blocks.parameters()}
    parameters = {role: [] for role in ROLES}
    for name, p in model.named_parameters():
        if p is model.unembedding:
            role = "head"
        elif p is model.embed.weight:
            role = "embedding"
        elif p.ndim == 2 and p in in_blocks:
            role = "matrices"
        elif p.ndim < 2 or (p.ndim == 3 and p.shape[1] == 1):
            role = "vectors"
        else:
            raise ValueError(
                f"no rule for the learning rate of {name}, of shape {[*p.shape]}: known are matrices "
                "(out, in) inside the blocks, vectors, and kernels (channels, 1, width). fix: give it "
                "such a shape, or a rule in split_parameters of training/rates.py"
            )
        parameters[role].append(p)
    return parameters


def adam_groups(
    parameters: dict[str, list[Tensor]], lr: float, weight_decay: float, reference: Reference | None
) -> list[dict]:
    """Groups for AdamW: of each role, a group for each width, with its peak rate and decay.

    Matrices alone decay. Where their rate is lower for the width, their decay is as much higher,
    because each step multiplies both: weights forget at one speed at every width (Wang and
    Aitchison, 2405.13698).
    """
    groups = []
    for role, members in parameters.items():
        role_factor = 1.0
        if reference is not None and role != "matrices":
            role_factor = getattr(reference, role)
        by_width = {}
        for p in members:
            width_factor = 1.0
            if reference is not None and role in ("matrices", "head"):
                width_factor = reference.width_factor(p.shape[1])
            by_width.setdefault(width_factor, []).append(p)
        for width_factor, same in by_width.items():
            group = {
                "params": same,
                "lr": lr * role_factor * width_factor,
                "weight_decay": weight_decay / width_factor if role == "matrices" else 0.0,
                "role": role,
                "role_factor": role_factor,
                "width_factor": width_factor,
            }
            groups.append(group)
    return groups


def describe(
    optimizers: list[Optimizer],
    reference: Reference | None,
    dim: int,
    batch_tokens: int,
    steps: float,
) -> str:
    """The peak rates of a run of so many steps, a line each, and what they are the product of."""
    if reference is None:
        return "learning rate: that of the config for all parameters, literally"
    if math.isinf(steps):
        return "learning rates: scaled as soon as the number of steps is estimated"
    scale = reference.run_factor(dim, batch_tokens, steps)
    lines = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            key = ROLES[group["role"]]
            peak = group.get("peak", group["lr"])
            role_factor = group["role_factor"]
            width_factor = group["width_factor"]
            lr = peak / role_factor / width_factor
            text = f"  {key:<13}{scale * peak:<9.3g}= {lr:.3g} x {scale:.3g}"
            if role_factor != 1:
                text += f" x {role_factor:g}"
            if width_factor != 1:
                text += f" x {reference.dim} / {group['params'][0].shape[1]} inputs"
            lines.setdefault(key, text)
    return "\n".join(
        [
            "peak learning rates, scaled to this run (optimizer.reference=null takes them literally):",
            *lines.values(),
            f"  where {scale:.3g} is for dim {dim}, {batch_tokens:,} tokens in a step and "
            f"{batch_tokens * steps:,.0f} tokens in all; it is 1 for dim {reference.dim}, "
            f"{reference.batch_tokens:,} and {reference.tokens:,.0f} (docs/rates.md)",
        ]
    )
