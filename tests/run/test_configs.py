"""A yaml lists every option of its class. Code has no defaults, so saved configs are complete."""

import re
from pathlib import Path
from typing import Annotated, get_args, get_origin

import hydra
import pytest
import torch
import yaml
from omegaconf import OmegaConf

from run import checkpoint, folder
from run.compose import compose
from run.distributed import Ranks
from run.instantiate import instantiate, parameters_of, resolve_target
from run.settings import MIRRORED_KEYS, Settings, flatten
from tests.conftest import CONFIGS, VARIANTS, settings_of

CHOICES = [
    f"{group}={path.stem}"
    for group in ("data", "model", "optimizer", "schedule", "experiment")
    for path in sorted((CONFIGS / group).glob("*.yaml"))
]


def check_keys(tree: dict) -> None:
    """Check that a config has exactly the keyword arguments of its target, with ranges."""
    target = resolve_target(tree["_target_"], tree["_target_"].partition(".")[0])
    options = [p for p in parameters_of(target) if p.kind is p.KEYWORD_ONLY]
    assert set(tree) - {"_target_", "_partial_"} == {p.name for p in options}
    for option in options:
        assert not has_bare_number(option.annotation), option


def has_bare_number(annotation: object) -> bool:
    """Whether a type has a number without a range, so that -1 is accepted only on purpose."""
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated and parts[0] in (int, float):
        return False
    return annotation in (int, float) or any(map(has_bare_number, parts))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_preset_has_the_keys_of_its_class(choice):
    settings = settings_of(choice)
    for group in ("data", "model", "optimizer", "schedule"):
        check_keys(getattr(settings, group))


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_attention_preset_has_the_keys_of_its_class_and_builds(variant):
    model = settings_of(f"attention={variant}").model
    attention = model["attention"]
    for kind in attention.get("kinds", {"": attention}).values():
        check_keys(kind)
    checkpoint.dry_run(model)


SIZES = {"124m": 125e6, "350m": 335e6, "1b": 1.12e9}


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_match_the_names_of_model_sizes(size):
    with torch.device("meta"):
        model = instantiate(settings_of(f"model={size}", "data.vocab_size=32000").model)
    assert model.num_parameters() == pytest.approx(SIZES[size], rel=0.05)


@pytest.mark.parametrize(
    ("tokens", "micro", "world", "fix"),
    [
        (4096, 8, 1, None),
        (1792, 8, 1, None),  # a single micro-batch that is smaller
        (6400, 8, 2, 4096),
        (5120, None, 1, None),  # 4 micro-batches of 5 sequences
        (768, None, 2, 512),
    ],
)
def test_the_error_for_an_indivisible_batch_suggests_the_nearest_size(tokens, micro, world, fix):
    sizes = {"context": 256, "micro_batch": micro}
    settings = settings_of().model_copy(update={"batch_tokens": tokens, **sizes})
    if fix is not None:
        with pytest.raises(ValueError, match=f"fix: batch_tokens={fix}$"):
            settings.check_combinations(world)
        settings = settings.model_copy(update={"batch_tokens": fix})
    settings.check_combinations(world)
    assert settings.sequences_per_process(world) % settings.micro_batch_size(world) == 0


def test_every_key_that_is_a_copy_of_another_key_cannot_be_set():
    for file in [*CONFIGS.glob("model/*.yaml"), *CONFIGS.glob("data/*.yaml")]:
        tree = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        for key, value in flatten(tree):
            if re.fullmatch(r"\$\{[\w.]+\}", str(value)):
                assert MIRRORED_KEYS[f"{file.parent.name}.{key}"] == value[2:-1], (file, key)


def test_help_shows_every_key_with_a_comment_and_every_preset(command):
    result = command("train.py", "--help").succeeded()
    lines = result.out.splitlines()
    for key in Settings.model_fields.keys() - {"model", "data", "optimizer", "schedule", "name"}:
        (at,) = [number for number, line in enumerate(lines) if line.startswith(f"{key}: ")]
        assert "  # " in lines[at] or lines[at - 1].startswith("# "), key
    for file in CONFIGS.glob("*/*.yaml"):
        (listed,) = [line for line in lines if line.startswith(f"{file.parent.name}=")]
        assert file.stem in re.split(r"[= |]+", listed), file
    examples = re.findall("^#   .*train.py (.*)", result.out, re.MULTILINE)
    assert examples
    for example in examples:
        compose(example.split())


def test_help_with_a_preset_shows_its_file_and_the_whole_config(command):
    words = ("model=tiny", "attention=kda", "context=64", "optimizer.lr=0.5")
    result = command("train.py", *words, "-h").succeeded()
    for name in ("kda", "gdn", "mla"):  # the preset, and those that it extends
        assert (CONFIGS / "attention" / f"{name}.yaml").read_text(encoding="utf-8") in result.out
    *_, whole = result.out.partition("# The whole config\n")
    assert yaml.safe_load(whole) == compose([*words]).model_dump()
    assert not Path("runs").exists()


def test_configs_can_be_composed_in_a_notebook_that_uses_hydra(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hydra.initialize(None, version_base="1.3")
    first = compose(["model=tiny"])
    second = compose(["attention=mla", "optimizer.lr=0.5"])
    assert type(first.model) is dict and first.model["depth"] == 2
    assert (first.name, second.name) == ("stdlib-tiny-gqa", "stdlib-small-mla")
    assert second.optimizer["lr"] == 0.5 != first.optimizer["lr"]


def test_run_folders_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        with folder.open_run_dir(settings_of("name=a"), Ranks(0, 1, torch.device("cpu"))) as run:
            names.append(str(run))
    assert names == ["runs/a", "runs/a-2", "runs/a-3"]
