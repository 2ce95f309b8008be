"""Build objects from a tree of `_target_` and keyword arguments, as in yamls and checkpoints.

A checkpoint may come from anyone. So a target must be a class or function that is defined in a file
of the given package, and an argument must have the type of its annotation.
"""

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin

ROOT = Path(__file__).parents[1]


def instantiate(tree, package: str = "model"):
    """Call every `_target_` of the tree, innermost first.

    With `_partial_: true` it is not called, but becomes a functools.partial that waits for more
    arguments. Raises ValueError for a target outside of `package` and for an argument of a wrong
    type, TypeError for an unknown or missing argument.
    """
    if isinstance(tree, list):
        return [instantiate(branch, package) for branch in tree]
    if not isinstance(tree, dict):
        return tree

    # Build the arguments before their caller.
    arguments = {}
    for key, branch in tree.items():
        if key not in ("_target_", "_partial_"):
            arguments[key] = instantiate(branch, package)
    if "_target_" not in tree:
        return arguments

    target = resolve_target(tree["_target_"], package)
    check_arguments(target, arguments)
    if tree.get("_partial_", False):
        return partial(target, **arguments)
    return target(**arguments)


def resolve_target(path: str, package: str) -> Callable:
    """Import the class or function at `package.module.name`.

    Raises ValueError for one that is not defined in this very module: `package.module.torch.load`
    begins with the package too.
    """
    # Only modules that are files of the package are imported.
    module, _, name = str(path).rpartition(".")
    files = (ROOT / package).rglob("*.py")
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    if module in modules:
        target = vars(import_module(module)).get(name)
        is_callable = inspect.isclass(target) or inspect.isfunction(target)
        if is_callable and target.__module__ == module:
            return target
    raise ValueError(
        f"_target_ must be a class or function written in {package}/ (got {path!r}). "
        "fix: one of them"
    )


def check_arguments(target: Callable, arguments: dict) -> None:
    """Raise ValueError for an argument of another type than its annotation.

    Otherwise the text "no" would pass for true. The call itself refuses names that are unknown.
    """
    for parameter in parameters_of(target):
        name = parameter.name
        if name not in arguments or matches_annotation(arguments[name], parameter.annotation):
            continue
        wanted = inspect.formatannotation(parameter.annotation).partition("[")[0]
        problem = f"{target.__name__}: {name} must be {wanted} (got {arguments[name]!r})"
        raise ValueError(f"{problem}. fix: change it")


def matches_annotation(value: object, annotation: object) -> bool:
    """Whether a value is of the annotated type."""
    if isinstance(annotation, UnionType):
        return any(matches_annotation(value, option) for option in get_args(annotation))
    origin = get_origin(annotation) or annotation
    if origin is list and isinstance(value, list):
        return all(matches_annotation(item, *get_args(annotation)) for item in value)
    if isinstance(value, bool):  # which Python takes for an int
        return origin is bool
    if origin is float:
        return isinstance(value, int | float)
    return isinstance(value, origin)


def parameters_of(target: Callable) -> list[inspect.Parameter]:
    """The parameters of a target, and those of its base class if it passes `**knobs` on to it."""
    parameters = list(inspect.signature(target).parameters.values())
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        return parameters[:-1] + parameters_of(target.__base__)
    return parameters
