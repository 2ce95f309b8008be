"""The configuration: its top keys as a typed class, and its composition from configs/."""

import re
import shlex
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

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
from run.cli import run_path
from run.errors import OverrideError, as_typed, shown, suggest

CONFIGS = ROOT / "configs"
CPU_MICRO_BATCH = 8  # sequences, at most; larger micro-batches are not faster on a CPU
GROUPS = ("model", "attention", "ffn", "norm", "data", "optimizer", "schedule")
CHOSEN = (*GROUPS, "experiment")  # keys whose value is the name of a preset
PARTS = {  # groups that become part of the model's config
    "attention": "what mixes tokens, in each layer",
    "ffn": "the feed-forward network of each layer",
    "norm": "in front of attention and feed-forward, and at the end",
}

# Keys that are copies of another key: the run sets them, overrides do not.
COPIES = {
    "model.vocab_size": "data.vocab_size",
    "model.context": "context",
    "model.attention": "attention",
    "model.ffn": "ffn",
    "model.norm": "norm",
    "data.context": "context",
}

HYDRA_KEYS = {"hydra.run.dir": "run_dir", "hydra.job.name": "name"}

# What nanoGPT begins with, as `as_text` quotes it.
OTHER_STARTS = {"resume": "resume=true", "scratch": "leave init_from out"}  # of nanoGPT

HELP = "python train.py --help, which lists all"
# Keys whose value is a text that may look like a number or have commas, such as a file's name.
TEXT_KEYS = ("name", "run_dir", "init_from", "distill", "data.path", "data.tokenizer")

Text = Annotated[str, Field(min_length=1)]


class Settings(BaseModel):
    """The keys at the top of configs/train.yaml: their types, ranges and meanings.

    The groups are trees of `_target_` and arguments, which `instantiate` and the constructors
    check.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    model: dict
    """the network: its sizes, attention, ffn and norm"""
    data: dict
    """the text, its tokenizer and its split"""
    optimizer: dict
    """the optimizer and its learning rates"""
    schedule: dict
    """the learning rate over the steps"""

    name: str = Field(pattern=r"^\w[\w.-]*$")
    """of the run"""
    run_dir: Text | None
    """folder of the run; null: runs/NAME, or the next free runs/NAME-2"""
    seed: NonNegativeInt
    """of the weights, the order of the data and the dropout"""
    device: Literal["auto", "cpu", "cuda", "mps"]
    """auto: a GPU if there is one"""
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    """of matrix products; weights are in fp32"""
    compile: Literal["auto", True, False]
    """torch.compile; auto: in runs that are long enough"""

    steps: PositiveInt | None
    """optimizer steps; null: no bound"""
    tokens_per_parameter: PositiveFloat | None
    """training tokens for each parameter, where steps is null; null: no bound. 20: 2203.15556"""
    max_minutes: PositiveFloat | None
    """from the start of the process; null: no bound"""
    max_epochs: PositiveInt | None
    """passes over the text; ignored with steps or tokens_per_parameter; null: no bound. 4: 2305.16264"""
    context: int = Field(ge=2)
    """tokens in a sequence"""
    batch_tokens: PositiveInt
    """tokens in an optimizer step, over all devices"""
    micro_batch: PositiveInt | None
    """sequences in a forward on one device, at most; null: 8, on a GPU what it holds"""
    sharded: bool
    """shard weights, gradients and optimizer over processes (FSDP)"""
    activation_checkpointing: bool
    """less memory, a third more time"""
    clip: PositiveFloat | None
    """largest norm of the gradients; null: no clipping"""
    z_loss: NonNegativeFloat
    """weight of log(Z)^2 in the loss, Z the sum over exp(logits)"""
    document_mask: bool
    """a token attends to its own document only"""

    eval_every: PositiveInt
    """steps"""
    eval_tokens: int | None = Field(ge=2)
    """held-out tokens of an evaluation; null: a tenth of those trained since the last"""
    save_every: PositiveInt
    """steps"""
    sample_every: PositiveInt
    """steps"""
    log_every: PositiveInt
    """steps"""
    profile: PositiveInt | None
    """steps in a trace of where the time goes, after the first three; null: no trace"""
    resume: bool
    """continue from the newest checkpoint of run_dir"""
    init_from: Text | None
    """a run or a checkpoint, with whose weights to start"""
    distill: Text | None
    """a run or a checkpoint to learn from, of the same tokenizer"""
    distill_weight: float = Field(ge=0, le=1)
    """1: learn from its predictions alone; 0: from the text alone"""
    wandb: Literal["disabled", "offline", "online"]
    """whether Weights & Biases gets the metrics, too"""

    def check_combinations(self, world_size: int) -> None:
        """Raise ValueError for settings that exclude each other with this number of processes."""
        if self.sharded and world_size == 1:
            raise ValueError(
                "one process has nothing to shard over (sharded=true). "
                "fix: torchrun --nproc_per_node=N train.py, or sharded=false"
            )
        if self.distill is None and as_typed(self.distill_weight) != defaults()["distill_weight"]:
            raise ValueError(
                f"there is no teacher (distill_weight={self.distill_weight}, distill=null). "
                "fix: leave distill_weight out, or distill=runs/NAME"
            )
        # A batch smaller than one micro-batch a process is a smaller micro-batch.
        sequence_tokens = self.context * world_size  # of one sequence on every process
        sequences = self.batch_tokens // sequence_tokens
        unit = sequence_tokens * min(self.micro_batch or 1, max(1, sequences))
        if self.batch_tokens % unit != 0:
            size = max(unit, self.batch_tokens // unit * unit)
            raise ValueError(
                f"batch_tokens must be a multiple of {unit}, whole sequences for every process "
                f"(got {self.batch_tokens} with context={self.context} "
                f"micro_batch={self.micro_batch} processes={world_size}). fix: batch_tokens={size}"
            )

    def sequences_per_process(self, world_size: int) -> int:
        """Number of sequences of a batch that each process computes."""
        return self.batch_tokens // self.context // world_size

    def micro_batch_size(self, world_size: int, most: int = CPU_MICRO_BATCH) -> int:
        """Sequences per device and forward; if null, the largest divisor up to `most`."""
        sequences = self.sequences_per_process(world_size)
        if self.micro_batch is not None:
            return min(self.micro_batch, sequences)
        return max(size for size in range(1, most + 1) if sequences % size == 0)


def compose(overrides: list[str], typed: list[str] | None = None) -> Settings:
    """The settings of `python train.py OVERRIDES`, also for notebooks and other commands.

    `typed` is what the errors name in place of `overrides`: the same with sweeps, if these are one
    combination of them. Raises OverrideError for overrides with an unknown key or an unreadable
    value, and ValueError, with a line for each problem, for values that are not allowed.
    """
    import hydra
    from hydra.errors import HydraException

    # Hydra refuses a + in front of a key that exists; here it is allowed.
    parsed = parse_overrides([as_text(word.lstrip("+")) for word in overrides])
    words = [override.input_line for override in parsed]
    for override in parsed:
        # Hydra would accept several choices of a group, but leave them out of the name.
        if override.key_or_group in GROUPS and isinstance(override.value(), list):
            raise OverrideError(unknown_choice(*override.input_line.split("=", 1)))
        if override.is_sweep_override():
            raise OverrideError(sweep_problem(override.input_line, overrides))
        check_key(override.key_or_group, override.input_line)
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        try:
            keys = compose_tree(words)
        except (HydraException, OmegaConfBaseException) as error:
            raise OverrideError(composing_problem(error, words, typed or words)) from None
    for part in PARTS:
        del keys[part]
    # A config that is saved has the path of a run that is given by its name.
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
    """The keys of train.yaml and of the chosen presets, by Hydra, which is initialized."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    cfg = hydra.compose("train", words, return_hydra_config=True)
    # The name is made from the groups' choices, which are in Hydra's part of the config.
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_struct(cfg, False)
    del cfg.hydra
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


def sweep_problem(word: str, words: list[str]) -> str:
    """A line for an override with several values, which are a comparison, a list or a text."""
    key, _, value = word.partition("=")
    fix = f"python -m tools.compare {shlex.join(words)}"
    if key not in defaults() and "(" not in value:  # as in range(3)
        as_list = shlex.quote(f"{key}=[{value}]")
        fix += f"; or, for a list, {as_list}; or, for a text, {shlex.quote(quoted(word))}"
    return f"several values for one run ({word}). fix: {fix}"


def check_key(key: str, word: str) -> None:
    """Raise ValueError for an override of a key that the run sets itself, and of Hydra's own keys.

    Also for a value of a text that has another key here.
    """
    value = word.removeprefix(key)
    for copy, original in COPIES.items():
        if key == copy or key.startswith(f"{copy}."):
            fix = shlex.quote(original + word.removeprefix(copy))
            if word.startswith("~"):
                fix = f"leave {word} out"
            raise ValueError(f"{copy} is a copy of {original} ({word}). fix: {fix}")
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
    """Raise ValueError for a text that is a word of other programs, and no path that exists."""
    if value.lower() == "none":
        fix = "leave name out" if key == "name" else f"{key}=null"
        raise ValueError(f"None is null here ({key}={value}). fix: {fix}")
    if key == "init_from" and value in OTHER_STARTS and not run_path(value).exists():
        raise ValueError(f"not a run ({key}={value}). fix: {OTHER_STARTS[value]}")


def parse_overrides(words: list[str]) -> list:
    """Parse KEY=VALUE, or ~GROUP.KEY, which deletes a key, into Hydra's Override objects.

    Raises ValueError for other words, and OverrideError for a value that Hydra cannot read.
    """
    import hydra  # takes a quarter of a second, so only commands that compose import it
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    for word in words:
        if not re.match(r"~\w+\.|[^-~][^=]*=", word):
            key, _, value = word.lstrip("+-~").partition("=")
            value = value or defaults().get(key)
            fix = HELP
            if key and value is not None:
                fix = f"{key}={value}, or another value"
            raise ValueError(f"an override is KEY=VALUE, without dashes (got {word}). fix: {fix}")
    GlobalHydra.instance().clear()  # a notebook may have initialized it
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            # The config loader is for a value glob(...), which matches the files of configs/.
            loader = GlobalHydra.instance().config_loader()
            return OverridesParser.create(loader).parse_overrides(
                [as_integer(word) for word in words]
            )
    except OverrideParseException as error:
        fix = shlex.quote(quoted(error.override))
        raise OverrideError(f"not a value ({error.override}). fix: {fix}") from None


def as_integer(override: str) -> str:
    """Write a whole number such as 1e3 or 1000.0 without an exponent and a point.

    A key for integers takes it only so, and a key for floats takes both.
    """
    key, _, value = override.partition("=")
    if re.fullmatch(r"\d+(\.\d*)?(e\+?\d+)?", value, re.IGNORECASE) and not value.isdigit():
        number = float(value)
        if number.is_integer() and 0 < number < 2**53:
            return f"{key}={number:.0f}"
    return override


def as_text(override: str) -> str:
    """Quote the value of one of TEXT_KEYS, unless it is null, quoted, or a list."""
    key, _, value = override.partition("=")
    if key not in TEXT_KEYS or re.match("""null$|$|["'[]""", value):
        return override
    return quoted(override)


def quoted(override: str) -> str:
    """Quote the value of an override, so that Hydra takes it as a text, as it is."""
    key, _, value = override.partition("=")
    # In front of a quote, Hydra reads two backslashes as one.
    value = re.sub(r'(\\*)("|$)', r"\1\1\2", value).replace('"', r"\"")
    return f'{key}="{value}"'


def composing_problem(error: Exception, words: list[str], typed: list[str]) -> str:
    """A line for an error that Hydra raised for the overrides `words`: the problem and a fix.

    It names the overrides as they are in `typed`.
    """
    from hydra.errors import HydraException, MissingConfigException

    if isinstance(error, MissingConfigException):
        return unknown_choice(*error.missing_cfg_file.split("/", 1))
    # Hydra reports the first key that is missing; find all of them, unless the choices of the
    # groups are what cannot be composed, such as data=${x}.
    choosing = [word for word in words if word.partition("=")[0] in CHOSEN]
    with suppress(HydraException, OmegaConfBaseException):
        own = dict(flatten(compose_tree(choosing)))
        wrong = [word for word in typed if not is_known(word, own, typed)]
        if wrong:
            return unknown_keys(wrong, own, typed)
    first_line = str(error).splitlines()[0]
    return f"{first_line.rstrip('.')}. fix: {HELP}"


def is_known(word: str, own: Collection[str], words: list[str]) -> bool:
    """Whether a config with the keys `own` has the key of an override, given the others."""
    key = key_of(word)
    if key in CHOSEN or any(known == key or known.startswith(f"{key}.") for known in own):
        return True
    # A key inside of a dict that another override sets.
    parent = key.rpartition(".")[0]
    return any(other.startswith(f"{parent}={{") for other in words)


def key_of(word: str) -> str:
    """The key of an override: of key=value, +key=value and ~key."""
    return word.lstrip("+~").partition("=")[0]


def describe(problem: dict) -> str:
    """A line for a problem that pydantic found: the key, the rule, the value and a fix."""
    key = str(problem["loc"][0])
    value = problem["input"]
    rule = re.sub("^(Input|String) should", "must", problem["msg"])
    rule = re.sub("True|False", lambda word: word[0].lower(), rule)
    annotation = Settings.model_fields[key].annotation
    fix = aliases.nearest_value(key, value, annotation) or defaults()[key]
    more = "or what --help lists"
    if key == "device" and re.fullmatch(r"cuda:\d+", str(value)):
        more = f"and CUDA_VISIBLE_DEVICES={value[5:]} in front of python"
    return f"{key} {rule} (got {shown(value)}). fix: {key}={fix}, {more}"


def unknown_choice(group: str, choice: str) -> str:
    """A line for a choice that a group does not have, with the closest one, or all."""
    known = choices(group)
    word = f"{group}={aliases.our_value(group, choice)}"
    fix = word if word in known else suggest(word, known)
    return f"unknown ({group}={choice}). fix: {fix or ' or '.join(known)}"


def unknown_keys(wrong: list[str], own: dict, words: list[str]) -> str:
    """A line for the overrides in `words` with a key that does not exist, with keys that do.

    `own` are the keys of the chosen presets, with their values.
    """
    # Our values, which are needed to convert the values of other programs.
    given = {key: as_typed(value) for key, value in own.items()}
    for word in words:
        given[key_of(word)] = word.partition("=")[2]

    foreign = {}
    fixes = []
    remarks = []
    for word in wrong:
        key, _, value = word.lstrip("+~").partition("=")
        group = key.partition(".")[0]
        if aliases.is_foreign(key):
            foreign[key] = value
        elif "." in key and f"{group}={value}" in choices(group):  # attention.type=mla
            fixes.append(f"{group}={value}")
        elif nearest := nearest_key(key, own):
            fixes.append(f"{nearest}={shlex.quote(value or 'VALUE')}")
        else:
            remarks.append(HELP if len(wrong) == 1 else f"{key}: {HELP}")
    translated, more = aliases.translate(foreign, given)
    for key, value in translated.items():
        fixes.append(known_override(key, value, own, translated))

    new = [fix for fix in dict.fromkeys(fixes) if fix not in words]
    told = [" ".join(new), *dict.fromkeys(remarks + more)]
    names = ", ".join(key_of(word) for word in wrong)
    return f"unknown ({names}). fix: {'; '.join(filter(None, told))}"


def nearest_key(key: str, own: dict) -> str | None:
    """The known key that is nearest to a mistyped one: a group, a key of the chosen presets, or one
    of another preset after its choice, data=text data.path; None if none is near.
    """
    # For model.head it is model.heads, though there is an optimizer.reference.head.
    parent = key.rpartition(".")[0]
    siblings = [known for known in own if known.rpartition(".")[0] == parent]

    # Of keys with the same last part, the shortest is suggested, batch_tokens, and of the kinds of
    # layers one that has a value: attention.kinds.local.window.
    def rank(known: str) -> tuple[bool, int]:
        return ".kinds." in known and own[known] is None, len(known)

    others = [*GROUPS, *sorted(own, key=rank), *preset_keys()]
    return suggest(key, siblings) or suggest(key, others)


def known_override(key: str, value: str, own: Collection[str], others: Collection[str]) -> str:
    """An override by which another program's is replaced, as it can be typed with these presets.

    `others` are the keys that the others are replaced by, which may choose another preset.
    """
    if key in GROUPS and f"{key}={value}" not in choices(key):
        return " or ".join(choices(key))
    if key not in (*own, *GROUPS) and key.partition(".")[0] not in others:
        key = nearest_key(key, own) or key
    return f"{key}={shlex.quote(value)}"


def choices(group: str = "*") -> list[str]:
    """The choices of a group, or of all groups, as the user types them: attention=gqa."""
    files = CONFIGS.glob(f"{group}/*.yaml")
    return sorted(f"{file.parent.name}={file.stem}" for file in files)


def preset_keys() -> list[str]:
    """The keys of all presets after their choice, as the user types them: data=text data.path.

    They are sorted by length, so that the plainest preset with a key comes first.
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


def defaults() -> dict[str, str]:
    """The keys and groups of configs/train.yaml, with their values as the user types them."""
    tree = yaml.safe_load((CONFIGS / "train.yaml").read_text(encoding="utf-8"))
    for choice in tree.pop("defaults"):
        if choice != "_self_":
            tree |= choice
    tree["name"] = "NAME"  # which is made from the choices of the groups
    return {key: as_typed(value) for key, value in tree.items()}
