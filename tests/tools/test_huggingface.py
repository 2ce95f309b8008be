"""A config.json is either read in the same way as by transformers, or refused."""

import pytest
import torch

from model.build import build_model
from run.instantiate import instantiate
from tests.conftest import close, redraw, tree_of
from tests.tools.test_parity import CLASSES
from tools.formats.decoder import attention_knobs
from tools.formats.hf_config import IMPORTED, from_hf_config, to_hf_config
from tools.formats.weights import hf_weights

BACK = [variant for variant, name in CLASSES.items() if f"{name}ForCausalLM" in IMPORTED]
YARN = {"rope_type": "yarn", "factor": 4.0, "attention_factor": None}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def read_back(config: dict) -> dict:
    from transformers import AutoConfig

    (name,) = config["architectures"]
    return from_hf_config(AutoConfig.for_model(**config).to_dict(), name)


@pytest.mark.parametrize(
    ("scaling", "kind", "knobs"),
    [
        ({"type": "linear", "factor": 4.0}, "LinearScaling", {"factor": 4.0}),
        (LLAMA3, "Llama3", {"factor": 8.0, "low": 1.0, "high": 4.0, "context": 32}),
        (YARN, "YaRN", {"factor": 4.0, "fast": 32.0, "slow": 1.0, "context": 64}),
    ],
)
def test_configs_of_transformers_4_can_be_read(scaling, kind, knobs):
    """transformers 4 wrote rope_theta and rope_scaling, and omitted defaults or wrote null."""
    config = to_hf_config(tree_of("llama"))
    for key in ("mlp_bias", "head_dim", "rope_parameters"):
        del config[key]
    config |= {"rope_theta": 500000.0, "rope_scaling": scaling, "num_key_value_heads": None}
    tree = read_back(config | {"pretraining_tp": 1})
    attention = tree["attention"]
    assert attention["rope_scaling"] == {"_target_": f"model.rope.{kind}"} | knobs
    assert (attention["rope_base"], attention["kv_heads"]) == (500000.0, 4)


def test_a_top_level_original_context_takes_precedence():
    from transformers import AutoConfig

    config = to_hf_config(tree_of("llama")) | {"original_max_position_embeddings": 16}
    config["rope_parameters"] = LLAMA3 | {"rope_theta": 500.0}
    del config["rope_scaling"]
    theirs = AutoConfig.for_model(**config)
    theirs.standardize_rope_params()  # as transformers does before computing frequencies
    assert theirs.rope_parameters["original_max_position_embeddings"] == 16
    assert read_back(config)["attention"]["rope_scaling"]["context"] == 16


@pytest.mark.parametrize("variant", BACK)
def test_an_exported_config_is_read_back_unchanged(variant):
    """An exported config builds equal modules, even if a size is null."""
    tree = tree_of(*variant.split(), "model.depth=3")
    again = read_back(to_hf_config(tree))
    blocks = [build_model(each, "meta").blocks for each in (tree, again)]
    for ours, theirs in zip(*blocks, strict=True):
        plain = [
            {k: v for k, v in vars(block.attention).items() if k[0] != "_"}
            for block in (ours, theirs)
        ]
        assert plain[0] == plain[1]


@pytest.mark.parametrize(
    "variant", ["gqa", "l2norm", "differential attention.qk_norm=null", "mla", "kda"]
)
def test_the_configured_epsilon_applies_to_every_norm(variant):
    """In transformers, rms_norm_eps applies to every norm, including norms without weights."""
    import transformers

    tree = tree_of(*variant.split()) | {"norm_eps": 0.1}
    ours = redraw(instantiate(tree)).eval()
    config = to_hf_config(tree)
    (name,) = config["architectures"]
    how = transformers.AutoConfig.for_model(**config, pad_token_id=None)
    theirs = getattr(transformers, name)(how).eval()
    theirs.load_state_dict(hf_weights(ours, name))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["mla", "mla attention.query_rank=24 attention.bias=true"])
def test_exported_latent_attention_does_not_depend_on_rope_interleave(variant):
    """mlx-lm, vLLM and llama.cpp rotate neighboring rows and ignore rope_interleave."""
    import transformers

    ours = redraw(instantiate(tree_of(*variant.split()))).eval()
    config = to_hf_config(tree_of(*variant.split()))
    assert config.pop("rope_interleave") is True
    how = transformers.AutoConfig.for_model(**config, pad_token_id=None)
    theirs = transformers.DeepseekV3ForCausalLM(how).eval()
    theirs.load_state_dict(hf_weights(ours, "DeepseekV3ForCausalLM"))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_a_rope_scaling_that_transformers_lacks_is_refused():
    """Otherwise, it would be exported without any scaling."""
    tree = tree_of("llama", "attention.rope_scaling={_target_:model.rope.Scaling,factor:4}")
    with pytest.raises(ValueError, match=r"this scaling \({'_target_': 'model.rope.Scaling'"):
        to_hf_config(tree)


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
    layers = attention_knobs(read_back(config))
    assert [layer["rope_base"] for layer in layers] == [2000000.0, None] * 2
    config = sizes | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    config |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    layers = attention_knobs(read_back(config | {"num_key_value_heads": 2}))
    assert [layer["window"] for layer in layers] == [None, 5, 5, 5]
