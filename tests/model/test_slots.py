"""Attention, feed-forward and norm can be combined freely."""

from itertools import product

import pytest
import torch

from tests.conftest import CONFIGS, COVERED, VARIANTS, close, drawn, redraw, tree_of, weights
from train import take_step

FFNS = sorted(path.stem for path in (CONFIGS / "ffn").glob("*.yaml"))
NORMS = sorted(path.stem for path in (CONFIGS / "norm").glob("*.yaml"))


def combinations() -> list:
    """All combinations; by default, only those that differ from the default model in one choice."""
    cases = []
    for variant, ffn, norm in product(VARIANTS, FFNS, NORMS):
        choices = ((variant, "gqa"), (ffn, "swiglu"), (norm, "rmsnorm"))
        changed = [choice for choice, default in choices if choice != default]
        is_long = len(changed) > 1 or variant in COVERED
        marks = [pytest.mark.long] if is_long else []
        cases.append(pytest.param(variant, ffn, norm, marks=marks))
    return cases


@pytest.mark.parametrize("variant, ffn, norm", combinations())
def test_any_combination_trains_and_resumes_bit_for_bit(run_of, variant, ffn, norm):
    options = (
        f"attention={variant}",
        f"ffn={ffn}",
        f"norm={norm}",
        "steps=2",
        "batch_tokens=128",
        "model.dim=32",
        "model.hidden=48",
        "micro_batch=2",
        "optimizer=adamw",
    )
    run = run_of(*options, folder="run")
    redraw(run.trainer.model)  # behind a layer of zeros, a parameter would have no gradient
    take_step(run)
    run.checkpointer.save(run.progress)
    resumed = run_of(*options, "resume=true", folder="run")
    assert resumed.progress.step == 1
    for each in (run, resumed):
        take_step(each)
    for name, value in weights(run).items():
        assert value.isfinite().all(), name
        assert torch.equal(value, weights(resumed)[name]), name


# For every attention variant with the default feed-forward and norm, this is a law.
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("ffn", FFNS)
def test_cached_decoding_matches_the_full_forward(ffn, norm):
    model = drawn(tree_of("gqa", f"ffn={ffn}", f"norm={norm}"), torch.float64)
    tokens = torch.randint(128, (2, 13), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(2, 16, torch.float64, "cpu")
    steps = [model(part, cache) for part in tokens.split((5, 1, 1, 6), dim=1)]
    close(torch.cat(steps, dim=1), model(tokens))
