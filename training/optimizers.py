"""Optimizers over a model's parameters, as a list that steps together."""

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer


def adamw(model: nn.Module, *, lr: float, betas: list[float], weight_decay: float) -> list[Optimizer]:
    """AdamW with decay on matrices only. Loshchilov and Hutter, 1711.05101."""
    _check(betas)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [AdamW(groups, lr=lr, betas=tuple(betas), fused=True)]


def muon(
    model: nn.Module, *, lr: float, momentum: float, weight_decay: float, embedding_lr: float, betas: list[float]
) -> list[Optimizer]:
    """Muon for the matrices inside the blocks, AdamW without decay for embedding, head and vectors.

    Jordan et al., kellerjordan.github.io/posts/muon.
    Updates are scaled to the size of AdamW's (Liu et al., 2502.16982), so that `lr` means the same for both.
    """
    _check(betas)
    hidden, ends, vectors = [], [], []
    for name, p in model.named_parameters():
        (vectors if p.ndim < 2 else hidden if name.startswith("blocks.") else ends).append(p)
    groups = [{"params": ends, "lr": embedding_lr}, {"params": vectors}]
    return [
        Muon(hidden, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        AdamW(groups, lr=lr, betas=tuple(betas), weight_decay=0.0, fused=True),
    ]


def _check(betas: list[float]) -> None:
    if len(betas) != 2 or max(betas) >= 1:
        raise ValueError(f"optimizer.betas must be two numbers below 1 (got {betas}). fix: [0.9, 0.95]")


def named_state(optimizers: list[Optimizer], model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """What the optimizers remember of each parameter, by its name."""
    state = {p: values for optimizer in optimizers for p, values in optimizer.state.items()}
    return {name: state[p] for name, p in model.named_parameters() if p in state}


def load_named_state(optimizers: list[Optimizer], model: nn.Module, state: dict[str, dict[str, Tensor]]) -> None:
    """The way back, onto the parameters' devices: the fused optimizers count their steps there too."""
    owner = {p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if name in state:
            owner[p].state[p] = {key: value.to(p.device) for key, value in state[name].items()}


def set_rates(optimizers: list[Optimizer], multiple: float) -> None:
    """Every group's own peak rate times `multiple`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak", group["lr"]) * multiple
