"""A config.json says to us what it says to transformers, or nothing."""

import pytest
import torch

from run.instantiate import instantiate
from tests.conftest import close, redraw, tree_of
from tests.tools.test_parity import CLASSES
from tools import export_hf
from tools.formats import hf_config


@pytest.mark.parametrize(
    ("scaling", "kind"),
    [
        ({"type": "linear", "factor": 4.0}, {"_target_": "model.rope.Linear", "factor": 4.0}),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            {
                "_target_": "model.rope.Llama3",
                "factor": 8.0,
                "low": 1.0,
                "high": 4.0,
                "context": 32,
            },
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": None},
            {
                "_target_": "model.rope.YaRN",
                "factor": 4.0,
                "fast": 32.0,
                "slow": 1.0,
                "context": 64,
            },
        ),
    ],
)
def test_older_configs_are_read(scaling, kind):
    """transformers 4 wrote rope_theta and rope_scaling, left out what was usual, and said null. Newer keys give way."""
    from transformers import AutoConfig

    config = hf_config.to_hf_config(tree_of("llama"))
    for key in ("mlp_bias", "head_dim"):
        del config[key]
    config |= {
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "num_key_value_heads": None,
        "pretraining_tp": 1,
    }
    attention = hf_config.from_hf_config(config)["attention"]
    assert (attention["rope_scaling"], attention["rope_base"], attention["kv_heads"]) == (
        kind,
        500000.0,
        4,
    )
    theirs = AutoConfig.for_model(**config).rope_parameters
    assert (theirs["rope_theta"], theirs["factor"]) == (500000.0, kind["factor"])


@pytest.mark.filterwarnings("ignore")  # of transformers, about a config that lacks something
@pytest.mark.parametrize("variant", CLASSES)
def test_what_is_left_out_is_taken_as_transformers_takes_it(variant):
    """Or else refused, key by key: a class may take for granted what our layers do not do."""
    from transformers import AutoConfig

    whole, refused = hf_config.to_hf_config(tree_of(*variant.split(), "model.depth=3")), set()
    for key in whole:
        config = {name: value for name, value in whole.items() if name != key}
        try:
            ours = hf_config.from_hf_config(config)
        except ValueError:
            refused.add(key)
            continue
        theirs = AutoConfig.for_model(**{"model_type": whole["model_type"]} | config).to_dict()
        assert (
            hf_config.from_hf_config(theirs | {"architectures": whole["architectures"]}) == ours
        ), key
    assert refused >= {"architectures", *hf_config.SHAPE.values()}


@pytest.mark.parametrize("variant", CLASSES)
def test_a_config_is_read_as_it_was_written(variant):
    """Into modules of the same attributes, where it says null for a size too."""
    tree = tree_of(*variant.split(), "model.depth=3")
    again = hf_config.from_hf_config(hf_config.to_hf_config(tree))
    with torch.device("meta"):
        pairs = zip(instantiate(tree).blocks, instantiate(again).blocks, strict=True)
    for ours, theirs in pairs:
        plain = [
            {k: v for k, v in vars(block.attention).items() if k[0] != "_"}
            for block in (ours, theirs)
        ]
        assert plain[0] | {"chunk": None} == plain[1] | {
            "chunk": None
        }  # which changes no result of the delta rule
        assert variant.startswith("delta") or plain[0] == plain[1]


def test_norms_are_computed_with_their_epsilon():
    """In a folder of transformers it is rms_norm_eps: of every norm, of those without weights too."""
    from transformers import AutoConfig, DiffLlamaForCausalLM, Llama4ForCausalLM, Qwen3ForCausalLM

    for variant, kind in (
        ("gqa", Qwen3ForCausalLM),
        ("l2norm", Llama4ForCausalLM),
        ("differential", DiffLlamaForCausalLM),
    ):
        tree = tree_of(variant) | {"norm_eps": 0.1}
        ours = redraw(instantiate(tree)).eval()
        theirs = kind(
            AutoConfig.for_model(**hf_config.to_hf_config(tree), pad_token_id=None)
        ).eval()
        theirs.load_state_dict(export_hf.hf_weights(ours, hf_config.choose_architecture(tree)))
        tokens = torch.arange(20)[None]
        with torch.no_grad():
            close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_a_scaling_that_transformers_lacks_is_refused():
    """It would be exported as no scaling at all."""
    tree = tree_of("llama", "attention.rope_scaling={_target_:model.rope.Scaling,factor:4}")
    with pytest.raises(ValueError, match=r"this scaling \({'_target_': 'model.rope.Scaling'"):
        hf_config.to_hf_config(tree)


@pytest.mark.parametrize("variant", ["chunked", "sink", "gated"])
def test_layer_types_that_are_null_are_refused(variant):
    """Transformers would take other types than full ones."""
    config = hf_config.to_hf_config(tree_of(variant)) | {"layer_types": None}
    with pytest.raises(ValueError, match="not a config of"):
        hf_config.from_hf_config(config)


def test_layer_types_of_a_mistral_decide():
    config, full = (
        hf_config.to_hf_config(tree_of("sliding_window", "attention.qk_norm=null")),
        ["full_attention"] * 2,
    )
    found = [
        hf_config.from_hf_config(config | more)["attention"] for more in ({}, {"layer_types": full})
    ]
    assert [attention["window"] for attention in found] == [5, None]
