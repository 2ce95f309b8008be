"""Build objects from a tree of `_target_` and keyword arguments, as in YAML files and checkpoints.

A checkpoint may come from an untrusted source, so a target must be a class or function defined in
a file of the given package, and an argument must have the type of its annotation.
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn
from torch.types import Device

from run import ROOT
from run.settings import MIRRORED_KEYS, describe

CHECKS = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)


def instantiate(tree: Any, package: str = "model", path: str = "") -> Any:
    """Call every `_target_` in the tree, innermost first.

    A target with `_partial_: true` is not called, but becomes a functools.partial. Raises
    ValueError for a target outside `package`, and for an unknown, missing or invalid argument.
    `path` is the tree's key in the config.
    """
    path = path or package
    if isinstance(tree, list):
        return [instantiate(branch, package, path) for branch in tree]
    if not isinstance(tree, dict):
        return tree

    # Build the arguments before their caller.
    arguments = {}
    for key, branch in tree.items():
        arguments[key] = instantiate(branch, package, f"{path}.{key}")
    if "_target_" not in tree:
        return arguments
    target = resolve_target(arguments.pop("_target_"), package)
    is_partial = arguments.pop("_partial_", False)
    check_arguments(target, arguments, path, is_partial=is_partial)
    if is_partial:
        return partial(target, **arguments)
    return target(**arguments)


def instantiate_model(tree: dict, device: Device, dtype: torch.dtype) -> nn.Module:
    """Build a model on a device; its parameters are not initialized yet.

    Matrices and the biases of linear layers are in `dtype`. Other vectors, such as norms, sinks and
    decays, are in fp32 or wider. Buffers keep their own dtypes, as under autocast. On the meta
    device, a model has only shapes. Raises the same errors as `instantiate`.
    """
    with torch.device(device):
        model = instantiate(tree)
    vector_dtype = torch.promote_types(dtype, torch.float32)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            is_product = parameter.ndim > 1 or isinstance(module, nn.Linear)
            parameter.data = parameter.data.to(dtype if is_product else vector_dtype)
    return model


def resolve_target(path: str, package: str) -> Callable:
    """Import the class or function at `package.module.name`.

    Raises ValueError for a target that is defined elsewhere. Checking the prefix is not enough:
    `package.module.torch.load` also begins with `package`.
    """
    # Only modules that are files of the package are imported.
    known_modules = set()
    for file in (ROOT / package).rglob("*.py"):
        known_modules.add(".".join(file.relative_to(ROOT).with_suffix("").parts))
    module, _, name = str(path).rpartition(".")
    if module in known_modules:
        target = vars(import_module(module)).get(name)
        is_callable = inspect.isclass(target) or inspect.isfunction(target)
        if is_callable and target.__module__ == module:
            return target
    raise ValueError(f"_target_ must be a class or function defined in {package}/ (got {path!r})")


def check_arguments(
    target: Callable, arguments: dict, path: str, *, is_partial: bool = False
) -> None:
    """Raise ValueError for an unknown or missing argument, and for a value that its type excludes.

    A type may have a range, such as PositiveInt of run/ranges.py. NaN and infinity are refused.
    Positional arguments of a partial call are given later.
    """
    parameters = parameters_of(target)
    # The user types attention.window, which is model.attention.window in the config.
    path = re.sub(r"^model\.(?=(attention|ffn|norm)\b)", "", path)
    for parameter in parameters:
        is_needed = parameter.default is parameter.empty
        if is_partial and parameter.kind is not parameter.KEYWORD_ONLY:
            is_needed = False
        if is_needed and parameter.name not in arguments:
            raise ValueError(
                f"missing key ({path}.{parameter.name} of {target.__name__}). fix: add it; if an "
                "older version saved the run, use that version"
            )

    # A class's own annotation of an argument replaces its base class's annotation.
    annotations = {parameter.name: parameter.annotation for parameter in reversed(parameters)}
    for name, value in arguments.items():
        key = MIRRORED_KEYS.get(f"{path}.{name}", f"{path}.{name}")
        if name not in annotations:
            raise ValueError(f"unknown key ({key}): {target.__name__} has no such argument")
        if annotations[name] is inspect.Parameter.empty:
            raise ValueError(f"{target.__name__} has no type annotation for {name} ({key})")
        try:
            TypeAdapter(annotations[name], config=CHECKS).validate_python(value)
        except ValidationError as error:
            rule = error.errors()[0]["msg"]
            raise ValueError(describe(key, value, rule)) from None


def parameters_of(target: Callable) -> list[inspect.Parameter]:
    """Return a target's parameters, with its base class's parameters in place of `**options`."""
    parameters = list(inspect.signature(target).parameters.values())
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        return parameters[:-1] + parameters_of(target.__base__)
    return parameters
