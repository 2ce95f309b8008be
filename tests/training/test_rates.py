"""Learning rates depend on the sizes of the model and the run as defined in training/rates.py."""

import math
import re

import pytest
import torch
from torch import nn

from model.build import build_model
from run.instantiate import instantiate
from tests.conftest import EACH_MECHANISM, ROOT, settings_of, tree_of
from train import take_step
from training.rates import ROLES, LearningRates, Reference, split_parameters

WIDTHS = (64, 256)


def reference_of(optimizer: str) -> Reference:
    return instantiate(settings_of(f"optimizer={optimizer}").optimizer["reference"], "training")


def test_the_run_factor_follows_the_batch_the_tokens_and_the_size():
    keys = {"dim": 128, "depth": 4, "batch_tokens": 1000, "tokens": 1e6}
    multiples = {"embedding": 1.0, "head": 1.0, "vectors": 1.0}
    factor = Reference(**keys, **multiples).run_factor
    assert factor(128, 4, 1000, 1000) == 1
    # Four times the batch size in equal tokens, 10 times the tokens, and 32 times the size.
    assert factor(128, 4, 4000, 250) == pytest.approx(2)
    assert factor(128, 4, 1000, 10000) == pytest.approx(0.4786, abs=1e-4)
    assert factor(1024, 16, 1000, 1000) == pytest.approx(0.5)
    # In less than 150 steps, only the number of tokens matters.
    assert factor(128, 4, 10000, 100) == pytest.approx((1000 / 150) ** 0.5)
    assert factor(128, 4, 100000, 10) == pytest.approx((1000 / 150) ** 0.5)
    # An unknown length does not change the rates, and neither does an unknown reference.
    assert factor(128, 4, 1000, math.inf) == 1
    for name in ("depth", "batch_tokens", "tokens"):
        reference = Reference(**keys | {name: None}, **multiples)
        assert reference.run_factor(1024, 16, 4000, 250) == 1


def test_the_rates_of_a_preset_are_those_of_its_page():
    settings = settings_of("experiment=fineweb")
    settings.model["vocab_size"] = settings.data["vocab_size"]
    optimizers = instantiate(settings.optimizer, "training")(build_model(settings.model, "meta"))
    rates = LearningRates(
        optimizers, reference_of("muon"), dim=768, depth=12, batch_tokens=settings.batch_tokens
    )
    page = (ROOT / "docs" / "rates.md").read_text(encoding="utf-8")
    (stated,) = re.findall("^    (peak learning rates: .*)$", page, re.MULTILINE)
    assert rates.describe(4710) == stated


@pytest.mark.parametrize("variant", [*EACH_MECHANISM, "gqa model.tied=true"])
def test_every_parameter_has_exactly_one_role(variant):
    name, *words = variant.split()
    model = instantiate(tree_of(name, *words))
    roles = split_parameters(model)
    assert roles.keys() == ROLES.keys()
    sorted_out = [p for members in roles.values() for p in members]
    assert len(sorted_out) == len({*sorted_out}) == len([*model.parameters()])
    assert roles["head"] == [model.unembedding]
    assert all(p.ndim == 2 for p in roles["matrices"])
    # A convolution has the same number of taps per feature at every width.
    taps = [p for name, p in model.named_parameters() if name.endswith("taps")]
    assert {*taps} <= {*roles["vectors"]}


def test_the_error_names_a_parameter_without_a_role():
    model = instantiate(tree_of("gqa"))
    model.blocks[1].table = nn.Parameter(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"blocks\.1\.table"):
        split_parameters(model)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_updates_change_outputs_equally_at_every_width(run_of, optimizer):
    """The coordinate check of muP: changes of logits after a few steps (2203.03466, figure 5)."""
    # Use a tenth of the rate to keep the changes small.
    lr = settings_of(f"optimizer={optimizer}").optimizer["lr"] / 10
    moved = []
    for dim in WIDTHS:
        sizes = (f"model.dim={dim}", f"model.hidden={2 * dim}")
        run = run_of(f"optimizer={optimizer}", f"optimizer.lr={lr}", "schedule.warmup=0", *sizes)
        # Scale only with the width, not with the length.
        run.trainer.rates.run_factor = lambda total_steps: 1.0
        model = run.trainer.model
        tokens = run.trainer.loader(0).inputs
        with torch.no_grad():
            before = model(tokens)
        for _ in range(4):
            take_step(run)
        with torch.no_grad():
            moved.append((model(tokens) - before).square().mean().sqrt().item())
    # Without a reference, the ratio is above 2.
    assert 0.6 < moved[1] / moved[0] < 1.7


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_weight_decay_per_step_does_not_depend_on_the_width(optimizer):
    speeds = set()
    for dim in WIDTHS:
        settings = settings_of(f"optimizer={optimizer}", "model=tiny", f"model.dim={dim}")
        for each in instantiate(settings.optimizer, "training")(instantiate(settings.model)):
            for group in each.param_groups:
                if group["role"] == "matrices":
                    speeds.add(round(group["lr"] * group["weight_decay"], 9))
    assert len(speeds) == 1 and speeds != {0.0}


def test_each_role_has_a_rate_that_follows_the_schedule(run_of):
    run = run_of("schedule.warmup=4", "steps=20")
    take_step(run)
    reference = reference_of("muon")
    lr = run.env.settings.optimizer["lr"] * reference.run_factor(64, 2, 512, 20) / 4
    expected = {
        "lr": lr,
        "embedding_lr": reference.embedding * lr,
        "head_lr": 2 * reference.head * lr,  # the model has half the reference's width
        "vector_lr": reference.vectors * lr,
    }
    assert run.meter.learning_rates == pytest.approx(expected)


def test_learning_rates_follow_the_expected_length_of_the_run(run_of):
    run = run_of("schedule.warmup=0", "steps=1000")
    run.progress.expected_steps = 50
    take_step(run)
    factor = reference_of("muon").run_factor(64, 2, 512, 50)
    assert factor != 1
    assert run.meter.learning_rates["lr"] == pytest.approx(0.035 * factor)


def test_rates_are_not_scaled_without_a_reference(run_of):
    run = run_of("optimizer.reference=null", "optimizer.lr=0.5", "schedule.warmup=0", "steps=6")
    take_step(run)
    assert run.meter.learning_rates == dict.fromkeys(ROLES.values(), 0.5)


def test_tokens_per_parameter_determines_the_number_of_steps(run_of):
    run = run_of("steps=null", "tokens_per_parameter=2")
    size = run.trainer.model.num_parameters()
    assert run.progress.total_steps == math.ceil(2 * size / 512)
    assert run_of("steps=5", "tokens_per_parameter=2").progress.total_steps == 5


def test_rates_follow_the_estimated_length_while_steps_are_timed(run_of, monkeypatch):
    run = run_of("steps=null", "max_minutes=10", "max_epochs=null")
    clock = [run.env.clock.started]
    monkeypatch.setattr("training.clock.monotonic", lambda: clock[0])
    estimates = []
    for _ in range(8):
        clock[0] += 1.0
        run.progress.step += 1
        assert not run.budget.fit(run.progress)
        estimates.append(run.progress.expected_steps)
        assert run.progress.total_steps == math.inf  # the schedule waits for the fit
    # One-second steps have to fit in 0.92 * 600 s.
    assert estimates[:3] == [math.inf] * 3 and all(540 < n < 560 for n in estimates[3:])
    assert run.trainer.rates.run_factor(estimates[-1]) != 1


def test_an_estimated_length_is_restored_but_does_not_end_the_run(run_of):
    words = ("steps=50", "max_minutes=10")
    run = run_of(*words, folder="run")
    take_step(run)
    run.progress.expected_steps = 20  # as if estimated from slow steps
    run.checkpointer.save(run.progress)
    resumed = run_of(*words, "resume=true", folder="run")
    assert (resumed.progress.total_steps, resumed.progress.expected_steps) == (50, 20)
    without_limit = run_of("steps=50", "max_minutes=null", "resume=true", folder="run")
    assert without_limit.progress.expected_steps == 50
