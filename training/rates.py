"""Learning rates scaled to the model size, the batch size and the length of the run.

`optimizer.lr` is the peak learning rate of the matrices in the blocks of a `reference`: a model
with `dim` features and `depth` layers, trained with `batch_tokens` tokens per step and `tokens`
tokens in total. All other learning rates follow from it. docs/rates.md has the measurements.

Roles. Embedding, head and vectors have their own learning rates, given as multiples of `lr`.

Width. A step should change the outputs of a matrix equally at every width. Adam changes each
element by about the learning rate, and the changes in a row of the matrix add up, so the rates of
matrices and of the head fall as 1 / fan_in (muP: Yang, 2203.03466). The spectral norm of Muon's
step does not depend on the width, so its rate needs no factor (Bernstein, 2409.20325). An embedding
is looked up and a vector multiplies features one by one, so they need no factor either. The rate of
a tied embedding is the geometric mean of the rates of embedding and head at the reference's width,
and falls with the width like a head's rate.

Batch, length and size. The best rate of optimizers that normalize their steps grows with the square
root of the batch size while gradients are noisy (Malladi, 2205.10287), and not in larger batches
(Li, 2405.14578). It falls with the number of training tokens (Bjorck, 2409.19913; Ren, 2603.28743)
and, by our measurements, with the width and the depth.

These rules apply to training from scratch. Without a reference, as with pretrained weights, `lr` is
the learning rate of all parameters.
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from run.ranges import PositiveFloat, PositiveInt

# Exponents of the batch size, of a run's tokens and of dim x depth in the factor of all rates. The
# first two are published (2205.10287, 2409.19913). The third was fitted to the best rates of Muon
# in 22 setups, as was the number of steps below which a larger batch does not raise the rates
# (docs/rates.md).
BATCH_EXPONENT = 0.5
TOKENS_EXPONENT = -0.32
SIZE_EXPONENT = -0.2
MIN_STEPS = 150

# Roles of parameters, and the names of their rates in metrics.jsonl.
ROLES = {
    "matrices": "lr",  # inside the blocks, (out, in)
    "embedding": "embedding_lr",
    "head": "head_lr",  # and the embedding, if tied
    "vectors": "vector_lr",  # gains, biases, decays, and the taps of convolutions
}


@dataclass(frozen=True)
class Reference:
    """The model and run that `optimizer.lr` was tuned for, and the rates of the other roles.

    If `depth`, `batch_tokens` or `tokens` is None, rates are scaled only with fan_in.
    """

    dim: PositiveInt
    depth: PositiveInt | None
    batch_tokens: PositiveInt | None  # in an optimizer step
    tokens: PositiveFloat | None  # of the whole run
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

    @property
    def has_run(self) -> bool:
        """Whether rates are scaled to the size of the model and to the run."""
        return None not in (self.depth, self.batch_tokens, self.tokens)

    def run_factor(self, dim: int, depth: int, batch_tokens: int, steps: float) -> float:
        """Return the factor of all rates; 1 if `has_run` is false or `steps` is infinite."""
        if not self.has_run or math.isinf(steps):
            return 1.0
        tokens = batch_tokens * steps
        batch = min(batch_tokens, tokens / MIN_STEPS)
        reference_batch = min(self.batch_tokens, self.tokens / MIN_STEPS)
        return (
            (batch / reference_batch) ** BATCH_EXPONENT
            * (tokens / self.tokens) ** TOKENS_EXPONENT
            * (dim * depth / (self.dim * self.depth)) ** SIZE_EXPONENT
        )


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
    """Return the groups of an optimizer: for each role, a group for each value of `lr`.

    Only matrices have weight decay. It is divided by the width factor of their rate, so that
    lr x weight_decay does not depend on fan_in (Wang and Aitchison, 2405.13698).
    Muon needs no width factor for matrices, so `scale_matrices` is false for it.
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

    The base rate of a group is the `lr` with which it was built. Groups that were not built by
    `parameter_groups` have no role, and are logged as `lr`.
    """

    def __init__(
        self,
        optimizers: list[Optimizer],
        reference: Reference | None,
        *,
        dim: int,
        depth: int,
        batch_tokens: int,
    ):
        self.reference = reference
        self.dim = dim
        self.depth = depth
        self.batch_tokens = batch_tokens
        self.groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group in self.groups:
            group["base"] = group["lr"]

    def run_factor(self, steps: float) -> float:
        """Return the factor of all rates in a run of `steps` steps."""
        if self.reference is None:
            return 1.0
        return self.reference.run_factor(self.dim, self.depth, self.batch_tokens, steps)

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
            size = f"dim {self.dim}"
            if self.reference.has_run:
                size += f", depth {self.depth} and {steps:,.0f} steps"
            scaling = f"scaled to {size}, docs/rates.md"
        return f"peak learning rates: {', '.join(peaks)} ({scaling})"
