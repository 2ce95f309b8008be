"""Learning rates scaled to the model size, the batch size and the length of the run.

`optimizer.lr` is the peak rate of the matrices in the blocks of a `reference`: a model with `dim`
features, trained with `batch_tokens` tokens per step and `tokens` tokens in total. All other rates
follow from it. docs/rates.md has the measurements.

Roles. Embedding, head and vectors have separate rates, given as multiples of `lr`.

Width. The step of a matrix should change its outputs equally at every width. Adam changes each
element by about its rate, and the changes in a row add up, so the rates of matrices and of the head
fall as 1 / fan_in (muP: Yang, 2203.03466). Muon's step has a spectral norm equal to its rate, and
needs no factor (Bernstein, 2409.20325). An embedding is looked up and a vector multiplies features
one by one, so they need no factor either. The rate of a tied embedding is the geometric mean of the
rates of embedding and head at the reference's width, and falls with the width like a head's rate.

Depth. No factor is needed. Output projections start at zero, and the best rate is the same at 2 to
16 layers.

Batch and length. How informative a gradient is depends on the batch B relative to the noise scale
N, the batch at which the variance of the gradient equals its squared mean (McCandlish, 1812.06162).
The best rate of optimizers that normalize their steps is 1 / sqrt(1 + N / B) of the best rate in
large batches (Malladi, 2205.10287; Li, 2405.14578). The noise scale grows as the loss falls: with
the tokens of a run, as critical batches do (Zhang, 2410.21676), and with the width.

All of this applies to training from scratch. Without a reference, as with pretrained weights, `lr`
is the rate of all parameters.
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from run.ranges import NonNegativeFloat, PositiveFloat, PositiveInt

# The noise scale grows with these powers of a run's tokens and of the width. They were fitted to
# the best rates of 20 models and runs (docs/rates.md).
NOISE_TOKENS_EXPONENT = 0.75
NOISE_DIM_EXPONENT = 0.5

# Roles of parameters, and the names of their rates in metrics.jsonl.
ROLES = {
    "matrices": "lr",  # inside the blocks, (out, in)
    "embedding": "embedding_lr",
    "head": "head_lr",  # and the embedding, if tied
    "vectors": "vector_lr",  # gains, biases, decays, and the taps of convolutions
}


@dataclass(frozen=True)
class Reference:
    """The model and run that `optimizer.lr` was tuned for, and the rates of the other roles."""

    dim: PositiveInt
    batch_tokens: PositiveInt  # in an optimizer step
    tokens: PositiveFloat  # of the whole run
    # In tokens; much smaller batches need lower rates; 0 turns this off.
    noise_scale: NonNegativeFloat
    # Rates as multiples of lr.
    embedding: PositiveFloat
    head: PositiveFloat
    vectors: PositiveFloat

    def multiple(self, role: str, is_tied: bool) -> float:
        """Return the rate of a role as a multiple of lr, at the reference's width."""
        if role == "matrices":
            return 1.0
        if is_tied:
            return math.sqrt(self.embedding * self.head)
        return getattr(self, role)

    def width_factor(self, fan_in: int) -> float:
        """Return the factor of Adam's rate for a matrix with `fan_in` inputs."""
        return self.dim / fan_in

    def run_factor(self, dim: int, batch_tokens: int, steps: float) -> float:
        """Return the factor of all rates; 1 while the number of steps is unknown (infinite)."""
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
    """Map each role to its parameters. Raises ValueError for a parameter that has no role."""
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
                f"no rule for the learning rate of {name} with shape {[*p.shape]}: only matrices "
                "(out, in) inside the blocks, vectors, and kernels (channels, 1, width) are "
                "supported. fix: reshape it, or add a rule to split_parameters in "
                "training/rates.py"
            )
        parameters[role].append(p)
    return parameters


def parameter_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    reference: Reference | None,
    *,
    scale_matrices: bool,
) -> list[dict]:
    """Return the groups of an optimizer: per role, a group for each width, with its `lr`.

    Only matrices decay. If the width lowers a rate, it raises the decay by the same factor, so that
    lr x weight_decay does not depend on fan_in (Wang and Aitchison, 2405.13698). Muon needs no
    width factor for matrices, so `scale_matrices` is false for it.
    """
    parameters = split_parameters(model)
    groups = {}
    for role, members in parameters.items():
        is_tied = role == "head" and not parameters["embedding"]
        has_width = role == "head" or (role == "matrices" and scale_matrices)
        for p in members:
            rate = lr
            decay = weight_decay if role == "matrices" else 0.0
            if reference is not None:
                rate *= reference.multiple(role, is_tied)
                if has_width:
                    width_factor = reference.width_factor(p.shape[1])
                    rate *= width_factor
                    decay /= width_factor
            group = {"params": [], "lr": rate, "weight_decay": decay, "role": role}
            groups.setdefault((role, rate), group)["params"].append(p)
    return list(groups.values())


class LearningRates:
    """Sets the rates of all groups: base rate x factor of the run x schedule.

    The base rate of a group is the `lr` with which it was built. Optimizers of other programs have
    groups without roles, whose rate is `lr`.
    """

    def __init__(
        self, optimizers: list[Optimizer], reference: Reference | None, dim: int, batch_tokens: int
    ):
        self.reference = reference
        self.dim = dim
        self.batch_tokens = batch_tokens
        self.groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group in self.groups:
            group["base"] = group["lr"]

    def run_factor(self, steps: float) -> float:
        """Return the factor of all rates in a run of `steps` steps."""
        if self.reference is None:
            return 1.0
        return self.reference.run_factor(self.dim, self.batch_tokens, steps)

    def set_rates(self, scheduled: float, steps: float) -> None:
        """Set all rates to the fraction `scheduled` of their peak in a run of `steps` steps."""
        factor = scheduled * self.run_factor(steps)
        for group in self.groups:
            group["lr"] = factor * group["base"]

    def by_name(self, key: str = "lr") -> dict[str, float]:
        """Return the rate (or the `base`) of each role, by its name in metrics.jsonl.

        If parameters of one role have several rates, the first is returned.
        """
        rates = {}
        for group in self.groups:
            rates.setdefault(ROLES[group.get("role", "matrices")], group[key])
        return rates

    def describe(self, steps: float) -> str:
        """Return a line with the peak rates of a run of `steps` steps."""
        factor = self.run_factor(steps)
        peaks = [f"{name} {factor * base:.3g}" for name, base in self.by_name("base").items()]
        scaling = "not scaled"
        if self.reference is not None:
            scaling = f"scaled to dim {self.dim} and {steps:,.0f} steps, docs/rates.md"
        return f"peak learning rates: {', '.join(peaks)} ({scaling})"
