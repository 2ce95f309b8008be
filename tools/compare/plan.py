"""Which runs a comparison needs."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import product
from pathlib import Path

import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from common import config, errors, hardware
from common.config import compose
from common.instantiate import ROOT, instantiate
from model.transformer import Transformer
from tools.compare.jobs import Job, train_all
from tools.compare.runs import Run
from training.setup import validate

SIZE_TOLERANCE = 0.005  # how near a matched variant comes to the baseline's size
SIZES: dict[str, Callable[[Transformer], float]] = {
    "params": lambda model: sum(p.numel() for p in model.parameters()),
    "flops": Transformer.training_flops,
    "none": lambda model: 1.0,
}


def plan_jobs(words: list[str], match: str, where: Path | None) -> Iterator[Job]:
    """A job for each combination, seed by seed, in `where` or a folder for all comparisons with this baseline.

    Raises ValueError for what cannot be compared.
    """
    choices = expand_sweep(words)
    if own := {"run_dir", "resume"} & choices.keys():
        raise ValueError(
            f"a comparison decides on {min(own)} itself. fix: --dir for its folder, no {min(own)}"
        )
    if match != "none" and len(choices.get("model.hidden", [])) > 1:
        raise ValueError(
            f"model.hidden is what makes sizes equal (--match {match}). fix: --match none"
        )
    seeds = choices.pop("seed", ["seed=0"])
    keys = [key for key, values in choices.items() if len(values) > 1 or key == "name"] or [
        "attention"
    ]
    variants = {}
    for combination in product(*choices.values()):
        named = [word.split("=", 1) for word in combination if word.split("=", 1)[0] in keys]
        whole = (*config.GROUPS, "name")
        called = (
            each if key in whole else f"{key.rpartition('.')[2]}-{each}" for key, each in named
        )
        name = (
            re.sub(r"[^\w.-]+", "-", "-".join(called).replace("e+", "e"), flags=re.ASCII).strip(
                "-."
            )
            or "run"
        )
        if name in variants:
            raise ValueError(f"two variants of one name ({name}). fix: different values")
        variants[name] = [word for word in combination if not word.startswith("name=")]
    settings = {name: settings_of([*each, f"name={name}"]) for name, each in variants.items()}
    target = SIZES[match](meta_model(next(iter(settings.values()))))
    for name, tree in settings.items():
        hidden = match_hidden(tree, SIZES[match], target)
        if hidden != tree["model"]["hidden"]:
            print(
                f"{name}: model.hidden={hidden}, not {tree['model']['hidden']}, for equal {match}",
                file=sys.stderr,
            )
            variants[name].append(f"model.hidden={hidden}")
    where = where or Path("runs", f"compare-{digest([match, *next(iter(variants.values()))])}")
    for seed, name in product(seeds, variants):
        run = where / f"{name}-{seed.partition('=')[2]}"
        plain = re.fullmatch(r"[\w./+-]+", str(run), re.ASCII)
        place = run if plain else "'" + str(run).replace("'", "\\'") + "'"
        words = [*variants[name], seed, f"name={name}", f"run_dir={place}", "resume=true"]
        yield Job(run, words, settings_of(words))


def digest(words: list[str]) -> str:
    return sha256(" ".join(words).encode()).hexdigest()[:8]


def expand_sweep(words: list[str]) -> dict[str, list[str]]:
    """Each key with the words that its sweep stands for. Raises ValueError for a sweep without an end."""
    choices = {}
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        for word in OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(
            words
        ):
            key = word.get_key_element()
            if word.is_sweep_override() and not word.is_discrete_sweep():
                raise ValueError(f"an interval has no values ({word.input_line}). fix: {key}=A,B,C")
            values = (
                [f"{key}={value}" for value in word.sweep_string_iterator()]
                if word.is_sweep_override()
                else []
            )
            choices[key] = [*dict.fromkeys(values)] or [word.input_line]
    return choices


def settings_of(words: list[str]) -> dict:
    return validate(compose(words), lambda settings: hardware.pick_device(settings["device"]))[0]


def meta_model(settings: dict, **sizes: int) -> Transformer:
    with torch.device("meta"):
        return instantiate(settings["model"] | sizes)


def match_hidden(settings: dict, size: Callable[[Transformer], float], target: float) -> int:
    """The width of the feed-forward that gives the model this size; its own where that is near enough.

    Raises ValueError where there is none.
    """
    own = settings["model"]["hidden"]
    if abs(size(meta_model(settings)) / target - 1) <= SIZE_TOLERANCE:
        return own
    low, high = (size(meta_model(settings, hidden=hidden)) for hidden in (64, 128))
    exact = 64 + 64 * (target - low) / (high - low)
    for unit in (64, 32, 16, 8, 4, 2, 1):  # products like round sizes
        hidden = round(exact / unit) * unit
        if (
            hidden > 0
            and abs(size(meta_model(settings, hidden=hidden)) / target - 1) <= SIZE_TOLERANCE
        ):
            return hidden
    raise ValueError(
        f"{settings['name']} cannot have the baseline's size (model.hidden={exact:.0f}). fix: --match none"
    )


def match_baseline_tokens(jobs: list[Job]) -> list[Job]:
    """Changes all others to see as many tokens as the first, the baseline, finds time for in max_minutes."""
    train_all(jobs[:1], later=len(jobs) - 1)
    if jobs[0].problem is not None:
        why = jobs[0].problem.partition(". fix: ")[0]
        errors.exit_with(
            errors.INPUT, f"the baseline did not come to its end ({why}). fix: see {jobs[0].log}"
        )
    first = Run.read(jobs[0].run)
    for job in jobs[1:]:
        same = {"max_minutes": None, "compile": first.settings["machine"]["compiled"]}
        same["steps"] = first.last["tokens"] // job.settings["batch_tokens"]
        job.settings |= same
        job.words += [f"{key}={json.dumps(value)}" for key, value in same.items()]
    return jobs
