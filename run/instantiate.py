"""Build objects from a tree of `_target_` and keyword arguments, as in YAML files and checkpoints.

A checkpoint may come from an untrusted source, so a target must be a class or function defined in
a file of the given package, and an argument must have the type of its annotation.
"""

import inspect
import re
import shlex
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn
from torch.types import Device

from run import ROOT, aliases
from run.errors import shown
from run.settings import COPIES

TYPE_NAMES = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
    NoneType: "null",
    list[int]: "a list of integers",
    list[float]: "a list of numbers",
    list[str]: "a list of strings",
}
LIST_EXAMPLES = {"list[int]": "[4,8]", "list[float]": "[0.9,0.95]"}
CHECKS = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)


def instantiate(tree: Any, package: str = "model", path: str = "") -> Any:
    """Call every `_target_` in the tree, innermost first.

    A target with `_partial_: true` is not called, but becomes a functools.partial. Raises
    ValueError for a target outside `package` or an argument of the wrong type, and TypeError for an
    unknown or missing argument. `path` is the tree's key in the config.
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
    check_arguments(target, arguments, path)
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
    fix = f"leave it out, or _target_={package}.FILE.NAME"
    file = f"{module.replace('.', '/')}.py"
    if module in known_modules:
        fix = f"define {name} in {file}, or correct _target_"
    elif (ROOT / file).with_suffix("").is_dir():
        fix = f"_target_={module}.FILE.{name}"
    elif module.startswith(f"{package}."):
        fix = f"create {file}, which defines {name}, or correct _target_"
    raise ValueError(
        f"_target_ must be a class or function defined in {package}/ (got {path!r}). fix: {fix}"
    )


def check_arguments(target: Callable, arguments: dict, path: str) -> None:
    """Raise TypeError for an unknown argument, and ValueError for a value that is not allowed.

    Values must match the type annotation. NaN, infinity and negative numbers are refused, as is 0
    for many model options. The call itself refuses missing arguments. If the annotation is a list
    of integers, an integer in `arguments` is replaced by a list.
    """
    annotations = {known.name: known.annotation for known in parameters_of(target)}
    # The user types attention.window, which is model.attention.window in the config.
    prefix = re.sub(r"^model\.(?=(attention|ffn|norm)\b)", "", f"{path}.")
    for name, value in arguments.items():
        # Users override the original, not its copy: data.vocab_size instead of model.vocab_size.
        key = COPIES.get(prefix + name, prefix + name)
        if name not in annotations:
            raise TypeError(f"{target.__name__} has no such argument ({key}). fix: leave {key} out")
        if annotations[name] is inspect.Parameter.empty:
            raise TypeError(
                f"{target.__name__} has no type annotation for {name}. fix: annotate it, for example "
                f"{name}: {type(value).__name__}"
            )

        # A single number is accepted in place of a list with one element.
        wanted = inspect.formatannotation(annotations[name])
        if wanted == "list[int]" and type(value) is int:
            value = [value]
            arguments[name] = value
        try:
            TypeAdapter(annotations[name], config=CHECKS).validate_python(value)
        except ValidationError:
            problem = f"{key} must be {type_in_words(annotations[name])} (got {shown(value)})"
            fix = fixed_value(key, value, annotations[name])
            raise ValueError(f"{problem}. fix: {fix or f'leave {key} out'}") from None
        # Sizes are integers. Options that 0 might turn off are turned off with null instead.
        is_size = wanted.startswith("int") or wanted.endswith("None")
        is_positive = is_size and target.__module__.startswith("model.")
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, int | float) and (item < 0 or (item == 0 and is_positive)):
                minimum = "greater than 0" if is_positive else "at least 0"
                raise ValueError(
                    f"{key} must be {minimum} (got {shown(value)}). fix: leave {key} out"
                )


def type_in_words(annotation: Any) -> str:
    """Return the description of a type for messages, such as `an integer or null`."""
    if annotation in TYPE_NAMES:
        return TYPE_NAMES[annotation]
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(type_in_words(part) for part in get_args(annotation))
    if get_origin(annotation) is Literal:
        *values, last = [shown(value) for value in get_args(annotation)]
        return f"{', '.join(values)} or {last}" if values else last
    return inspect.formatannotation(annotation)


def fixed_value(key: str, value: Any, annotation: Any) -> str | None:
    """Return an override with the value that the user probably means; None if it is unknown."""
    wanted = inspect.formatannotation(annotation)
    nearest = aliases.nearest_value(key, value, annotation)
    if nearest is not None:
        return f"{key}={nearest}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if wanted.startswith("str") and is_number:
        return shlex.quote(f'{key}="{value}"')
    number = aliases.meant_number(key, value)
    if number is not None and not wanted.startswith("list"):
        return f"{key}={number}"
    if wanted == "list[str]" and isinstance(value, str):
        return shlex.quote(f"{key}=[{value}]")
    if wanted in LIST_EXAMPLES:
        return shlex.quote(f"{key}={LIST_EXAMPLES[wanted]}")
    return None


def parameters_of(target: Callable) -> list[inspect.Parameter]:
    """Return a target's parameters, with its base class's parameters in place of `**knobs`."""
    parameters = list(inspect.signature(target).parameters.values())
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        return parameters[:-1] + parameters_of(target.__base__)
    return parameters
