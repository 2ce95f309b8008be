"""A yaml lists every knob of what it builds: no default hides in code, so a saved config stays complete."""

import shutil

import pytest
import torch

from run import config, folder
from run.distributed import DistEnv
from run.instantiate import instantiate, parameters_of, resolve_target
from tests.conftest import CONFIGS, VARIANTS, settings_of

TARGETS = [
    path
    for group in ("data", "model", "optimizer", "schedule")
    for path in sorted((CONFIGS / group).glob("*.yaml"))
]
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))
GROUPS = ("data", "optimizer", "schedule", "experiment")


@pytest.mark.parametrize("path", TARGETS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_yaml_keys_are_the_constructors(path):
    tree = settings_of(f"{path.parent.name}={path.stem}")[path.parent.name]
    found = resolve_target(tree["_target_"], tree["_target_"].partition(".")[0])
    assert set(tree) - {"_target_", "_partial_"} == {
        p.name for p in parameters_of(found) if p.kind is p.KEYWORD_ONLY
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_attention_lists_every_knob(variant):
    tree = settings_of(f"attention={variant}")["attention"]
    for kind in tree.get("kinds", {"": tree}).values():
        knobs = {
            p.name
            for p in parameters_of(resolve_target(kind["_target_"], "model"))
            if p.kind is p.KEYWORD_ONLY
        }
        assert set(kind) - {"_target_", "_partial_"} == knobs


@pytest.mark.parametrize(
    "size, variant", [(size, "gqa") for size in MODELS] + [("15m", name) for name in VARIANTS]
)
def test_sizes_and_attentions_fit(size, variant):
    with torch.device("meta"):
        model = instantiate(settings_of(f"model={size}", f"attention={variant}")["model"])
    assert model(torch.zeros(1, 3, dtype=torch.int64, device="meta")).shape == (1, 3, 4096)


SIZES = {"124m": 125e6, "350m": 335e6, "1b": 1.12e9}


@pytest.mark.parametrize("size", SIZES)
def test_a_size_is_what_its_name_says(size):
    with torch.device("meta"):
        model = instantiate(settings_of(f"model={size}", "data.vocab_size=32000")["model"])
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(SIZES[size], rel=0.05)


@pytest.mark.parametrize(
    "choice", [f"{g}={p.stem}" for g in GROUPS for p in sorted((CONFIGS / g).glob("*.yaml"))]
)
def test_every_choice_composes_without_a_fault(choice):
    assert config.find_problems(settings_of(choice), world_size=1) == []


FAULTS = {
    "optimizer.lr=nan": "optimizer.lr must be a number of at least 0 (got nan)",
    "schedule.warmup=-1": "schedule.warmup must be",
    "steps=0": "steps must be null or a whole number of at least 1 (got 0)",
    "max_minutes=inf": "max_minutes must be null or a number above 0 (got inf)",
    "seed=true": "seed must be a whole number of at least 0 (got True)",
    "compile=1": "compile must be auto or true or false (got 1)",
    "name=a/b": "name must be letters",
    "batch_tokens=1000": "fix: batch_tokens=768",
    "max_minutes=null max_epochs=null": "the run has no end",
    "max_epochs=0.5": "max_epochs must be null or a whole number of at least 1 (got 0.5)",
    "micro_batch=0": "micro_batch must be null or a whole number of at least 1 (got 0)",
    "+colour=blue": "unknown (colour)",
    "~wandb": "wandb is missing",
}


@pytest.mark.parametrize("override", FAULTS)
def test_a_fault_of_the_config_is_named(override):
    (found,) = config.find_problems(settings_of(*override.split()), world_size=1)
    assert FAULTS[override] in found and "fix: " in found


def test_all_faults_are_told_at_once():
    assert (
        len(
            config.find_problems(
                settings_of("steps=0", "seed=-1", "optimizer.lr=-2", "log_every=0.5"), world_size=1
            )
        )
        == 4
    )


@pytest.mark.parametrize(
    "tokens, micro, world, fix",
    [
        (4096, 8, 1, None),
        (1792, 8, 1, None),  # one smaller micro-batch
        (5120, 8, 1, "batch_tokens=4096 or batch_tokens=6144 or micro_batch=5"),
        (1000, 8, 1, "batch_tokens=768 or batch_tokens=1024"),
        (100, 8, 1, "batch_tokens=256"),
        (6400, 8, 2, "batch_tokens=4096 or batch_tokens=8192"),
        (768, 8, 2, "batch_tokens=512 or batch_tokens=1024"),
        (5120, "null", 1, None),  # 5 sequences, four times
        (1000, "null", 1, "batch_tokens=768 or batch_tokens=1024"),
        (768, "null", 2, "batch_tokens=512 or batch_tokens=1024"),
    ],
)
def test_a_batch_that_micro_batches_cannot_fill_is_refused_with_the_nearest(
    tokens, micro, world, fix
):
    settings = settings_of(f"batch_tokens={tokens}", "context=256", f"micro_batch={micro}")
    found = config.find_problems(settings, world)
    assert [problem.partition("fix: ")[2] for problem in found] == ([] if fix is None else [fix])
    if fix is None:
        assert tokens // 256 // world % config.micro_batch_size(settings, world) == 0
    else:  # what is proposed works
        for word in fix.split(" or "):
            assert not config.find_problems(
                settings | {word.split("=")[0]: int(word.split("=")[1])}, world
            ), word


def test_run_folders_count_up_and_the_newest_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fresh, again = ({"run_dir": None, "name": "a", "resume": resume} for resume in (False, True))

    def claimed(settings: dict, begins: bool = True) -> str:
        with folder.open_run_dir(settings, DistEnv(0, 1, torch.device("cpu"))) as run:
            if begins:
                (run / "metrics.jsonl").touch()
            return str(run)

    assert claimed(fresh, begins=False) == "runs/a"  # it gives its folder back
    assert [claimed(fresh) for _ in range(3)] == ["runs/a", "runs/a-2", "runs/a-3"]
    shutil.rmtree("runs/a-2")
    assert claimed(again) == "runs/a-3"
    (tmp_path / "runs/a/checkpoints/step-00000001").mkdir(parents=True)
    assert claimed(again) == "runs/a"  # the newest that has something to resume
    assert claimed(fresh) == "runs/a-2"
