"""A sweep is expanded into variants of equal size, and variants into jobs."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from run.compose import compose
from run.settings import flatten
from tests.conftest import saved, settings_of, tree_of
from tools.compare import plan
from tools.compare.jobs import Job
from tools.compare.plan import match_hidden, plan_variants, train_variants
from tools.compare.runs import Run
from tools.compare.sweep import expand_sweep, name_variants


@pytest.fixture(autouse=True)
def no_text(monkeypatch) -> None:
    """Plan without preparing a text."""
    corpus = SimpleNamespace(sha256="abc")
    monkeypatch.setattr(plan, "open_data", lambda settings, start: (settings, corpus, None))


@pytest.fixture
def plan_jobs(monkeypatch):
    """A function that plans the jobs of a comparison without training them."""
    monkeypatch.setattr(plan, "train_all", lambda jobs: None)
    return lambda words, match, folder: train_variants(
        plan_variants(words, match, folder, has_search=False), has_search=False
    )


def test_each_job_composes_to_the_requested_settings(plan_jobs):
    words = ["attention=gqa,mqa", "seed=0,3", "model=tiny", "optimizer.lr=0.01"]
    jobs = plan_jobs(words, "params", Path("out, of é"))
    assert [job.run_dir.name for job in jobs] == ["gqa-0", "mqa-0", "gqa-3", "mqa-3"]
    assert [job.baseline for job in jobs] == [None, *[jobs[0]] * 3]
    settings = [compose(job.overrides) for job in jobs]
    for job, each in zip(jobs, settings, strict=True):
        planned = dict(flatten(job.settings))
        for key, value in flatten(each.model_dump()):
            assert key in ("run_dir", "resume") or planned[key] == value
        assert each.run_dir == str(job.run_dir) and each.resume
        assert job.run_dir.name.startswith(each.name) and each.optimizer["lr"] == 0.01
    assert [each.seed for each in settings] == [0, 0, 3, 3]


@pytest.mark.parametrize(
    "words, names",
    [
        (["attention=conv", "attention.window=null,64"], ["conv-window-null", "conv-window-64"]),
        (["attention=gqa,mqa", "optimizer.lr=0.01"], ["gqa", "mqa"]),
        (["attention=conv", "optimizer.lr=0.01,0.1"], ["lr-0.01", "lr-0.1"]),
    ],
)
def test_variant_names_include_the_attention_if_its_settings_vary(words, names):
    assert list(name_variants(expand_sweep([*words, "model=tiny"]))) == names


@pytest.mark.parametrize("variant", ["mla", "shared_kv", "retention"])
@pytest.mark.parametrize("kind", ["params", "flops"])
def test_a_preset_can_be_matched_to_the_baseline_size(kind, variant):
    words = ("model=tiny", "model.depth=6")
    target = plan.SIZES[kind](plan.build_model(settings_of(*words).model, "meta"))
    tree = settings_of(*words, f"attention={variant}").model
    hidden = match_hidden(tree, plan.SIZES[kind], target)
    model = plan.build_model(tree | {"hidden": hidden}, "meta")
    size = model.training_flops()
    if kind == "params":
        size = sum(p.numel() for p in model.parameters())
    assert abs(size / target - 1) <= 0.01


def test_sizes_are_matched_with_the_vocabulary_of_the_tokenizer(monkeypatch):
    def open_data(settings, start):
        model = settings.model | {"vocab_size": 300}
        return settings.model_copy(update={"model": model}), SimpleNamespace(sha256="abc"), None

    monkeypatch.setattr(plan, "open_data", open_data)
    words = ["attention=gqa,gated", "model=tiny", "data.vocab_size=4096"]
    ours, theirs = plan_variants(words, "params", None, has_search=False)
    sizes = []
    for variant in (ours, theirs):
        sizes.append(plan.build_model(variant.settings.model, "meta").num_parameters())
    assert theirs.settings.model["vocab_size"] == 300
    assert abs(sizes[1] / sizes[0] - 1) <= 0.005


def test_each_model_size_has_a_baseline_whose_size_the_others_match(plan_jobs):
    jobs = plan_jobs(["attention=gqa,mha", "model=tiny,small"], "params", Path("out"))
    assert [job.settings["name"] for job in jobs] == [
        "gqa-tiny",
        "gqa-small",
        "mha-tiny",
        "mha-small",
    ]
    sizes = [plan.build_model(job.settings["model"], "meta").num_parameters() for job in jobs]
    assert sizes[1] > 2 * sizes[0]
    for number in (0, 1):
        first, other = jobs[number], jobs[number + 2]
        assert first.baseline is None and other.baseline is first
        assert sizes[number + 2] == pytest.approx(sizes[number], rel=0.01)
        # Only the feed-forward width is adapted.
        ours, theirs = (dict(flatten(job.settings)) for job in (first, other))
        different = {key for key in ours if ours[key] != theirs[key]}
        assert different == {"name", "model.attention.kv_heads", "model.hidden"}


BOWL = {"gqa": 1.0, "mqa": 4.0, "mha": 0.25}  # the best learning rate factor of each variant


@pytest.mark.parametrize("diverges_from", [math.inf, 4.0])
def test_the_search_finds_the_best_rate_of_each_variant(monkeypatch, diverges_from):
    """Losses are a parabola in the logarithm of the rate; runs at large factors may diverge."""
    rates = []

    def train_all(jobs: list[Job]) -> None:
        for job in jobs:
            settings = job.settings
            factor = settings["optimizer"]["lr"] / 0.01
            rates.append((settings["name"], settings["seed"], factor))
            assert job.factor is None or job.factor == pytest.approx(factor, rel=1e-3)
            loss = 3 + 0.1 * math.log2(factor / BOWL[settings["name"]]) ** 2
            lines = [{"val_loss": loss, "tokens": 1}] if factor < diverges_from else []
            job.run = Run(job.run_dir, settings, lines, True, factor=job.factor)

    monkeypatch.setattr(plan, "train_all", train_all)
    words = ["attention=gqa,mqa,mha", "seed=0,1", "model=tiny", "optimizer.lr=0.01"]
    variants = plan_variants(words, "none", Path("out"), has_search=True)
    jobs = train_variants(variants, has_search=True)

    # Each factor is tried once with the search seed, until the best one is inside the range.
    tried = {name: [x for each, seed, x in rates if (each, seed) == (name, 1000)] for name in BOWL}
    assert sorted(tried["gqa"]) == pytest.approx([0.25, 0.5, 1, 2, 4], rel=1e-3)
    assert min(tried["mha"]) == pytest.approx(0.125, rel=1e-3)
    assert max(tried["mqa"]) == pytest.approx(8 if diverges_from > 8 else 4, rel=1e-3)
    # The optimum of the parabola is found exactly, but a diverged factor is never selected.
    best = BOWL | ({"mqa": 2.0} if diverges_from == 4 else {})
    for name, seed, factor in rates[-6:]:
        assert seed in (0, 1) and factor == pytest.approx(best[name], rel=0.01)
    assert jobs[0].run_dir.name == "gqa-x1-1000" and jobs[0].baseline is None
    assert all(job.baseline is jobs[0] for job in jobs[1:])
    assert len({job.run_dir for job in jobs}) == len(jobs)


def test_a_variant_whose_search_failed_is_not_trained(monkeypatch):
    counts = []
    monkeypatch.setattr(plan, "train_all", lambda jobs: counts.append(len(jobs)))
    variants = plan_variants(["model=tiny"], "none", Path("out"), has_search=True)
    jobs = train_variants(variants, has_search=True)
    assert counts == [len(jobs)] == [5]


def test_the_seed_of_the_search_cannot_be_used_for_runs():
    with pytest.raises(ValueError, match="fix: seed=0"):
        plan_variants(["seed=0,1000"], "none", Path("out"), has_search=True)


def test_variants_of_a_pretrained_model_keep_its_width(tmp_path, tokenizer):
    saved(tmp_path / "old", tree_of("gqa"), tokenizer)
    words = [f"init_from={tmp_path / 'old'}", "attention=mha,mla", "optimizer.lr=0.001"]
    with pytest.raises(ValueError, match=r"mla cannot match .*fix: --match none"):
        plan_variants(words, "params", Path("out"), has_search=False)
    assert len(plan_variants(words, "none", Path("out"), has_search=False)) == 2
