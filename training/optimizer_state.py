"""Learning rates of any torch optimizer, and its state by parameter name."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from training.rates import ROLES

StateByName = dict[str, dict]  # the state of each parameter, by its name


def set_learning_rates(optimizers: list[Optimizer], factor: float) -> None:
    """Set the rate of every group to its own peak rate times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            peak = group.setdefault("peak", group["lr"])
            group["lr"] = peak * factor


def learning_rates(optimizers: list[Optimizer]) -> dict[str, float]:
    """Return the current rate of each role, by its name in metrics.jsonl.

    If parameters of one role have several rates, the first is returned. An optimizer whose groups
    have no role has one rate, `lr`.
    """
    rates = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rates.setdefault(ROLES[group.get("role", "matrices")], group["lr"])
    return rates


def optimizer_state(model: nn.Module, optimizers: list[Optimizer]) -> StateByName:
    """Return each parameter's state as full tensors on the CPU of rank 0; empty on other ranks.

    All ranks call this together.
    """
    # Imported here, because the import takes half a second. get_optimizer_state_dict is not used,
    # because it would take a step with an optimizer that has no state.
    from torch.distributed.checkpoint import state_dict

    if not any(optimizer.state for optimizer in optimizers):
        return {}
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return state_dict.get_optimizer_state_dict(model, optimizers, options=options).get("state", {})


def check_optimizer_state(model: nn.Module, state: StateByName) -> None:
    """Raise ValueError if a nonempty state does not match the model's parameters.

    Each tensor of the state must broadcast to its parameter.
    """
    parameters = dict(model.named_parameters())
    different = sorted(parameters.keys() ^ state.keys())
    if state and different:
        raise ValueError(f"the optimizer state does not match the model: {different[:3]}")
    for name, values in state.items():
        shape = parameters[name].shape
        for key, value in values.items():
            if isinstance(value, Tensor) and broadcast_shape(value.shape, shape) != shape:
                raise ValueError(
                    f"{key} of {name} does not fit the parameter "
                    f"({[*value.shape]}, expected {[*shape]})"
                )


def broadcast_shape(first: torch.Size, second: torch.Size) -> torch.Size | None:
    """Return the shape to which two shapes broadcast; None if they do not."""
    try:
        return torch.broadcast_shapes(first, second)
    except RuntimeError:
        return None


def load_optimizer_state(model: nn.Module, optimizers: list[Optimizer], state: StateByName) -> None:
    """Load the result of `optimizer_state` into the optimizers, sharded like the parameters.

    All ranks pass the full state. The optimizers keep their options, such as the learning rate.
    """
    from torch.distributed.checkpoint import state_dict

    if not state:
        return
    groups = state_dict.get_optimizer_state_dict(model, optimizers)["param_groups"]
    state_dict.set_optimizer_state_dict(
        model,
        optimizers,
        {"state": state, "param_groups": groups},
        options=state_dict.StateDictOptions(full_state_dict=True),
    )
