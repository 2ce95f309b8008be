"""Configs build only what model/ defines, completely specified, and the same weights everywhere."""

import pytest
import torch

from model.attention.base import Attention, LayerSpec
from model.build import build_model, materialize
from model.init import initialize
from run.instantiate import instantiate
from tests.conftest import VARIANTS, tree_of

SPEC = LayerSpec(dim=64, heads=4, context=64, layer=0, depth=2, norm_eps=1e-6)

HOSTILE = [
    "model.layers.torch.hub.load",
    "model.layers.torch",
    "model.layers.F.relu",
    "run.instantiate.import_module",
    "run.instantiate.Path",
    "model.cache.Tensor",
    "model.attention.softmax.Linear",  # ours, but not from there
    "model.attention.base.CrossLayer",
    "model.layers.GatedFeedForward.__init__",
    "model..layers.GatedFeedForward",
    "model.nothing.Here",
    "os.system",
    "torch.hub.load",
    "",
]


@pytest.mark.parametrize("target", HOSTILE)
def test_hostile_targets_are_refused(target):
    with pytest.raises(ValueError, match="written in model/"):
        instantiate({"_target_": target})


@pytest.mark.parametrize("change", [{"colour": 3}, {"dim": 8}, {"kv_heads": None}])
def test_a_knob_too_many_or_too_few_is_refused(change):
    tree = tree_of("gqa")["attention"] | change
    tree = {key: value for key, value in tree.items() if value is not None or key == "window"}
    with pytest.raises(TypeError, match="SoftmaxAttention"):
        instantiate(tree)(SPEC)


@pytest.mark.parametrize("variant", VARIANTS)
def test_first_weights_do_not_depend_on_how_a_model_is_built(variant):
    plain = instantiate(tree_of(variant))
    initialize(plain, seed=3)
    late = materialize(build_model(tree_of(variant)), "cpu")
    torch.manual_seed(99)
    initialize(late, seed=3)
    for (name, a), b in zip(plain.named_parameters(), late.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.any() != name.endswith(
            ("o_proj.weight", "down_proj.weight", "head.weight", "sink", "decay_rate")
        ), name


def test_variants_share_the_weights_they_share():
    first, second = instantiate(tree_of("gqa")), instantiate(tree_of("llama"))
    initialize(first, seed=3), initialize(second, seed=3)
    assert torch.equal(first.embed.weight, second.embed.weight)
    assert not torch.equal(first.blocks[0].ffn.up_proj.weight, first.blocks[1].ffn.up_proj.weight)
    initialize(second, seed=4)
    assert not torch.equal(first.embed.weight, second.embed.weight)


def test_layers_and_seeds_begin_apart():
    values = []
    for seed in (0, 7):
        model = instantiate(tree_of("differential"))
        initialize(model, seed)
        values += [tuple(block.attention.q1.tolist()) for block in model.blocks]
    assert len(set(values)) == 4


def test_an_attention_says_what_it_lacks():
    class Half(Attention):
        def forward(self, x, ctx, cache, carry):
            return x, carry

    with pytest.raises(TypeError, match=r"Half.*attention_flops.*new_cache"):
        Half()
