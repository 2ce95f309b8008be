"""Plans the runs of a comparison: a sweep becomes variants of equal size, and those become jobs.

Each task is planned by itself: it has overrides, a baseline and jobs of its own.
"""

import json
import re
import sys
from collections.abc import Callable
from hashlib import sha256
from itertools import product
from pathlib import Path

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from model.build import build_model
from model.transformer import Transformer
from run import config
from run.config import compose
from tools.compare.jobs import Job
from tools.compare.runs import Run
from training.setup import set_up_run

TASKS = ("text", "recall", "copy")  # what `tasks` may list
SIZE_KEYS = ("model", "model.dim")  # a sweep over these compares at several sizes
SIZE_TOLERANCE = 0.005  # relative difference to the baseline at which sizes count as equal
# The sizes of a model that --match makes equal.
SIZES = {"params": Transformer.num_parameters, "flops": Transformer.training_flops}
Sweep = dict[str, list[str]]  # the overrides (KEY=VALUE) that each key takes in turn
Variants = dict[str, list[str]]  # the overrides of each variant, by its name; the baseline first


def plan_jobs(overrides: list[str], match: str, folder: Path | None) -> dict[str, list[Job]]:
    """Plans the jobs of each task: one for each combination of its sweep, seed by seed.

    Runs go to `folder`, or to one that all comparisons with the same baseline share.
    Raises ValueError for what cannot be compared.
    """
    jobs = {}
    for task, sweep in split_tasks(expand_sweep(overrides)).items():
        check_sweep(sweep, match)
        # Seeds are repetitions of a variant, and all other keys make variants.
        seeds = sweep.pop("seed", ["seed=0"])
        variants = name_variants(sweep)
        if folder is None:
            baseline = next(iter(variants.values()))
            folder = Path("runs", f"compare-{digest([match, *baseline])}")
        # Settings are composed once for all seeds of a variant.
        templates = [make_template(task, *variant, folder) for variant in variants.items()]
        if match != "none":
            match_sizes(templates, match)
        runs = product(seeds, templates)
        jobs[task] = [make_job(template, seed.partition("=")[2]) for seed, template in runs]
    return jobs


def expand_sweep(overrides: list[str]) -> Sweep:
    """Expands Hydra's sweeps (A,B or range or glob).

    Raises ValueError for one without an end, and for one of sizes or tasks with a single value.
    """
    sweep = {}
    with initialize_config_dir(str(config.CONFIGS), version_base="1.3"):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        for override in parser.parse_overrides(overrides):
            key = override.get_key_element()
            line = override.input_line
            values = []
            if override.is_discrete_sweep():
                values = list(dict.fromkeys(override.sweep_string_iterator()))
            elif override.is_sweep_override():
                raise ValueError(f"an interval has no values ({line}). fix: {key}=A,B,C")
            if key in (*SIZE_KEYS, "tasks") and len(values) == 1:
                raise ValueError(f"a sweep of one value ({line}). fix: {key}={values[0]}")
            # A sweep that matches nothing stays as it is, for Hydra to refuse.
            sweep[key] = [f"{key}={value}" for value in values] or [line]
    return sweep


def split_tasks(sweep: Sweep) -> dict[str, Sweep]:
    """Returns the sweep of each task that tasks=A,B lists; without it, text is the only one.

    TASK.KEY=VALUE is for this task alone, where it replaces KEY=VALUE; data and its keys are for
    text. Raises ValueError for a task that is unknown or not listed.
    """
    tasks = {}
    for override in sweep.pop("tasks", ["tasks=text"]):
        task = override.removeprefix("tasks=")
        if task not in TASKS:
            raise ValueError(f"unknown task ({override}). fix: tasks={','.join(TASKS)}")
        tasks[task] = {} if task == "text" else {"data": [f"data={task}"]}

    for key, values in sweep.items():
        prefix, _, own_key = key.lstrip("+~").partition(".")
        owners = tasks
        if prefix in TASKS:
            owners = [prefix]
        elif prefix == "data":
            owners = ["text"]
            if set(values) & {"data=recall", "data=copy"}:
                raise ValueError(
                    f"a task is not text ({values[0]}). fix: tasks=text,recall in place of it"
                )
        for task in owners:
            if task not in tasks:
                fix = f"tasks={','.join([*tasks, task])}"
                raise ValueError(f"{task} is not among the tasks ({values[0]}). fix: {fix}")
            if prefix in TASKS:
                tasks[task][own_key] = [text.replace(f"{task}.", "", 1) for text in values]
            else:
                tasks[task].setdefault(key, values)
    return tasks


def check_sweep(sweep: Sweep, match: str) -> None:
    """Raises ValueError for keys that the comparison itself sets."""
    for key in ("resume", "run_dir"):
        if key in sweep:
            raise ValueError(f"a comparison sets {key} itself. fix: --dir for its folder, no {key}")
    if match != "none" and len(sweep.get("model.hidden", [])) > 1:
        raise ValueError(
            f"model.hidden is what makes sizes equal (--match {match}). fix: --match none"
        )


def name_variants(sweep: Sweep) -> Variants:
    """Names each combination by the values of the keys that are swept, such as mla-lr-0.01.

    Raises ValueError where two combinations have one name.
    """
    # Without a sweep, the attention names the only variant.
    named_keys = [key for key, values in sweep.items() if len(values) > 1 or key == "name"]
    named_keys = named_keys or ["attention"]
    variants = {}
    for combination in product(*sweep.values()):
        # Groups are named by their value, and other keys also by the last part of the key.
        parts = []
        for override in combination:
            key, _, value = override.partition("=")
            if key in named_keys:
                prefix = "" if key in (*config.GROUPS, "name") else key.rpartition(".")[2]
                parts += [prefix, value]

        # A name is a folder too: letters, digits, dots and dashes.
        name = "-".join(filter(None, parts)).replace("e+", "e")
        name = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.") or "run"
        if name in variants:
            raise ValueError(f"two variants of one name ({name}). fix: leave one out")
        variants[name] = [text for text in combination if not text.startswith("name=")]
    return variants


def make_template(task: str, name: str, overrides: list[str], folder: Path) -> Job:
    """Plans the runs of a variant but for their seeds."""
    prefix = "" if task == "text" else f"{task}-"
    # All runs are judged by the same text, or the same rows of a task: all that is held out.
    overrides = [f"eval_tokens={config.LARGEST}", *overrides, f"name={name}"]
    return Job(folder / f"{prefix}{name}", overrides, compose_settings(overrides))


def match_sizes(variants: list[Job], match: str) -> None:
    """Gives each variant the model.hidden with which it is as large as the baseline.

    Of several model sizes, each has its first variant as the baseline.
    """
    size = SIZES[match]
    targets = {}  # by the overrides that set the model size
    for variant in variants:
        keys = tuple(text for text in variant.overrides if text.partition("=")[0] in SIZE_KEYS)
        target = targets.setdefault(keys, size(meta_model(variant.settings)))
        own = variant.settings["model"]["hidden"]
        hidden = match_hidden(variant.settings, size, target)
        if hidden != own:
            name = variant.settings["name"]
            print(f"{name}: model.hidden={hidden}, not {own}, for equal {match}", file=sys.stderr)
            variant.overrides.append(f"model.hidden={hidden}")
            variant.settings["model"]["hidden"] = hidden


def match_hidden(settings: dict, size: Callable[[Transformer], float], target: float) -> int:
    """Finds the feed-forward width that gives the model this size; its own if that is near enough.

    Raises ValueError where there is none.
    """
    # Size is linear in the width. Of the widths near enough, the multiple of the largest power of
    # two makes the fastest matrix products.
    low = size(meta_model(settings, hidden=64))
    high = size(meta_model(settings, hidden=128))
    exact = 64 + 64 * (target - low) / (high - low)
    multiples = [round(exact / unit) * unit for unit in (64, 32, 16, 8, 4, 2, 1)]
    for hidden in (settings["model"]["hidden"], *multiples):
        if hidden > 0:
            relative = size(meta_model(settings, hidden=hidden)) / target
            if abs(relative - 1) <= SIZE_TOLERANCE:
                return hidden
    raise ValueError(
        f"{settings['name']} cannot have the baseline's size (model.hidden={exact:.0f}). "
        "fix: --match none"
    )


def make_job(template: Job, seed: str) -> Job:
    """Plans the run of a variant with this seed."""
    run_dir = template.run_dir.with_name(f"{template.run_dir.name}-{seed}")
    job = Job(run_dir, [*template.overrides], {**template.settings})
    override(job, {"seed": int(seed), "run_dir": str(run_dir), "resume": True})
    return job


def match_baseline(baseline: Job, others: list[Job], same_tokens: bool) -> None:
    """Makes all others compile if the trained baseline did.

    With `same_tokens`, they train on as many tokens as it did in max_minutes, too.
    """
    run = Run.read(baseline.run_dir)
    for job in others:
        override(job, {"compile": run.settings["machine"]["compiled"]})
        if same_tokens:
            steps = run.last["tokens"] // job.settings["batch_tokens"]
            override(job, {"max_minutes": None, "steps": steps})


def override(job: Job, values: dict) -> None:
    """Changes settings of a job by their keys."""
    job.settings |= values
    job.overrides += [
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()
    ]


def compose_settings(overrides: list[str]) -> dict:
    """Composes the settings of a run. Ends with exit code 2 for what cannot be trained here."""
    return set_up_run(compose(overrides), overrides).settings


def meta_model(settings: dict, **sizes: int) -> Transformer:
    """Builds the model without memory for its parameters, with these of its arguments changed."""
    return build_model(settings["model"] | sizes)


def digest(arguments: list[str]) -> str:
    """A short name for a list of arguments."""
    return sha256(" ".join(arguments).encode()).hexdigest()[:8]
