"""Logits equal those of an independent implementation, the class of `transformers` that can express a variant."""

import pytest
import torch

from model.build import build
from model.positions import Positions
from tests.conftest import close, redraw, tree_of
from tools import attention_map

RENAMED = {
    "embed.": "model.embed_tokens.",
    "blocks.": "model.layers.",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.": "self_attn.",
    "ffn.": "mlp.",
    "head.": "lm_head.",
    "self_attn.sink": "self_attn.sinks",
}
FULL, LOCAL = "full_attention", "sliding_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
DEEPSEEK = {
    "first_k_dense_replace": 3, "num_mtp_layers": 0, "n_routed_experts": 2, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 1, "moe_intermediate_size": 8, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 24, "rope_interleave": False, "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
DELTA = {
    "taps": "conv1d.weight", "decay_rate": "A_log", "decay_bias": "dt_bias", "decay_proj.weight": "in_proj_a.weight",
    "write_proj.weight": "in_proj_b.weight", "gate_proj.weight": "in_proj_z.weight", "out_norm.weight": "norm.weight",
    "o_proj.weight": "out_proj.weight",
}  # fmt: skip
SCALED = "attention.rope_scaling={_target_:model.rope."
# variant and overrides: the class, and what its config says beyond the shape
CLASSES = {
    "llama": ("Llama", {}),
    "llama attention.bias=true": ("Llama", {"attention_bias": True}),
    "gqa": ("Qwen3", {}),
    f"llama {SCALED}Linear,factor:4}}": ("Llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
    f"llama {SCALED}Llama3,factor:8,low:1,high:4,context:16}}": (
        "Llama",
        {
            "rope_parameters": ROPE | {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    f"llama {SCALED}YaRN,factor:4,fast:8,slow:1,context:16}}": (
        "Llama",
        {
            "rope_parameters": ROPE | {
                "rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 1,
                "original_max_position_embeddings": 16,
            },
            "max_position_embeddings": 64,
        },
    ),
    "gated attention.rope_fraction=0.5": (
        "Qwen3_5",
        {"layer_types": [FULL] * 3, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "mqa": ("Qwen3", {}),
    "mha": ("Qwen3", {}),
    "sliding_window": ("Qwen3", SLIDING | {"layer_types": [LOCAL] * 3}),
    "sliding_window attention.qk_norm=null": ("Mistral", {"sliding_window": 5}),
    "local_global": ("Qwen3", SLIDING | {"layer_types": [LOCAL, LOCAL, FULL]}),
    "nope attention.kinds.rope.qk_norm=null attention.kinds.nope.qk_norm=null": (
        "SmolLM3",
        {"no_rope_layers": [1, 1, 0], "use_sliding_window": False, "layer_types": [FULL] * 3},
    ),
    "chunked": (
        "Llama4",
        {
            "moe_layers": [], "intermediate_size_mlp": 128, "attention_chunk_size": 5, "no_rope_layers": [1, 1, 0],
            "layer_types": ["chunked_attention"] * 2 + [FULL], "attn_temperature_tuning": False, "use_qk_norm": True,
        },
    ),
    "l2norm": (
        "Llama4",
        {
            "moe_layers": [], "intermediate_size_mlp": 128, "no_rope_layers": [1, 1, 1],
            "layer_types": [FULL] * 3, "attn_temperature_tuning": False, "use_qk_norm": True,
            "attention_chunk_size": 99,
        },
    ),
    "sink": ("GraniteSWA", {"attention_multiplier": 16**-0.5, "sliding_window": 99, "layer_types": [FULL] * 3}),
    "mla": ("DeepseekV3", DEEPSEEK | {"q_lora_rank": None}),
    "mla attention.query_rank=24": ("DeepseekV3", DEEPSEEK | {"q_lora_rank": 24}),
    "mla attention.query_rank=24 attention.bias=true": (
        "DeepseekV3",
        DEEPSEEK | {"q_lora_rank": 24, "attention_bias": True},
    ),
    "differential attention.qk_norm=null": ("DiffLlama", {}),
    "delta attention.kinds.full.gated=true": (
        "Qwen3_5",
        {
            "layer_types": ["linear_attention"] * 2 + [FULL], "rope_parameters": ROPE | {"partial_rotary_factor": 1.0},
            "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "gated": ("Qwen3_5", {"layer_types": [FULL] * 3, "rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}),
}  # fmt: skip


def counterpart(kind: str, tree: dict, more: dict) -> torch.nn.Module:
    import transformers

    attention = tree["attention"]
    if "kinds" in attention:
        attention = attention["kinds"][attention["pattern"][-1]]
    shape = {
        "vocab_size": tree["vocab_size"],
        "hidden_size": tree["dim"],
        "intermediate_size": tree["hidden"],
        "num_hidden_layers": tree["depth"],
        "num_attention_heads": tree["heads"],
        "num_key_value_heads": attention.get("kv_heads", tree["heads"]),
        "head_dim": tree["dim"] // tree["heads"],
        "rope_parameters": ROPE,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "attn_implementation": "eager",
    }
    config = kind + ("TextConfig" if kind in ("Llama4", "Qwen3_5") else "Config")
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, config)(**shape | more)).eval()


def theirs_of(kind: str, weights: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """Our weights under their names, in their layout."""
    for short, long in RENAMED.items():
        weights = {name.replace(short, long, 1) if short in name else name: w for name, w in weights.items()}
    weights["model.norm.weight"] = weights.pop("norm.weight")
    if kind == "Llama4":
        weights = {name.replace(".mlp.", ".feed_forward."): w for name, w in weights.items()}
        for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight"))]:
            pairs = weights[name].unflatten(0, (-1, 2, 8))  # a head's halves, which they have side by side
            weights[name] = pairs.transpose(1, 2).reshape(weights[name].shape)
    if kind == "DeepseekV3":
        latent = {
            "q_down_proj": "q_a_proj",
            "q_down_norm": "q_a_layernorm",
            "latent_norm": "kv_a_layernorm",
            "kv_proj": "kv_b_proj",
        }
        if any("q_down_proj" in name for name in weights):
            weights = {name.replace(".q_proj", ".q_b_proj"): w for name, w in weights.items()}
        for short, long in latent.items():
            weights = {name.replace(f".{short}", f".{long}"): w for name, w in weights.items()}
        for name in [name for name in weights if "latent_proj" in name]:  # weights and biases
            rope = weights.pop(name.replace("latent_proj", "rope_proj"))
            weights[name.replace("latent_proj", "kv_a_proj_with_mqa")] = torch.cat((weights.pop(name), rope))
    if kind == "DiffLlama":
        for part in ("q1", "k1", "q2", "k2"):
            weights = {name.replace(f"self_attn.{part}", f"self_attn.lambda_{part}"): w for name, w in weights.items()}
    if kind == "Qwen3_5":
        for name in [name for name in weights if name.endswith("taps")]:
            layer = name.removesuffix("self_attn.taps")
            for ours, theirs in DELTA.items():
                weights[f"{layer}linear_attn.{theirs}"] = weights.pop(f"{layer}self_attn.{ours}")
            parts = [weights.pop(f"{layer}self_attn.{x}_proj.weight") for x in "qkv"]
            weights[f"{layer}linear_attn.in_proj_qkv.weight"] = torch.cat(parts)
        for name in [name for name in weights if name.endswith("gate_proj.weight") and "self_attn" in name]:
            gate, q = weights.pop(name), name.replace("gate_proj", "q_proj")
            both = torch.cat((weights[q].unflatten(0, (heads, -1)), gate.unflatten(0, (heads, -1))), dim=1)
            weights[q] = both.flatten(0, 1)
        weights = {name: w - 1 if "norm" in name and "linear_attn" not in name else w for name, w in weights.items()}
    return weights


def both_of(variant: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    kind, more = CLASSES[variant]
    tree = tree_of(*variant.split(), "model.depth=3")
    ours = redraw(build(tree)).eval()
    theirs = counterpart(kind, tree, more)
    theirs.load_state_dict(theirs_of(kind, ours.state_dict(), tree["heads"]))
    return ours, theirs


def compare(variant: str) -> tuple[float, float]:
    """Largest differences of logits, in fp32: to theirs, and from our cached forward to our full one."""
    ours, theirs = both_of(variant)
    tokens = torch.randint(128, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        full, cache = ours(tokens), ours.new_cache(2, 33, torch.float32, "cpu")
        cached = torch.cat([ours(chunk, cache) for chunk in tokens.split([14, 1, 1, 17], dim=1)], dim=1)
        return (full - theirs(tokens).logits).abs().max().item(), (cached - full).abs().max().item()


@pytest.mark.parametrize("variant", CLASSES)
def test_logits_equal_those_of_transformers(variant):
    assert max(compare(variant)) < 1e-4


@pytest.mark.parametrize("variant", ["gqa", "sliding_window", "mla"])
def test_attention_maps_equal_those_of_transformers(variant):
    ours, theirs = both_of(variant)
    tokens = torch.randint(128, (1, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens, output_attentions=True).attentions
    for mine, layer in zip(attention_map.weights(ours, tokens[0].tolist()), expected, strict=True):
        close(mine, layer[0], atol=1e-5, rtol=0)


def compare_softcap() -> float:
    """No class has our block around a soft-cap: the layer alone."""
    from transformers import Gemma2Config
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2RotaryEmbedding

    tree = tree_of("softcap", "attention.qk_norm=null", "attention.softcap=2.0")
    ours = redraw(build(tree)).blocks[1].attention
    config = Gemma2Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0, num_hidden_layers=2, layer_types=[FULL] * 2, rope_parameters=ROPE,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = Gemma2Attention(config, 1).eval()
    theirs.load_state_dict(ours.state_dict())
    x = 3 * torch.randn(2, 33, 64, generator=torch.Generator().manual_seed(1))
    positions = Positions(x[..., 0], None, None, None)
    mask = torch.zeros(33, 33).masked_fill(~torch.ones(33, 33, dtype=torch.bool).tril(), -torch.inf)
    with torch.no_grad():
        y, _ = theirs(x, Gemma2RotaryEmbedding(config)(x, positions.ids), mask)
        return (ours.mix(x, positions, None) - y).abs().max().item()


def test_a_softcap_equals_that_of_gemma():
    assert compare_softcap() < 1e-4


if __name__ == "__main__":  # python -m tests.test_parity: the table of docs/results.md
    print("| attention= | class of transformers | largest difference | cached to full |\n|---|---|---|---|")
    for variant, (kind, _) in CLASSES.items():
        print(f"| `{variant}` | {kind}ForCausalLM | {compare(variant)[0]:.0e} | {compare(variant)[1]:.0e} |")
    print(f"| `softcap` | Gemma2Attention | {compare_softcap():.0e} | |")
