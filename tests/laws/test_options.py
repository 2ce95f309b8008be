"""The laws hold for random combinations of options, including combinations without a yaml."""

import random

import pytest

from run.instantiate import instantiate
from tests.conftest import redraw, settings_of
from tests.laws import test_laws as laws

SCALINGS = (
    {"_target_": "model.rope.LinearScaling", "factor": 3.0},
    {"_target_": "model.rope.Llama3", "factor": 4.0, "low": 1.0, "high": 4.0, "context": 16},
    {"_target_": "model.rope.YaRN", "factor": 4.0, "fast": 8, "slow": 1, "context": 16},
)


def softmax(draw: random.Random, heads: int) -> dict:
    kind = draw.choice(("softmax.SoftmaxAttention", "differential.DifferentialAttention"))
    kv_heads = [n for n in (1, 2, 3, 4, 6) if heads % n == 0]
    if "differential" in kind:
        kv_heads = [n for n in kv_heads if n % 2 == 0]
    rotates = draw.random() < 0.8
    reach = draw.randint(1, 14)
    window, chunk = draw.choice(((None, None), (reach, None), (None, reach)))
    return {
        "_target_": f"model.attention.{kind}",
        "kv_heads": draw.choice(kv_heads),
        "rope_base": draw.choice((100.0, 10000.0)) if rotates else None,
        "rope_fraction": draw.choice((1.0, 0.5)),
        "rope_scaling": draw.choice((None, *SCALINGS)) if rotates else None,
        "qk_norm": draw.choice((None, "before_rope", "after_rope")),
        "window": window,
        "chunk": chunk,
        "softcap": draw.choice((None, None, 5.0)),
        "sink": draw.random() < 0.3,
        "gated": draw.random() < 0.3,
        "dropout": draw.choice((0.0, 0.5)),
        "bias": draw.random() < 0.3,
    }


def value_residual(draw: random.Random, heads: int) -> dict:
    options = softmax(draw, heads)
    return options | {"_target_": "model.attention.cross_layer.ValueResidualAttention"}


def latent(draw: random.Random, heads: int) -> dict:
    return {
        "_target_": "model.attention.mla.LatentAttention",
        "rank": draw.choice((8, 24)),
        "head_dim": draw.choice((4, 16)),
        "rope_dim": draw.choice((2, 8)),
        "rope_base": draw.choice((None, 10000.0)),
        "query_rank": draw.choice((None, 12)),
        "rope_scaling": draw.choice((None, *SCALINGS)),
    }


def recurrent(draw: random.Random, heads: int) -> dict:
    return {
        "_target_": "model.attention.recurrent.GatedRecurrence",
        "head_dim": draw.choice((4, 16)),
        "kernel": draw.choice((1, 2, 4, 7)),
        "chunk": draw.choice((1, 3, 5, 64)),
        "decay": draw.choice(("head", "channel")),
        "erase": draw.random() < 0.7,
        "gate": draw.choice(("silu", "sigmoid")),
        "low_rank": draw.random() < 0.5,
    }


def drawn(seed: int) -> dict:
    """A model config of two layers, whose attention variants often differ."""
    draw = random.Random(seed)
    heads = draw.choice((4, 6))
    if draw.random() < 0.2:
        # This variant reads an earlier layer of its kind, so it cannot be mixed with others.
        attention = value_residual(draw, heads)
    else:
        kinds = {}
        for kind in "ab":
            options = draw.choice((softmax, softmax, softmax, latent, recurrent))(draw, heads)
            kinds[kind] = options | {"_partial_": True}
        pattern = draw.choice((["a", "b"], ["a", "a"]))
        attention = {
            "_target_": "model.attention.hybrid.hybrid",
            "pattern": pattern,
            "kinds": {kind: kinds[kind] for kind in pattern},
        }
    shape = {
        "vocab_size": 128,
        "depth": 2,
        "heads": heads,
        "dim": 16 * heads,
        "tied": draw.random() < 0.3,
        "attention": attention | {"_partial_": True},
    }
    return settings_of("model=tiny", "context=64").model | shape


MORE = [pytest.param(seed, marks=pytest.mark.long) for seed in range(20, 240)]


@pytest.mark.parametrize("seed", [*range(20), *MORE])
def test_random_combinations_of_options_satisfy_the_laws(seed):
    model = redraw(instantiate(drawn(seed))).double().eval()
    chunks = random.Random(seed).choice(((13,), (1,) * 13, (5, 1, 1, 6), (2, 11)))
    laws.test_cached_decoding_matches_the_full_forward(model, chunks)
    laws.test_each_row_of_a_ragged_batch_matches_the_same_row_alone(model, chunks)
    laws.test_future_tokens_do_not_affect_the_logits(model)
    laws.test_packed_documents_match_separate_documents(model)
    laws.test_cache_rows_can_be_reset_and_copied(model)
    laws.test_cache_bytes_equal_the_allocated_bytes(model, 9)
    laws.test_every_parameter_learns_from_its_initial_value(model)
