"""A yaml lists every knob of its class. Code has no defaults, so saved configs are complete."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, get_args, get_origin

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from model.rope import LinearScaling, Llama3, YaRN
from run import folder
from run.compose import compose
from run.distributed import DistEnv
from run.instantiate import instantiate, parameters_of, resolve_target
from run.settings import COPIES, Settings, flatten
from tests.conftest import CONFIGS, ROOT, VARIANTS, settings_of
from training.rates import Reference

TARGETS = [
    path
    for group in ("data", "model", "optimizer", "schedule")
    for path in sorted((CONFIGS / group).glob("*.yaml"))
]
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))
GROUPS = ("data", "optimizer", "schedule", "experiment")


@pytest.mark.parametrize("path", TARGETS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_yaml_keys_match_the_constructor_arguments(path):
    tree = getattr(settings_of(f"{path.parent.name}={path.stem}"), path.parent.name)
    found = resolve_target(tree["_target_"], tree["_target_"].partition(".")[0])
    options = [p for p in parameters_of(found) if p.kind is p.KEYWORD_ONLY]
    assert set(tree) - {"_target_", "_partial_"} == {p.name for p in options}
    check_ranges(options)


@pytest.mark.parametrize("found", [Reference, LinearScaling, Llama3, YaRN])
def test_numbers_of_nested_parts_have_ranges(found):
    check_ranges(parameters_of(found))


def check_ranges(options: list[inspect.Parameter]) -> None:
    """Check that each number has a range, so that -1 is accepted only on purpose."""
    for option in options:
        assert not has_bare_number(option.annotation), option


def has_bare_number(annotation: object) -> bool:
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated and parts[0] in (int, float):
        return False
    return annotation in (int, float) or any(map(has_bare_number, parts))


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_attention_preset_lists_every_knob(variant):
    tree = settings_of(f"attention={variant}").model["attention"]
    for kind in tree.get("kinds", {"": tree}).values():
        found = resolve_target(kind["_target_"], "model")
        knobs = [p for p in parameters_of(found) if p.kind is p.KEYWORD_ONLY]
        assert set(kind) - {"_target_", "_partial_"} == {p.name for p in knobs}
        check_ranges(knobs)


def leaves(tree: dict, path: str = "") -> dict:
    """Map the paths of nested keys to their values as text."""
    flat = {}
    for key, value in tree.items():
        place = f"{path}.{key}".lstrip(".")
        flat |= leaves(value, place) if isinstance(value, dict) else {place: repr(value)}
    return flat


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_preset_lists_exactly_the_differences_from_its_parents(variant):
    model = settings_of(f"attention={variant}").model
    lines = OmegaConf.load(CONFIGS / "attention" / f"{variant}.yaml")
    parents = {}
    for entry in lines.pop("defaults", []):  # NAME, NAME@PATH, or [override] GROUP@PATH: NAME
        name, _, path = str(entry).partition("@")
        if not isinstance(entry, str):
            ((path, name),) = entry.items()
            path = path.partition("@")[2]
        parents = {key: value for key, value in parents.items() if not key.startswith(path)}
        parents |= leaves(settings_of(f"attention={name}").model["attention"], path)
    own = OmegaConf.to_container(OmegaConf.merge({"model": model}, lines), resolve=True)
    own.pop("model")
    assert leaves(own) == dict(leaves(model["attention"]).items() - parents.items())


@pytest.mark.parametrize(
    "size, variant", [(size, "gqa") for size in MODELS] + [("15m", name) for name in VARIANTS]
)
def test_each_attention_preset_builds_at_each_model_size(size, variant):
    with torch.device("meta"):
        model = instantiate(settings_of(f"model={size}", f"attention={variant}").model)
    assert model(torch.zeros(1, 3, dtype=torch.int64, device="meta")).shape == (1, 3, 4096)


SIZES = {"124m": 125e6, "350m": 335e6, "1b": 1.12e9}


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_match_the_names_of_model_sizes(size):
    with torch.device("meta"):
        model = instantiate(settings_of(f"model={size}", "data.vocab_size=32000").model)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(SIZES[size], rel=0.05)


@pytest.mark.parametrize(
    "choice", [f"{g}={p.stem}" for g in GROUPS for p in sorted((CONFIGS / g).glob("*.yaml"))]
)
def test_every_preset_of_a_group_composes(choice):
    assert settings_of(choice).name == "test"


@pytest.mark.parametrize(
    "tokens, micro, world, fix",
    [
        (4096, 8, 1, None),
        (1792, 8, 1, None),  # a single micro-batch that is smaller
        (100, 8, 1, "batch_tokens=256"),
        (6400, 8, 2, "batch_tokens=4096"),
        (768, 8, 2, "batch_tokens=512"),
        (5120, "null", 1, None),  # 4 micro-batches of 5 sequences
        (768, "null", 2, "batch_tokens=512"),
    ],
)
def test_the_error_for_an_indivisible_batch_suggests_the_nearest_size(tokens, micro, world, fix):
    words = [f"batch_tokens={tokens}", "context=256", f"micro_batch={micro}", "name=test"]
    if fix is None:
        settings = compose(words)
        settings.check_combinations(world)
        assert tokens // 256 // world % settings.micro_batch_size(world) == 0
        return
    with pytest.raises(ValueError, match=f"fix: {fix}$"):
        compose(words).check_combinations(world)
    compose([*words, fix]).check_combinations(world)  # the proposed fix works


def test_every_key_that_is_a_copy_of_another_key_cannot_be_set():
    for file in [*CONFIGS.glob("model/*.yaml"), *CONFIGS.glob("data/*.yaml")]:
        tree = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        for key, value in flatten(tree):
            if re.fullmatch(r"\$\{[\w.]+\}", str(value)):
                assert COPIES[f"{file.parent.name}.{key}"] == value[2:-1], (file, key)


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
    assert len(examples) == 4 and all(compose(line.split()) for line in examples)


def test_help_with_a_preset_shows_its_file_and_the_whole_config(command):
    words = ("model=tiny", "attention=kda", "context=64", "optimizer.lr=0.5")
    result = command("train.py", *words, "-h").succeeded()
    for name in ("kda", "gdn", "mla"):  # the preset, and those that it extends
        assert (CONFIGS / "attention" / f"{name}.yaml").read_text(encoding="utf-8") in result.out
    *_, whole = result.out.partition("# The whole config\n")
    assert yaml.safe_load(whole) == compose([*words]).model_dump()
    assert not Path("runs").exists()


def test_every_preset_starts_with_a_one_line_description():
    for file in CONFIGS.glob("*/*.yaml"):
        lines = file.read_text(encoding="utf-8").removeprefix("# @package _global_\n").splitlines()
        assert re.match(r"# \S.{,97}$", lines[0]), file


def test_configs_can_be_composed_in_a_notebook_from_any_folder(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import hydra
hydra.initialize(None, version_base="1.3")  # another library's
from run.compose import compose
first = compose(["model=tiny"])
second = compose(["attention=mla", "optimizer.lr=0.5"])
assert type(first.model) is dict and first.model["depth"] == 2
assert (first.name, second.name) == ("stdlib-tiny-gqa", "stdlib-small-mla")
assert second.optimizer["lr"] == 0.5 != first.optimizer["lr"]
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert not list(tmp_path.iterdir())


def test_a_run_folder_stays_locked_until_the_run_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = settings_of("run_dir=a")
    ranks = DistEnv(0, 1, torch.device("cpu"))
    with folder.open_run_dir(settings, ranks):
        with pytest.raises(SystemExit) as ended, folder.open_run_dir(settings, ranks):
            pass
        assert ended.value.code == 2
        assert (
            "another process is training in this folder (run_dir=a). fix: "
            in capsys.readouterr().err
        )
    # An error also releases the lock.
    with pytest.raises(KeyError), folder.open_run_dir(settings, ranks):
        raise KeyError
    with folder.open_run_dir(settings, ranks) as run:
        assert run == Path("a")


def test_run_folders_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        with folder.open_run_dir(settings_of("name=a"), DistEnv(0, 1, torch.device("cpu"))) as run:
            names.append(str(run))
    assert names == ["runs/a", "runs/a-2", "runs/a-3"]
