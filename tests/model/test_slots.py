"""Attention, feed-forward and norm can be combined freely: every combination satisfies the laws."""

from itertools import product

import pytest
import torch

from tests.conftest import CONFIGS, VARIANTS, close, continued, drawn, tree_of, weights
from train import take_step

FFNS = sorted(path.stem for path in (CONFIGS / "ffn").glob("*.yaml"))
NORMS = sorted(path.stem for path in (CONFIGS / "norm").glob("*.yaml"))
PAIRS = [*product(FFNS, NORMS)]
# Softmax attention and a recurrence are combined with every pair of feed-forward and norm. Each
# remaining attention variant is combined with one pair, in turn.
marked = [
    (variant, *pair)
    if variant in ("gqa", "gdn") or pair == PAIRS[i % len(PAIRS)]
    else pytest.param(variant, *pair, marks=pytest.mark.long)
    for i, variant in enumerate(VARIANTS)
    for pair in PAIRS
]


@pytest.mark.parametrize("variant, ffn, norm", marked)
def test_cached_decoding_of_any_combination_matches_the_full_forward(variant, ffn, norm):
    model = drawn(tree_of(variant, f"ffn={ffn}", f"norm={norm}"), torch.float64)
    tokens = torch.randint(128, (2, 13), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(2, 16, torch.float64, "cpu")
    steps = [model(part, cache) for part in tokens.split((5, 1, 1, 6), dim=1)]
    close(torch.cat(steps, dim=1), model(tokens))
    prompts = [[1, 2, 3], [4]]
    assert continued(model, prompts, 5, rows=2) == continued(model, prompts, 5)


@pytest.mark.parametrize("variant, ffn, norm", marked)
def test_any_combination_trains_and_resumes_bit_for_bit(run_of, variant, ffn, norm):
    options = (
        f"attention={variant}",
        f"ffn={ffn}",
        f"norm={norm}",
        "steps=3",
        "batch_tokens=128",
        "model.dim=32",
        "model.hidden=48",
        "micro_batch=2",
        "optimizer=adamw",
    )
    whole = run_of(*options, folder="whole")
    for _ in range(3):
        take_step(whole)
    first = run_of(*options, folder="parts")
    for _ in range(2):
        take_step(first)
    first.checkpointer.save(first.progress)
    second = run_of(*options, "resume=true", folder="parts")
    assert second.progress.step == 2
    take_step(second)
    assert all(value.isfinite().all() for value in weights(whole).values())
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(second)[name]), name
