"""The logits of each variant match an independent implementation in `transformers`."""

import pytest
import torch

from model.context import ForwardContext
from run.instantiate import instantiate
from tests.conftest import YARN, close, redraw, tree_of
from tools import attention_map
from tools.formats.hf_config import to_hf_config
from tools.formats.weights import hf_weights

FULL = "full_attention"
SCALED = "attention.rope_scaling={_target_:model.rope."
NO_NORMS = "attention.kinds.rope.qk_norm=null attention.kinds.nope.qk_norm=null"
# A variant with overrides: the transformers class.
CLASSES = {
    "llama": "Llama",
    "llama attention.bias=true model.tied=true": "Llama",
    "llama ffn=geglu": "Llama",
    "gqa ffn=geglu": "Qwen3",
    "mla ffn=geglu": "DeepseekV3",
    f"llama {SCALED}LinearScaling,factor:4}}": "Llama",
    f"llama {SCALED}Llama3,factor:8,low:1,high:4,context:16}}": "Llama",
    f"llama {YARN}": "Llama",
    "gqa": "Qwen3",
    "mqa": "Qwen3",
    "mha": "Qwen3",
    "sliding_window": "Qwen3",
    "local_global": "Qwen3",
    "sliding_window attention.qk_norm=null": "Mistral",
    "local_global attention.kinds.local.qk_norm=null attention.kinds.full.qk_norm=null": "SmolLM3",
    f"nope {NO_NORMS}": "SmolLM3",
    f"nope {NO_NORMS} attention.kinds.rope.window=5": "SmolLM3",
    "window_nope attention.kinds.local.qk_norm=null attention.kinds.full.qk_norm=null": "SmolLM3",
    "llama4": "Llama4",
    "l2norm": "Llama4",
    "gpt_oss": "GraniteSWA",
    "sink attention.qk_norm=null": "GraniteSWA",
    "sink attention.qk_norm=null attention.window=5": "GraniteSWA",
    "mla": "DeepseekV3",
    f"mla {YARN}": "DeepseekV3",
    "mla attention.query_rank=24 attention.bias=true": "DeepseekV3",
    "differential attention.qk_norm=null": "DiffLlama",
    "gdn": "Qwen3_5",
    "kda": "KimiLinear",
    "kda attention.kinds.recurrent.kernel=3 attention.kinds.full.query_rank=24": "KimiLinear",
    "mla attention.rope_base=null": "KimiLinear",
    "gated": "Qwen3_5",
    "gated attention.rope_fraction=0.5": "Qwen3_5",
    # Heads that are wider (as in Qwen3-0.6B) or narrower than dim / heads.
    "llama attention.head_dim=32": "Llama",
    "gqa attention.head_dim=32": "Qwen3",
    "sliding_window attention.qk_norm=null attention.head_dim=8": "Mistral",
    f"nope {NO_NORMS} attention.kinds.rope.head_dim=32 attention.kinds.nope.head_dim=32": "SmolLM3",
    "l2norm attention.head_dim=32": "Llama4",
    "sink attention.qk_norm=null attention.head_dim=32": "GraniteSWA",
    "differential attention.qk_norm=null attention.head_dim=32": "DiffLlama",
    "gdn attention.kinds.full.head_dim=32": "Qwen3_5",
    "gated attention.head_dim=32": "Qwen3_5",
}


def both_of(variant: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    import transformers

    tree = tree_of(*variant.split(), "model.depth=3")
    ours, config = redraw(instantiate(tree)).eval(), to_hf_config(tree)
    how = transformers.AutoConfig.for_model(
        **config, attn_implementation="eager", pad_token_id=None
    )
    theirs = getattr(transformers, config["architectures"][0])(how).eval()
    theirs.load_state_dict(hf_weights(ours, config["architectures"][0]), strict=not tree["tied"])
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


if __name__ == "__main__":  # python -m tests.tools.test_parity prints a table of docs/formats.md
    print(
        "| attention= | class of transformers | largest difference | cached to full |\n|---|---|---|---|"
    )
    for variant, kind in CLASSES.items():
        print(
            f"| `{variant}` | {kind}ForCausalLM | {compare(variant)[0]:.0e} | {compare(variant)[1]:.0e} |"
        )
    print(f"| `softcap attention.qk_norm=null` | Gemma2Attention | {compare_softcap():.0e} | |")
