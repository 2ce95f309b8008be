"""The configuration: its top keys as a typed class, and its composition from configs/."""

import json
import re
import shlex
from collections.abc import Collection, Iterator
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

from run import errors
from run.errors import OverrideError
from run.instantiate import ROOT

CONFIGS = ROOT / "configs"
CPU_MICRO_BATCH = 8  # sequences, at most; larger micro-batches are not faster on a CPU
GROUPS = ("model", "attention", "ffn", "norm", "data", "optimizer", "schedule")
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

HELP = "python train.py --help, which lists all"
EXAMPLES = """Train a language model.

  python train.py attention=mha max_minutes=10
  python train.py data=text data.path=my/stories.txt model=15m
  python train.py name=mine optimizer=adamw optimizer.lr=1e-3 resume=true

Groups and keys, with their defaults; the keys of a choice are in configs/GROUP/CHOICE.yaml:"""

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


def compose(overrides: list[str]) -> Settings:
    """The settings of `python train.py OVERRIDES`, also for notebooks and other commands.

    Raises OverrideError for overrides with an unknown key or an unreadable value, and ValueError,
    with a line for each problem, for values that are not allowed.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    # Hydra refuses a + in front of a key that exists; here it is allowed.
    words = [as_text(word.lstrip("+")) for word in overrides]
    for override in parse_overrides(words):
        word = override.input_line
        # Hydra would accept several choices of a group, but leave them out of the name.
        if override.key_or_group in GROUPS and isinstance(override.value(), list):
            raise OverrideError(unknown(word))
        if override.is_sweep_override():
            key, _, value = word.partition("=")
            fix = f"python -m tools.compare {shlex.quote(word)}"
            if key not in GROUPS and "(" not in value:  # as in range(3)
                as_list = shlex.quote(f"{key}=[{value}]")
                fix += f" or, for a list, {as_list} or, for a text, {shlex.quote(quoted(word))}"
            raise OverrideError(f"several values for one run ({word}). fix: {fix}")
        check_key(override.key_or_group, word)
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        try:
            cfg = hydra.compose("train", words, return_hydra_config=True)
            # The name is made from the groups' choices, which are in Hydra's part of the config.
            HydraConfig.instance().set_config(cfg)
            OmegaConf.set_struct(cfg, False)
            del cfg.hydra
            keys = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise OverrideError(composing_problem(error, words)) from None
    for part in PARTS:
        del keys[part]
    try:
        return Settings(**keys)
    except ValidationError as error:
        lines = [describe(problem) for problem in error.errors()]
        raise ValueError("\n".join(lines)) from None


def check_key(key: str, word: str) -> None:
    """Raise ValueError for an override of a key that the run sets itself, and of Hydra's own keys."""
    for copy, original in COPIES.items():
        if key == copy or key.startswith(f"{copy}."):
            fix = shlex.quote(original + word.removeprefix(copy))
            if word.startswith("~"):
                fix = f"leave {word} out"
            raise ValueError(f"{copy} is a copy of {original} ({word}). fix: {fix}")
    if re.match("hydra[./]", key):
        fix = f"leave {key} out"
        if key == "hydra.run.dir":
            fix = shlex.quote(f"run_dir{word.removeprefix(key)}")
        raise ValueError(f"Hydra's own keys have no effect ({word}). fix: {fix}")


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
            if value is not None:
                fix = f"{key}={value}, or another value"
            raise ValueError(f"an override is KEY=VALUE, without dashes (got {word}). fix: {fix}")
    GlobalHydra.instance().clear()  # a notebook may have initialized it
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            # The config loader is for a value glob(...), which matches the files of configs/.
            loader = GlobalHydra.instance().config_loader()
            return OverridesParser.create(loader).parse_overrides(words)
    except OverrideParseException as error:
        fix = shlex.quote(quoted(error.override))
        raise OverrideError(f"not a value ({error.override}). fix: {fix}") from None


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


def composing_problem(error: Exception, words: list[str]) -> str:
    """A line for an error that Hydra raised for these overrides: the problem and a fix."""
    from hydra.errors import MissingConfigException

    if isinstance(error, MissingConfigException):
        return unknown(error.missing_cfg_file.replace("/", "=", 1))
    # A key that the composed config lacks. Its root has the keys of the chosen presets.
    missing = error.__cause__
    if isinstance(missing, OmegaConfBaseException):
        own = OmegaConf.to_container(missing.parent_node._get_root())
        del own["hydra"]
        # Find the override, such as lr.new=1: Hydra reports only the first key that is missing, lr.
        override = missing.full_key
        for word in words:
            if word.startswith(missing.full_key):
                override = word
                break
        key, _, value = override.partition("=")
        return unknown(key, value, own=dict(flatten(own)))
    first_line = str(error).splitlines()[0]
    return f"{first_line.rstrip('.')}. fix: {HELP}"


def describe(problem: dict) -> str:
    """A line for a problem that pydantic found: the key, the rule, the value and a fix."""
    key = str(problem["loc"][0])
    rule = re.sub("^(Input|String) should", "must", problem["msg"])
    return (
        f"{key} {rule} (got {problem['input']!r}). "
        f"fix: {key}={defaults()[key]}, or what --help lists"
    )


def unknown(word: str, value: str = "VALUE", own: Collection[str] = ()) -> str:
    """A line for a KEY or a GROUP=CHOICE that does not exist, with the closest one that does.

    `value` is the value that the key was given, and `own` are the keys of the chosen presets.
    """
    group, is_choice, _ = word.partition("=")
    if is_choice:
        known = choices(group)
        fix = errors.suggest(word, known) or " or ".join(known)
    else:
        # Of keys with the same last part, the shortest is suggested: batch_tokens.
        own = sorted(own, key=len)
        fix = errors.suggest(word, [*GROUPS, *own, *preset_keys(), *choices()])
        if fix is not None and fix not in choices():
            fix += f"={shlex.quote(value)}"
    return f"unknown ({word}). fix: {fix or HELP}"


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


def as_typed(value: object) -> str:
    """A value as the user types it: null for None, and text without quotes."""
    return json.dumps(value).strip('"')


def help_text() -> str:
    """The text of `python train.py --help`: examples, and each group and key with its default."""
    schemas = Settings.model_json_schema()["properties"]
    lines = [EXAMPLES]
    for key, value in defaults().items():
        schema = schemas.get(key, {})
        kinds = choices(key)
        if not kinds:
            for alternative in schema.get("anyOf", [schema]):
                values = alternative.get("enum", [alternative.get("type")])
                kinds += [as_typed(value) for value in values]
        text = schema.get("description", PARTS.get(key, "settings of other keys, all at once"))
        lines.append(f"  {key}={value}  ({', '.join(kinds)})  {text}")
    return "\n".join(lines)
