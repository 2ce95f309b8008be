"""Configs can build only classes in model/, must set all options, and give reproducible weights."""

import pytest
import torch

from model.attention.base import LayerSpec
from model.attention.softmax import SoftmaxAttention
from model.build import build_model
from run import checkpoint
from run import instantiate as instantiation
from run.checkpoint import load_model
from run.instantiate import instantiate
from tests.conftest import VARIANTS, close, poisoned_memory, tree_of
from train import take_step

SPEC = LayerSpec(dim=64, heads=4, context=64, layer=0, depth=2, norm_eps=1e-6)

HOSTILE = [
    "model.layers.torch.hub.load",
    "model.attention.softmax.Linear",  # defined in model/, but imported there from a different file
    "model.attention.base.Shared",  # a type alias
    "model.layers.GatedFeedForward.__init__",
    "run.instantiate.import_module",
    "os.system",
]


@pytest.mark.parametrize("target", HOSTILE)
def test_hostile_targets_are_refused(target):
    with pytest.raises(ValueError, match="_target_"):
        instantiate({"_target_": target})


def test_unknown_and_missing_options_are_refused():
    tree = tree_of("gqa")["attention"]
    with pytest.raises(ValueError, match="colour"):
        instantiate(tree | {"colour": 3})(SPEC)
    del tree["kv_heads"]
    with pytest.raises(ValueError, match="kv_heads"):
        instantiate(tree)(SPEC)


@pytest.mark.parametrize("variant", VARIANTS)
def test_initial_weights_depend_only_on_the_seed_and_parameter_names(variant):
    tree = tree_of(variant)
    first = build_model(tree, seed=3)
    torch.manual_seed(99)
    with poisoned_memory():
        second = build_model(tree, seed=3)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_parameters_of_the_same_name_start_equally_in_all_variants():
    first = build_model(tree_of("gqa"), seed=3)
    second = build_model(tree_of("llama"), seed=3)
    assert torch.equal(first.embed.weight, second.embed.weight)
    assert not torch.equal(first.blocks[0].ffn.up_proj.weight, first.blocks[1].ffn.up_proj.weight)
    other_seed = build_model(tree_of("llama"), seed=4)
    assert not torch.equal(first.embed.weight, other_seed.embed.weight)


def test_only_the_last_projections_and_the_head_start_at_zero():
    model = build_model(tree_of("gqa"))
    zeros = {name.split(".")[-2] for name, p in model.named_parameters() if not p.any()}
    assert zeros == {"o_proj", "down_proj", "head"}


def test_vectors_except_biases_stay_in_fp32_in_a_low_precision_model():
    """Rounding a sink's logit or a decay rate would change its exponential too much."""
    sizes = ("attention.bias=true", "model.depth=1")
    sink = dict(build_model(tree_of("sink", *sizes), dtype=torch.bfloat16).named_parameters())
    assert sink["blocks.0.attention.q_proj.weight"].dtype == torch.bfloat16
    assert sink["blocks.0.attention.q_proj.bias"].dtype == torch.bfloat16
    assert sink["blocks.0.attention.sink"].dtype == torch.float32
    assert sink["norm.weight"].dtype == torch.float32


class Buffered(SoftmaxAttention):
    """Has a buffer that checkpoints store."""

    def __init__(self, spec: LayerSpec, **options):
        super().__init__(spec, **options)
        self.register_buffer("gain", torch.linspace(0.5, 2.0, spec.heads))


def test_buffers_are_restored_on_loading_and_resuming(run_of, monkeypatch):
    target = f"{__name__}.Buffered"
    resolve = instantiation.resolve_target

    def resolve_ours(path: str, package: str):
        return Buffered if path == target else resolve(path, package)

    monkeypatch.setattr(instantiation, "resolve_target", resolve_ours)
    overrides = (f"attention._target_={target}", "batch_tokens=256")
    with poisoned_memory():
        run = run_of(*overrides, folder="run")
    attention = run.trainer.model.blocks[1].attention
    close(attention.gain, torch.linspace(0.5, 2.0, 4))

    # Change the buffer as training would change a running mean.
    take_step(run)
    attention.gain.mul_(1.001)  # not representable in bf16
    run.checkpointer.save(run.progress)
    newest = checkpoint.newest_checkpoint(run.env.run_dir)
    with poisoned_memory():
        loaded = load_model(newest, "cpu", torch.bfloat16)  # buffers stay in fp32
        resumed = run_of(*overrides, "resume=true", folder="run").trainer.model
    expected = dict(run.trainer.model.named_buffers())
    for model in (loaded, resumed):
        close(dict(model.named_buffers()), expected, rtol=0, atol=0)
