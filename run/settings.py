"""The configuration: its top-level keys as a typed class, and its composition from configs/."""

import os
import re
import shlex
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from run import ROOT, aliases
from run.errors import OverrideError, as_typed, shown, suggest
from run.paths import run_path

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

CONFIGS = ROOT / "configs"
CPU_MICRO_BATCH = 8  # maximum number of sequences; larger micro-batches are not faster on a CPU
GROUPS = ("model", "attention", "ffn", "norm", "data", "optimizer", "schedule")
CHOSEN = (*GROUPS, "experiment")  # keys whose value is the name of a preset
PARTS = {  # groups whose presets become part of the model's config
    "attention": "attention variant of the layers",
    "ffn": "feed-forward network of the layers",
    "norm": "norm before attention, feed-forward and the output head",
}

# Keys that mirror another key. The run sets them, and they cannot be overridden.
COPIES = {
    "model.vocab_size": "data.vocab_size",
    "model.context": "context",
    "model.attention": "attention",
    "model.ffn": "ffn",
    "model.norm": "norm",
    "data.context": "context",
}

# Typical numbers for keys that are null by default.
TYPICAL = {
    "steps": "1000",
    "tokens_per_parameter": "20",
    "micro_batch": "8",
    "eval_tokens": "100000",
    "profile": "5",
}

HYDRA_KEYS = {"hydra.run.dir": "run_dir", "hydra.job.name": "name"}

# Other programs' keys for a settings file.
CONFIG_KEYS = ("config", "config_file", "config_path", "config_name", "conf", "cfg", "yaml")
ONE_CONFIG = "runs are configured with overrides (model=tiny, experiment=NAME), not with a file"

# Values of nanoGPT's init_from, and the fix.
OTHER_STARTS = {"resume": "resume=true", "scratch": "leave init_from out"}

HELP = "python train.py --help, which lists all keys"
# Keys with text values that may look like numbers or contain commas, such as file names.
TEXT_KEYS = ("name", "run_dir", "init_from", "distill", "data.path", "data.tokenizer")

Text = Annotated[str, Field(min_length=1)]


class Settings(BaseModel):
    """The top-level keys of configs/train.yaml: their types, ranges and meanings.

    The groups are trees of `_target_` and arguments, which `instantiate` and the constructors
    check.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    model: dict
    """network sizes and components"""
    data: dict
    """text or task, and tokenizer"""
    optimizer: dict
    """optimizer and learning rates"""
    schedule: dict
    """learning-rate schedule"""

    name: str = Field(pattern=r"^\w[\w.-]*$")
    """run name"""
    run_dir: Text | None
    """run folder; null: runs/NAME, or runs/NAME-2 and so on if it is taken"""
    seed: NonNegativeInt
    """seed of the initialization, the data order and dropout"""
    device: Literal["auto", "cpu", "cuda", "mps"]
    """device to train on; auto: a GPU if available"""
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    """dtype of matrix products; weights stay in fp32. auto: bf16 where the device multiplies it natively, fp16 on older NVIDIA GPUs, else fp32"""
    compile: Literal["auto", True, False]
    """use torch.compile; auto: only in runs long enough to benefit"""

    steps: PositiveInt | None
    """number of optimizer steps; null: no limit"""
    tokens_per_parameter: PositiveFloat | None
    """training tokens per parameter, used if steps is null; null: no limit. 20 is compute-optimal (2203.15556)"""
    max_minutes: PositiveFloat | None
    """time limit in minutes from process start, including earlier processes of a resumed run; null: no limit"""
    max_epochs: PositiveInt | None
    """passes over the text, if neither steps nor tokens_per_parameter is given; null: no limit. Up to 4 passes are nearly as good as new text (2305.16264)"""
    context: int = Field(ge=2)
    """tokens per sequence"""
    batch_tokens: PositiveInt
    """tokens per optimizer step, over all devices"""
    micro_batch: PositiveInt | None
    """maximum number of sequences per forward pass on one device; null: as many as fit into memory on an NVIDIA GPU, up to 8 elsewhere, and always a divisor of the batch"""
    sharded: bool
    """shard weights, gradients and optimizer state over processes (FSDP)"""
    activation_checkpointing: bool
    """recompute activations in the backward pass, which saves memory but takes a third more time"""
    clip: PositiveFloat | None
    """clip the gradient norm to this value; null: no clipping"""
    z_loss: NonNegativeFloat
    """weight of the auxiliary loss log(Z)^2, where Z is the softmax denominator"""
    document_mask: bool
    """restrict attention to tokens of the same document"""

    eval_every: PositiveInt
    """steps between evaluations on held-out text"""
    eval_tokens: int | None = Field(ge=2)
    """held-out tokens per evaluation; null: a tenth of the training tokens since the last evaluation"""
    save_every: PositiveInt
    """steps between checkpoints"""
    sample_every: PositiveInt
    """steps between text samples"""
    log_every: PositiveInt
    """steps between logged metrics"""
    profile: PositiveInt | None
    """profile this number of steps after the first three; null: no profile"""
    resume: bool
    """continue from the newest checkpoint of run_dir"""
    init_from: Text | None
    """initialize weights from this run, checkpoint or imported model"""
    distill: Text | None
    """distillation teacher: a run, checkpoint or imported model with the same tokenizer"""
    distill_weight: float = Field(ge=0, le=1)
    """weight of the teacher's predictions in the loss; 0: text only, 1: teacher only"""
    wandb: Literal["disabled", "offline", "online"]
    """log metrics to Weights & Biases"""

    def check_combinations(self, world_size: int) -> None:
        """Raise ValueError for settings that conflict, given this number of processes."""
        if self.sharded and world_size == 1:
            raise ValueError(
                "sharding needs more than one process (sharded=true). "
                "fix: torchrun --nproc_per_node=N train.py, or sharded=false"
            )
        if self.distill is None and as_typed(self.distill_weight) != defaults()["distill_weight"]:
            raise ValueError(
                f"distill_weight needs a teacher (distill_weight={self.distill_weight}, "
                "distill=null). fix: leave distill_weight out, or set distill=runs/NAME"
            )
        # If the batch is smaller than one micro-batch per process, the micro-batch shrinks.
        sequence_tokens = self.context * world_size  # if every process has one sequence
        sequences = self.batch_tokens // sequence_tokens
        unit = sequence_tokens * min(self.micro_batch or 1, max(1, sequences))
        if self.batch_tokens % unit != 0:
            size = max(unit, self.batch_tokens // unit * unit)
            raise ValueError(
                f"batch_tokens must be a multiple of {unit}: whole sequences for every process "
                f"(got {self.batch_tokens} with context={self.context} "
                f"micro_batch={self.micro_batch} processes={world_size}). fix: batch_tokens={size}"
            )

    def sequences_per_process(self, world_size: int) -> int:
        """Return the number of sequences in each process's share of a batch."""
        return self.batch_tokens // self.context // world_size

    def micro_batch_size(self, world_size: int, most: int = CPU_MICRO_BATCH) -> int:
        """Return the number of sequences per forward pass.

        By default, it is the largest divisor of a process's share of a batch that is at most
        `most`.
        """
        sequences = self.sequences_per_process(world_size)
        if self.micro_batch is not None:
            return min(self.micro_batch, sequences)
        return max(size for size in range(1, most + 1) if sequences % size == 0)


def compose(overrides: list[str], typed: list[str] | None = None) -> Settings:
    """Compose the settings of `python train.py OVERRIDES`, also for notebooks and other commands.

    If `overrides` is one combination of a sweep, `typed` has the overrides as the user typed them,
    with the sweep, for error messages. Raises OverrideError for an unknown key or a value that
    cannot be parsed, and ValueError, with a line for each problem, for values that are not allowed.
    """
    import hydra
    from hydra.errors import HydraException

    # Hydra refuses a + in front of an existing key; train.py allows it.
    parsed = parse_overrides([as_text(word.lstrip("+")) for word in overrides])
    for override in parsed:
        check_key(override.key_or_group, override.input_line)
        check_choice(override)
    # For a sweep, compose its first value, so that wrong keys are reported before the sweep starts.
    words = [first_value(override) for override in parsed]
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        try:
            keys = compose_tree(words)
        except (HydraException, OmegaConfBaseException) as error:
            is_comparison = typed is not None
            typed = typed or [unquoted(override) for override in parsed]
            problem = composing_problem(error, words, typed, is_comparison=is_comparison)
            raise OverrideError(problem) from None
    for override in parsed:
        sweep = sweep_of(override)
        if sweep is not None:
            raise OverrideError(sweep_problem(override.input_line, sweep, overrides))
    for part in PARTS:
        del keys[part]
    # A run given by name is stored in the config as a path.
    for key in ("init_from", "distill"):
        value = keys[key]
        if isinstance(value, str) and run_path(value) != Path(value):
            keys[key] = str(run_path(value))
    try:
        return Settings(**keys)
    except ValidationError as error:
        lines = [describe(problem) for problem in error.errors()]
        raise ValueError("\n".join(lines)) from None


def compose_tree(words: list[str]) -> dict:
    """Return the keys of train.yaml and of the chosen presets. Hydra must be initialized."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    cfg = hydra.compose("train", words, return_hydra_config=True)
    # The name is composed of the groups' choices, which are in Hydra's section of the config.
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_struct(cfg, False)
    del cfg.hydra
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


def sweep_of(override: "Override") -> str | None:
    """Return an override with several values as Hydra's sweep KEY=A,B; None for a single value.

    A list counts as a sweep for the keys of train.yaml, none of which takes a list.
    """
    word = override.input_line
    key, _, value = word.partition("=")
    if override.is_sweep_override():
        return word
    items = override.value()
    if key in defaults() and isinstance(items, list) and len(items) > 1:
        return f"{key}={value.strip('[]')}"
    return None


def unquoted(override: "Override") -> str:
    """Return an override as the user typed it, before as_text() quoted its value."""
    plain = f"{override.input_line.partition('=')[0]}={override.value()}"
    return plain if as_text(plain) == override.input_line else override.input_line


def has_several_values(word: str) -> bool:
    """Return whether an override is a sweep, rather than a list, a dict or text with commas."""
    is_sweep = re.search(r"""=[^[{("']*,|=(range|choice|glob)\(""", word) is not None
    return is_sweep and key_of(word) not in TEXT_KEYS


def first_value(override: "Override") -> str:
    """Reduce an override with several values to the first one."""
    sweep = sweep_of(override)
    if sweep is None:
        return override.input_line
    key, _, values = sweep.partition("=")
    if override.is_sweep_override():
        if not override.is_discrete_sweep():  # such as interval(0,1)
            fix = re.sub(r"=.*\((.*)\)$", r"=\1", sweep)
            raise OverrideError(f"an interval cannot be swept ({sweep}). fix: {fix}")
        values = next(override.sweep_string_iterator())
    first = values.partition(",")[0]
    if key in CHOSEN:
        (first,) = nearest_choices(key, [first])
    return f"{key}={first}"


def sweep_problem(word: str, sweep: str, words: list[str]) -> str:
    """Return an error line for several values, meant as a comparison, a list or text."""
    key, _, value = sweep.partition("=")
    sweep = nearest_choice(sweep)
    if is_one_number(value):
        return f"numbers must not contain commas (got {word}). fix: {key}={value.replace(',', '')}"
    compared = [sweep if other.lstrip("+") == word else other for other in words]
    fix = f"python -m tools.compare {shlex.join(compared)}"
    if key not in defaults() and "(" not in value:  # as in range(3)
        as_list = shlex.quote(f"{key}=[{value}]")
        fix += f"; or, for a list, {as_list}; or, for a string, {shlex.quote(quoted(word))}"
    return f"a run cannot take several values ({word}). fix: {fix}"


def is_one_number(value: str) -> bool:
    """Return whether the commas in a value separate thousands, as in 10,000."""
    is_number = re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", value) is not None
    return is_number and ",0" in value  # 100,200 may be two numbers


def check_key(key: str, word: str) -> None:
    """Raise ValueError for an override of a key that the run sets itself, or of Hydra's own keys.

    Like `check_text`, also raises ValueError for values that only other programs accept.
    """
    value = word.removeprefix(key)
    for copy, original in COPIES.items():
        if key == copy or key.startswith(f"{copy}."):
            fix = shlex.quote(original + word.removeprefix(copy))
            if word.startswith("~"):
                fix = f"leave {word} out"
            raise ValueError(
                f"{copy} cannot be set: it is a copy of {original} ({word}). fix: {fix}"
            )
    if re.match("hydra[./]", key):
        fix = f"leave {key} out"
        if key in HYDRA_KEYS:
            fix = shlex.quote(HYDRA_KEYS[key] + value)
        elif re.match("hydra[./](launcher|sweep)", key):
            fix += "; several runs: python -m tools.compare attention=gqa,mha"
        raise ValueError(f"Hydra's own keys have no effect ({word}). fix: {fix}")
    if key in TEXT_KEYS:
        check_text(key, value.strip('="'))


def check_text(key: str, value: str) -> None:
    """Raise ValueError for a text value that only other programs accept."""
    if value.lower() == "none":
        fix = "leave name out" if key == "name" else f"{key}=null"
        raise ValueError(f"None must be written as null ({key}={value}). fix: {fix}")
    if key == "init_from" and value in OTHER_STARTS and not run_path(value).exists():
        raise ValueError(f"not a run ({key}={value}). fix: {OTHER_STARTS[value]}")


def check_choice(override: "Override") -> None:
    """Raise OverrideError for a choice that is a number, or a list with a single choice."""
    value = override.value()
    is_single = isinstance(value, list) and len(value) == 1
    if override.key_or_group in CHOSEN and (is_single or isinstance(value, int | float)):
        group, _, name = override.input_line.partition("=")
        raise OverrideError(unknown_choices(group, [name]))


def parse_overrides(words: list[str]) -> list["Override"]:
    """Parse KEY=VALUE, or ~GROUP.KEY, which deletes a key, into Hydra's Override objects.

    Raises ValueError for any other word, and OverrideError for a value that Hydra cannot parse.
    """
    import hydra  # takes a quarter of a second, so only commands that compose import it
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    bare = [word for word in words if not re.match(r"~\w+\.|[^-~][^=]*=", word)]
    if bare:
        got = " ".join(bare)
        fix = named_fix(bare, words) or HELP
        raise ValueError(
            f"overrides have the form KEY=VALUE, without dashes (got {got}). fix: {fix}"
        )
    GlobalHydra.instance().clear()  # a notebook may have initialized Hydra
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            # A value glob(...), which matches the files of configs/, needs the config loader.
            loader = GlobalHydra.instance().config_loader()
            return OverridesParser.create(loader).parse_overrides(
                [as_integer(word) for word in words]
            )
    except OverrideParseException as error:
        fix = shlex.quote(quoted(error.override))
        raise OverrideError(f"cannot parse the value ({error.override}). fix: {fix}") from None


def named_fix(bare: list[str], words: list[str]) -> str | None:
    """Return the overrides that the user means by `bare`, words without an equals sign.

    Such a word may be a key, which the fix gives its default value, or the name or YAML file of a
    choice. `words` are all arguments of the command. Returns None if a word is neither.
    """
    fixes = []
    values = {}  # named choices by group
    for word in bare:
        key, _, value = word.lstrip("+-~").partition("=")
        value = value or defaults().get(key)
        choice = named_choice(word)
        if choice is not None:
            group, _, name = choice.partition("=")
            values.setdefault(group, []).append(name)
        elif key and value is not None:
            fixes.append(f"{key}={value}, or another value")
        else:
            return None

    # The shell splits a list after a comma and a space: attention=gqa, mha.
    others = [word for word in words if word not in bare]
    for group, names in values.items():
        for word in others:
            if word.startswith(f"{group}="):
                names[:0] = filter(None, word.partition("=")[2].strip("[]").split(","))
        fixes.append(f"{group}={','.join(names)}")
    if any(len(names) > 1 for names in values.values()):
        kept = [word for word in others if word.partition("=")[0] not in values]
        return f"python -m tools.compare {shlex.join([*kept, *fixes])}"
    return " ".join(fixes)


def named_choice(word: str) -> str | None:
    """Return the choice for a name or a yaml path: model=15m for 15m and for model/15m.yaml."""
    path = Path(re.sub(r"\.ya?ml$", "", word))
    folder = path.parent.name
    is_other_file = os.path.isfile(word) and not folder
    # If an experiment and another group share a name, choose the experiment.
    for choice in sorted(choices(), key=lambda choice: not choice.startswith("experiment")):
        group, _, name = choice.partition("=")
        if path.name == name and folder in ("", group) and not is_other_file:
            return choice
    return None


def as_integer(override: str) -> str:
    """Write a whole number such as 1e3 or 1000.0 without an exponent or a decimal point.

    An integer key accepts only this form; a float key accepts both.
    """
    key, _, value = override.partition("=")
    if re.fullmatch(r"\d+(\.\d*)?(e\+?\d+)?", value, re.IGNORECASE) and not value.isdigit():
        number = float(value)
        if number.is_integer() and 0 < number < 2**53:
            return f"{key}={number:.0f}"
    return override


def as_text(override: str) -> str:
    """Quote an override's value if its key is in TEXT_KEYS; keep null, lists and quoted values."""
    key, _, value = override.partition("=")
    if key not in TEXT_KEYS or re.match("""null$|$|["'[]""", value):
        return override
    return quoted(override)


def quoted(override: str) -> str:
    """Quote the value of an override, so that Hydra reads it as literal text."""
    key, _, value = override.partition("=")
    # Hydra reads two backslashes in front of a quote as one.
    value = re.sub(r'(\\*)("|$)', r"\1\1\2", value).replace('"', r"\"")
    return f'{key}="{value}"'


def composing_problem(
    error: Exception, words: list[str], typed: list[str], *, is_comparison: bool
) -> str:
    """Return an error line, with a fix, for a Hydra error about the overrides `words`.

    The line names the overrides as spelled in `typed`, as arguments of a comparison or of train.py.
    """
    from hydra.errors import HydraException, MissingConfigException

    if isinstance(error, MissingConfigException):
        group, _, choice = error.missing_cfg_file.partition("/")
        return unknown_choices(group, [choice])
    # Hydra reports only the first unknown key; find all of them, unless the choices of the
    # groups themselves cannot be composed, such as data=${x}.
    choosing = [word for word in words if word.partition("=")[0] in CHOSEN]
    with suppress(HydraException, OmegaConfBaseException):
        own = dict(flatten(compose_tree(choosing)))
        wrong = [word for word in typed if not is_known(word, own, typed)]
        if wrong:
            return unknown_keys(wrong, own, typed, is_comparison=is_comparison)
    first_line = str(error).splitlines()[0]
    return f"{first_line.rstrip('.')}. fix: {HELP}"


def is_known(word: str, own: Collection[str], words: list[str]) -> bool:
    """Return whether a config with the keys `own` and overrides `words` has the key of `word`."""
    key = key_of(word)
    if key in CHOSEN or any(known == key or known.startswith(f"{key}.") for known in own):
        return True
    # The key may be inside a dict that another override sets.
    parent = key.rpartition(".")[0]
    return any(other.startswith(f"{parent}={{") for other in words)


def key_of(word: str) -> str:
    """Return the key of an override: key=value, +key=value or ~key."""
    return word.lstrip("+~").partition("=")[0]


def describe(problem: dict) -> str:
    """Return an error line for a problem found by pydantic: key, rule, value and a fix."""
    key = str(problem["loc"][0])
    value = problem["input"]
    rule = re.sub("^(Input|String) should", "must", problem["msg"])
    rule = re.sub("True|False", lambda word: word[0].lower(), rule)
    annotation = Settings.model_fields[key].annotation
    fix = aliases.nearest_value(key, value, annotation) or aliases.meant_number(key, value)
    if fix is None and isinstance(value, list):  # a list with a single value
        fix = ",".join(as_typed(item) for item in value)
    fix = fix or TYPICAL.get(key) or defaults()[key]
    more = "or see --help"
    if key == "device" and re.fullmatch(r"cuda:\d+", str(value)):
        more = f"and CUDA_VISIBLE_DEVICES={value[5:]} in front of python"
    return f"{key} {rule} (got {shown(value)}). fix: {key}={fix}, {more}"


def check_choices(group: str, names: list[str]) -> None:
    """Raise OverrideError for names that are not choices of a group."""
    known = choices(group)
    if not all(f"{group}={name}" in known for name in names):
        raise OverrideError(unknown_choices(group, names))


def nearest_choices(group: str, names: list[str]) -> list[str]:
    """Return the choice closest to each name, without duplicates; names close to none are kept."""
    known = choices(group)
    nearest = []
    for name in names:
        word = f"{group}={aliases.our_value(group, name.strip('[] '))}"
        if word not in known:
            word = suggest(word, known) or f"{group}={name}"
        nearest.append(word.partition("=")[2])
    return list(dict.fromkeys(nearest))


def nearest_choice(word: str) -> str:
    """Return an override with the closest choices; unchanged if its key is not a group."""
    key, _, value = word.partition("=")
    if key not in CHOSEN:
        return word
    return f"{key}={','.join(nearest_choices(key, value.split(',')))}"


def unknown_choices(group: str, names: list[str]) -> str:
    """Return an error line for names that are not choices of a group, with the closest choices."""
    known = choices(group)
    wrong = [f"{group}={name}" for name in names if f"{group}={name}" not in known]
    nearest = nearest_choices(group, names)
    right = [name for name in nearest if f"{group}={name}" in known]
    fix = f"{group}={','.join(right)}"
    if not right:
        fix = " or ".join(known)
    elif len(right) < len(nearest):
        fix += f"; the choices are {', '.join(known)}"
    return f"unknown ({', '.join(wrong)}). fix: {fix}"


def unknown_keys(wrong: list[str], own: dict, words: list[str], *, is_comparison: bool) -> str:
    """Return an error line, with a fix, for the overrides in `words` with unknown keys (`wrong`).

    `own` maps the keys of the chosen presets to their values.
    """
    # Our values, which are needed to convert the values of other programs.
    given = {key: as_typed(value) for key, value in own.items()}
    typed = [key_of(word) for word in words]
    for word in words:
        given[key_of(word)] = word.partition("=")[2]

    foreign = {}
    fixes = []
    remarks = []
    for word in wrong:
        key, _, value = word.lstrip("+~").partition("=")
        group = key.partition(".")[0]
        if key in CONFIG_KEYS:
            fixes.append(named_choice(value) or HELP)
            remarks.append(ONE_CONFIG)
        elif aliases.is_foreign(key):
            foreign[key] = value
        elif "." in key and f"{group}={value}" in choices(group):  # attention.type=mla
            fixes.append(f"{group}={value}")
        elif nearest := nearest_key(key, own):
            fixes.append(f"{nearest}={shlex.quote(value or 'VALUE')}")
            # In other programs, such a key (trainer.max_epochs) alone sets the length of a run.
            if "." in key and nearest in aliases.LENGTHS and "max_minutes" not in typed:
                fixes.append("max_minutes=null")
        else:
            remarks.append(HELP if len(wrong) == 1 else f"{key}: {HELP}")
    translated, more = aliases.translate(foreign, given, typed)
    for key, value in translated.items():
        fixes.append(known_override(key, value, own, translated))

    new = [fix for fix in dict.fromkeys(fixes) if fix not in words]
    right = [nearest_choice(word) for word in words if word not in wrong]
    if not is_comparison and any(has_several_values(word) for word in [*right, *new]):
        new = ["python -m tools.compare", *map(shlex.quote, right), *new]
    told = [" ".join(new), *dict.fromkeys(remarks + more)]
    names = ", ".join(key_of(word) for word in wrong)
    return f"unknown ({names}). fix: {'; '.join(filter(None, told))}"


def nearest_key(key: str, own: dict) -> str | None:
    """Return the known key closest to a mistyped one; None if no key is close.

    It may be a group, a key of the chosen presets, or a key of another preset preceded by its
    choice, such as data=text data.path.
    """
    # model.head yields model.heads, although optimizer.reference.head exists.
    parent = key.rpartition(".")[0]
    siblings = [known for known in own if known.rpartition(".")[0] == parent]

    # Among keys with the same last part, prefer the shortest, such as batch_tokens. Among the kinds
    # of layers, prefer a key with a value: attention.kinds.local.window.
    def rank(known: str) -> tuple[bool, int]:
        return ".kinds." in known and own[known] is None, len(known)

    others = [*GROUPS, *sorted(own, key=rank), *preset_keys()]
    return suggest(key, siblings) or suggest(key, others)


def known_override(key: str, value: str, own: Collection[str], others: Collection[str]) -> str:
    """Return an override that replaces a foreign one and is valid with the chosen presets.

    `others` has the keys of all such replacements, which may choose a different preset.
    """
    if key in GROUPS:
        nearest = nearest_choice(f"{key}={value}")
        names = nearest.partition("=")[2].split(",")
        if not all(f"{key}={name}" in choices(key) for name in names):
            return " or ".join(choices(key))
        return nearest
    if key not in (*own, *GROUPS) and key.partition(".")[0] not in others:
        key = nearest_key(key, own) or key
    return f"{key}={shlex.quote(value)}"


def choices(group: str = "*") -> list[str]:
    """Return the choices of a group, or of all groups, as the user types them: attention=gqa."""
    files = CONFIGS.glob(f"{group}/*.yaml")
    return sorted(f"{file.parent.name}={file.stem}" for file in files)


def preset_keys() -> list[str]:
    """Return the keys of all presets, each preceded by its choice, as in data=text data.path.

    The keys are sorted by length, so that the simplest preset with a key comes first.
    """
    keys = []
    for group in GROUPS:
        for choice in choices(group):
            file = CONFIGS / f"{choice.replace('=', '/')}.yaml"
            tree = yaml.safe_load(file.read_text(encoding="utf-8"))
            for key, _ in flatten(tree, f"{choice} {group}."):
                keys.append(key)
    return sorted(keys, key=len)


def flatten(tree: dict, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (key, value) for each leaf of nested dicts; keys are joined by dots."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


@cache
def defaults() -> dict[str, str]:
    """Return the keys and groups of configs/train.yaml, with values as the user types them."""
    tree = yaml.safe_load((CONFIGS / "train.yaml").read_text(encoding="utf-8"))
    for choice in tree.pop("defaults"):
        if choice != "_self_":
            tree |= choice
    tree["name"] = "NAME"  # composed from the choices of the groups
    return {key: as_typed(value) for key, value in tree.items()}
