"""Configs can build only classes in model/, must set all options, and give reproducible weights."""

import pytest
import torch

from inference.quantize import optimize_for_decoding
from model.attention.base import Attention, LayerSpec
from model.attention.softmax import SoftmaxAttention
from model.build import build_model
from run import checkpoint
from run import instantiate as instantiation
from run.checkpoint import load_model
from run.instantiate import instantiate, instantiate_model
from tests.conftest import VARIANTS, close, drawn, poisoned_memory, tree_of
from train import take_step

SPEC = LayerSpec(dim=64, heads=4, context=64, layer=0, depth=2, norm_eps=1e-6)

HOSTILE = [
    "model.layers.torch.hub.load",
    "model.layers.torch",
    "model.layers.F.relu",
    "run.instantiate.import_module",
    "run.instantiate.Path",
    "model.cache.Tensor",
    "model.attention.softmax.Linear",  # defined in model/, but imported there from a different file
    "model.attention.base.CrossLayer",
    "model.layers.GatedFeedForward.__init__",
    "model..layers.GatedFeedForward",
    "model.nothing.Here",
    "os.system",
    "torch.hub.load",
    "",
]

# Parameters that are initialized to zero.
ZEROS = (
    ".o_proj.weight",
    ".down_proj.weight",
    "head.weight",
    "sink",
    "decay_rate",
    "proj.bias",
    "k_norm.bias",
)


@pytest.mark.parametrize("target", HOSTILE)
def test_hostile_targets_are_refused(target):
    with pytest.raises(ValueError, match="defined in model/"):
        instantiate({"_target_": target})


@pytest.mark.parametrize("change", [{"colour": 3}, {"dim": 8}, {"kv_heads": None}])
def test_unknown_and_missing_knobs_are_refused(change):
    tree = tree_of("gqa")["attention"] | change
    tree = {key: value for key, value in tree.items() if value is not None or key == "window"}
    with pytest.raises(ValueError, match="SoftmaxAttention"):
        instantiate(tree)(SPEC)


@pytest.mark.parametrize("variant", [*VARIANTS, "mla attention.query_rank=24"])
def test_initial_weights_depend_only_on_the_seed_and_parameter_names(variant):
    tree = tree_of(*variant.split())
    first = build_model(tree, seed=3)
    torch.manual_seed(99)
    with poisoned_memory():
        second = build_model(tree, seed=3)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.any() != name.endswith(ZEROS), name


def test_variants_initialize_parameters_of_the_same_name_equally():
    first = build_model(tree_of("gqa"), seed=3)
    second = build_model(tree_of("llama"), seed=3)
    assert torch.equal(first.embed.weight, second.embed.weight)
    assert not torch.equal(first.blocks[0].ffn.up_proj.weight, first.blocks[1].ffn.up_proj.weight)
    other_seed = build_model(tree_of("llama"), seed=4)
    assert not torch.equal(first.embed.weight, other_seed.embed.weight)


def test_initial_weights_differ_across_layers_and_seeds():
    values = set()
    for seed in (0, 7):
        model = build_model(tree_of("differential"), seed=seed)
        values |= {tuple(block.attention.q1.tolist()) for block in model.blocks}
    assert len(values) == 4


def test_a_model_on_the_meta_device_has_the_same_shapes():
    tree = tree_of("alibi", "model.tied=true")
    shapes = []
    for device in ("cpu", "meta"):
        model = build_model(tree, device)
        assert {tensor.device.type for tensor in model.state_dict().values()} == {device}
        shapes.append({name: tensor.shape for name, tensor in model.state_dict().items()})
    assert shapes[0] == shapes[1]


def test_an_option_without_a_type_annotation_is_refused():
    def attention(spec, *, buckets):
        return buckets

    with pytest.raises(ValueError, match=r"no type annotation for buckets"):
        instantiation.check_arguments(attention, {"buckets": 4}, "model.attention", is_partial=True)


def test_an_attention_class_with_missing_methods_is_refused():
    class Half(Attention):
        def forward(self, x, ctx, cache, carry):
            return x, carry

    with pytest.raises(TypeError, match=r"Half.*attention_flops"):
        Half()


class Buffered(SoftmaxAttention):
    """Scales each head's output by buffers of two dtypes that checkpoints store."""

    def __init__(self, spec: LayerSpec, **knobs):
        super().__init__(spec, **knobs)
        self.register_buffer("gain", torch.linspace(0.5, 2.0, spec.heads))
        self.register_buffer("is_even", torch.arange(spec.heads) % 2 == 0)

    def attend(self, q, k, v, visible, score_bias=None):
        y = super().attend(q, k, v, visible, score_bias)  # (B, T, H, E)
        factor = torch.where(self.is_even, self.gain, 1.0)
        return y * factor[:, None].type_as(y)


@pytest.fixture
def buffered_tree(monkeypatch) -> dict:
    """The config of a model with buffers; the resolver is patched to accept the class above."""
    target = f"{__name__}.Buffered"
    resolve = instantiation.resolve_target

    def resolve_ours(path: str, package: str):
        return Buffered if path == target else resolve(path, package)

    monkeypatch.setattr(instantiation, "resolve_target", resolve_ours)
    return tree_of("gqa", f"attention._target_={target}")


def test_buffers_are_restored_on_loading_and_resuming(buffered_tree, run_of):
    target = buffered_tree["attention"]["_target_"]
    overrides = (f"attention._target_={target}", "batch_tokens=256", "save_every=3")
    with poisoned_memory():
        run = run_of(*overrides, folder="run")
    attention = run.trainer.model.blocks[1].attention
    close(attention.gain, torch.linspace(0.5, 2.0, 4))

    # Change the buffers as training would change counts or running means.
    for _ in range(3):
        take_step(run)
    attention.gain.mul_(1.5)
    attention.is_even.logical_not_()
    run.checkpointer.save(run.progress)
    with poisoned_memory():
        loaded = load_model(checkpoint.newest_checkpoint(run.env.run_dir), "cpu")
        resumed = run_of(*overrides, "resume=true", folder="run")
    expected = dict(run.trainer.model.named_buffers())
    for model in (loaded, resumed.trainer.model):
        close(dict(model.named_buffers()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("int8", [False, True])
def test_buffers_keep_their_dtype_in_a_low_precision_model(
    int8, buffered_tree, tokenizer, tmp_path
):
    tree = buffered_tree | {"vocab_size": tokenizer.vocab_size}
    exact = drawn(tree)
    exact.blocks[0].attention.gain[0] = 1.001  # not representable in bf16
    weights = exact.state_dict()
    folder = checkpoint.save(tmp_path, 1, weights, {"model": tree}, tokenizer.files, {})
    model = load_model(folder, "cpu", torch.bfloat16)
    assert {p.dtype for p in model.parameters() if p.ndim > 1} == {torch.bfloat16}
    close(dict(model.named_buffers()), dict(exact.named_buffers()), rtol=0, atol=0)
    optimize_for_decoding(model, int8)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    cache = model.new_cache(1, 16, torch.bfloat16, "cpu")
    atol = 0.3 if int8 else 0.2  # with int8, the inputs of products are also rounded
    with torch.no_grad():
        close(model(tokens, cache).float(), exact(tokens), rtol=0, atol=atol)


@pytest.mark.parametrize("variant", [*VARIANTS, "llama attention.bias=true"])
def test_vectors_except_biases_stay_in_fp32_in_a_low_precision_model(variant):
    """Rounding decay_rate or sink logits would change their exponentials too much."""
    model = instantiate_model(tree_of(*variant.split()), "meta", torch.bfloat16)
    dtypes = {}
    for name, parameter in model.named_parameters():
        is_vector = parameter.ndim == 1 and not name.endswith("proj.bias")
        dtypes.setdefault(is_vector, set()).add(parameter.dtype)
    assert dtypes == {True: {torch.float32}, False: {torch.bfloat16}}
