"""Models and their config.json match independent implementations in `transformers`."""

import pytest
import torch

from model.build import build_model
from model.context import ForwardContext
from run.instantiate import instantiate
from tests.conftest import YARN, close, redraw, tree_of
from tools import attention_map
from tools.formats.decoder import attention_options
from tools.formats.hf_config import IMPORTED, from_hf_config, to_hf_config
from tools.formats.weights import hf_weights

FULL = "full_attention"
SCALED = "attention.rope_scaling={_target_:model.rope."
ROPE_NO_NORMS = "attention.kinds.rope.qk_norm=null attention.kinds.nope.qk_norm=null"
LOCAL_NO_NORMS = "attention.kinds.local.qk_norm=null attention.kinds.full.qk_norm=null"
# A variant with overrides: the transformers class. Heads of 32 features are wider, and heads of 8
# features narrower, than dim / heads.
CLASSES = {
    "llama": "Llama",
    "llama attention.bias=true model.tied=true ffn=geglu": "Llama",
    f"llama {SCALED}LinearScaling,factor:4}}": "Llama",
    f"llama {SCALED}Llama3,factor:8,low:1,high:4,context:16}}": "Llama",
    f"llama {YARN}": "Llama",
    "gqa": "Qwen3",
    "mqa": "Qwen3",
    "mha": "Qwen3",
    "sliding_window": "Qwen3",
    "gqa attention.head_dim=32": "Qwen3",
    "local_global": "Qwen3",
    "sliding_window attention.qk_norm=null attention.head_dim=8": "Mistral",
    f"nope {ROPE_NO_NORMS}": "SmolLM3",
    f"nope {ROPE_NO_NORMS} attention.kinds.rope.window=5": "SmolLM3",
    f"window_nope {LOCAL_NO_NORMS}": "SmolLM3",
    "llama4": "Llama4",
    "l2norm": "Llama4",
    "l2norm attention.head_dim=32": "Llama4",
    "gpt_oss": "GraniteSWA",
    "sink attention.qk_norm=null": "GraniteSWA",
    "sink attention.qk_norm=null attention.head_dim=32": "GraniteSWA",
    "mla": "DeepseekV3",
    f"mla {YARN}": "DeepseekV3",
    "mla attention.query_rank=24 attention.bias=true": "DeepseekV3",
    "differential attention.qk_norm=null": "DiffLlama",
    "differential attention.qk_norm=null attention.head_dim=32": "DiffLlama",
    "gdn": "Qwen3_5",
    "gdn attention.kinds.full.head_dim=32": "Qwen3_5",
    "gated": "Qwen3_5",
    "gated attention.rope_fraction=0.5": "Qwen3_5",
    "kda": "KimiLinear",
    "kda attention.kinds.recurrent.kernel=3 attention.kinds.full.query_rank=24": "KimiLinear",
    "mla attention.rope_base=null": "KimiLinear",
}


def both_of(variant: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    import transformers

    # With a large epsilon, a norm with another epsilon has other logits.
    tree = tree_of(*variant.split(), "model.depth=3") | {"norm_eps": 0.1}
    ours, config = redraw(instantiate(tree)).eval(), to_hf_config(tree)
    # Programs that ignore this entry assume true, as transformers does without it.
    config.pop("rope_interleave", None)
    how = transformers.AutoConfig.for_model(
        **config, attn_implementation="eager", pad_token_id=None
    )
    name = f"{CLASSES[variant]}ForCausalLM"
    assert config["architectures"] == [name]
    theirs = getattr(transformers, name)(how).eval()
    theirs.load_state_dict(hf_weights(ours, name), strict=not tree["tied"])
    return ours, theirs


def compare(variant: str) -> tuple[float, float]:
    """Largest fp32 differences of our logits from theirs, and of cached from full forwards."""
    ours, theirs = both_of(variant)
    tokens = torch.randint(128, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        full, cache = ours(tokens), ours.new_cache(2, 33, torch.float32, "cpu")
        cached = torch.cat(
            [ours(chunk, cache) for chunk in tokens.split([14, 1, 1, 17], dim=1)], dim=1
        )
        return (full - theirs(tokens).logits).abs().max().item(), (cached - full).abs().max().item()


@pytest.mark.parametrize("variant", CLASSES)
def test_logits_match_transformers(variant):
    assert max(compare(variant)) < 1e-4


@pytest.mark.parametrize("variant", ["gqa", "sliding_window", "mla"])
def test_attention_maps_match_transformers(variant):
    ours, theirs = both_of(variant)
    tokens = torch.randint(128, (1, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens, output_attentions=True).attentions
    maps = attention_map.attention_weights(ours, tokens[0].tolist())
    assert [*maps] == [0, 1, 2]
    for mine, layer in zip(maps.values(), expected, strict=True):
        close(mine, layer[0], atol=1e-5, rtol=0)


def compare_softcap() -> float:
    """Compare only the attention layer, because no class combines our block with a soft-cap."""
    from transformers import Gemma2Config
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2RotaryEmbedding

    tree = tree_of("softcap", "attention.softcap=2.0", "attention.qk_norm=null")
    ours = redraw(instantiate(tree)).blocks[1].attention
    config = Gemma2Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0, num_hidden_layers=2, layer_types=[FULL] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )  # fmt: skip
    theirs = Gemma2Attention(config, 1).eval()
    theirs.load_state_dict(ours.state_dict())
    x = 3 * torch.randn(2, 33, 64, generator=torch.Generator().manual_seed(1))
    ctx = ForwardContext(x[..., 0], None, None, None)
    mask = torch.zeros(33, 33).masked_fill(~torch.ones(33, 33, dtype=torch.bool).tril(), -torch.inf)
    with torch.no_grad():
        y, _ = theirs(x, Gemma2RotaryEmbedding(config)(x, ctx.positions), mask)
        return (ours(x, ctx, None, {})[0] - y).abs().max().item()


def test_softcap_attention_matches_gemma_2():
    assert compare_softcap() < 1e-4


def read_back(config: dict) -> dict:
    from transformers import AutoConfig

    (name,) = config["architectures"]
    return from_hf_config(AutoConfig.for_model(**config).to_dict(), name)


@pytest.mark.parametrize(
    "variant", [variant for variant, name in CLASSES.items() if f"{name}ForCausalLM" in IMPORTED]
)
def test_an_exported_config_builds_the_same_model(variant):
    tree = tree_of(*variant.split(), "model.depth=3")
    again = read_back(to_hf_config(tree))
    blocks = [build_model(each, "meta").blocks for each in (tree, again)]
    for pair in zip(*blocks, strict=True):
        ours, theirs = (
            {key: value for key, value in vars(block.attention).items() if key[0] != "_"}
            for block in pair
        )
        assert ours == theirs


def test_a_config_of_transformers_4_can_be_read():
    """transformers 4 wrote rope_theta and rope_scaling, and omitted defaults or wrote null."""
    config = to_hf_config(tree_of("llama"))
    for key in ("mlp_bias", "head_dim", "rope_parameters"):
        del config[key]
    scaling = {"type": "yarn", "factor": 4.0, "attention_factor": None}
    config |= {"rope_theta": 500000.0, "rope_scaling": scaling, "num_key_value_heads": None}
    attention = read_back(config)["attention"]
    yarn = {"factor": 4.0, "fast": 32.0, "slow": 1.0, "context": 64}
    assert attention["rope_scaling"] == {"_target_": "model.rope.YaRN"} | yarn
    assert (attention["rope_base"], attention["kv_heads"]) == (500000.0, 4)


def test_mistral_layer_types_must_match_the_window():
    config = to_hf_config(tree_of("sliding_window", "attention.qk_norm=null"))
    assert read_back(config)["attention"]["window"] == 5
    # transformers would ignore layer_types.
    with pytest.raises(ValueError, match="sliding_window=5"):
        read_back(config | {"layer_types": ["full_attention"] * 2})


def test_entries_that_a_class_fills_in_are_read():
    """For example, Qwen2 and SmolLM3 derive the kinds of layers from an interval."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
    config = sizes | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
    config |= {"no_rope_layer_interval": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    layers = attention_options(read_back(config))
    assert [layer["rope_base"] for layer in layers] == [2000000.0, None] * 2
    config = sizes | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    config |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    layers = attention_options(read_back(config | {"num_key_value_heads": 2}))
    assert [layer["window"] for layer in layers] == [None, 5, 5, 5]


if __name__ == "__main__":  # python -m tests.tools.test_parity prints the differences
    print("| attention= | class of transformers | largest difference | cached to full |")
    print("|---|---|---|---|")
    for variant, kind in CLASSES.items():
        theirs, cached = compare(variant)
        print(f"| `{variant}` | {kind}ForCausalLM | {theirs:.0e} | {cached:.0e} |")
    print(f"| `softcap attention.qk_norm=null` | Gemma2Attention | {compare_softcap():.0e} | |")
