"""From config to objects: a tree of `_target_` and keyword arguments, as in a yaml and in a checkpoint.

A checkpoint may come from anyone, so a target is only ever a class or function written in a file of the named package.
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
    """Calls every `_target_` of the tree, innermost first; with `_partial_: true` its caller adds the rest.

    Raises ValueError for a target outside `package` and for a knob of another kind, TypeError for one that is not its.
    """
    if isinstance(tree, list):
        return [instantiate(branch, package) for branch in tree]
    if not isinstance(tree, dict):
        return tree
    if "_target_" not in tree:
        return {key: instantiate(branch, package) for key, branch in tree.items()}
    target, later = resolve_target(tree["_target_"], package), tree.get("_partial_", False)
    knobs = {
        key: instantiate(branch, package)
        for key, branch in tree.items()
        if key not in ("_target_", "_partial_")
    }
    check_arguments(target, knobs)
    return partial(target, **knobs) if later else target(**knobs)


def resolve_target(path: str, package: str) -> Callable:
    module, _, name = str(path).rpartition(".")
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in (ROOT / package).rglob("*.py")
    }
    found = vars(import_module(module)).get(name) if module in files else None
    if not (inspect.isclass(found) or inspect.isfunction(found)) or found.__module__ != module:
        raise ValueError(
            f"_target_ must be a class or function written in {package}/ (got {path!r}). fix: one of them"
        )
    return found


def check_arguments(target: Callable, given: dict) -> None:
    """A knob is of the kind that its annotation says. Which knobs there are, the call itself checks."""
    for p in parameters_of(target):
        if p.name in given and not matches_annotation(given[p.name], p.annotation):
            kind = inspect.formatannotation(p.annotation).partition("[")[0]
            raise ValueError(
                f"{target.__name__}: {p.name} must be {kind} (got {given[p.name]!r}). fix: change it"
            )


def matches_annotation(value: object, kind: object) -> bool:
    """Whether a knob annotated so may have this value; a whole number is a number too, a flag is not."""
    if isinstance(kind, UnionType):
        return any(matches_annotation(value, each) for each in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(
            matches_annotation(each, *get_args(kind)) for each in value
        )
    kind = get_origin(kind) or kind
    if kind in (bool, int, float, str):
        return type(value) in ((int, float) if kind is float else (kind,))
    return isinstance(value, kind)


def parameters_of(target: Callable) -> list[inspect.Parameter]:
    """Those of the base class too, where a class hands `**knobs` on to it."""
    named = list(inspect.signature(target).parameters.values())
    if named and named[-1].kind is inspect.Parameter.VAR_KEYWORD:
        return named[:-1] + parameters_of(target.__base__)
    return named
