"""The decoder classes of `transformers` that models can be exported to or imported from.

Each class below describes one of them: the options that it can express, its own entries of
config.json, and the names and layouts of its weights.
"""

import torch
from torch import Tensor, nn

from model.attention.recurrent import GatedRecurrence
from model.transformer import Transformer
from tools.formats.decoder import (
    LATENT,
    LLAMA_NAMES,
    PLAIN_SOFTMAX,
    RECURRENT,
    Architecture,
    LayerConfigs,
    common_value,
    layer_types,
)


def interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of heads (K * D, ...) from our RoPE to a RoPE that rotates neighbors.

    Our RoPE rotates row d of a head with row d + D/2. The other RoPE rotates row 2 d with row
    2 d + 1.
    """
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


class Llama(Architecture):
    """Llama 2 and 3, 2307.09288 and 2407.21783."""

    model_type = "llama"


class Qwen3(Architecture):
    """Qwen3, 2505.09388: QK-norm, and optional windows."""

    model_type = "qwen3"
    fixed_options = {"qk_norm": "before_rope"}
    free_options = ("bias", "window")

    def own_config(self, tree: dict, layers: LayerConfigs) -> dict:
        window = common_value(layers, "window")
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": layer_types(layers),
        }


class Mistral(Architecture):
    """Mistral 7B, 2310.06825: one window for all layers, or none."""

    model_type = "mistral"
    free_options = ("window",)
    option_entries = {"sliding_window": "window"}

    def misfits(self, tree: dict, layers: LayerConfigs) -> set[str]:
        found = super().misfits(tree, layers)
        windows = {layer.get("window") for layer in layers}
        if len(windows) > 1:
            found.add(f"attention.window={windows}")
        return found


class SmolLM3(Qwen3):
    """SmolLM3: like Qwen3, but without QK-norm, and any layer may lack positions."""

    model_type = "smollm3"
    fixed_options = {}
    free_options = ("bias", "window", "rope_base")


class Qwen2(Qwen3):
    """Qwen2, 2407.10671, which has no output bias, so our output bias must be zero."""

    model_type = "qwen2"
    fixed_options = {"bias": True}
    free_options = ("window",)
    zeros = ("o_proj.bias",)


class Llama4(Architecture):
    """Llama 4 without experts.

    A layer has both RoPE and QK-norm after it, or neither. Any layer may have chunked attention.
    """

    model_type = "llama4_text"
    free_options = ("bias", "chunk", "rope_base")
    # vLLM reads the second entry, in which 0 means no layer with experts.
    constants = {
        "moe_layers": [],
        "interleave_moe_layer_step": 0,
        "use_qk_norm": True,
        "attn_temperature_tuning": False,
    }
    names = LLAMA_NAMES | {"ffn": "feed_forward"}

    def required_options(self, layer: dict) -> dict:
        if layer.get("rope_base") is None:
            return PLAIN_SOFTMAX
        return PLAIN_SOFTMAX | {"qk_norm": "after_rope"}

    def own_config(self, tree: dict, layers: LayerConfigs) -> dict:
        return self.constants | {
            "intermediate_size_mlp": tree["hidden"],
            # A size is required even if no layer has chunks.
            "attention_chunk_size": common_value(layers, "chunk", tree["context"]),
            "layer_types": layer_types(layers),
        }

    def pack(self, name: str, parts: list[Tensor], model: Transformer) -> Tensor:
        (weight,) = parts
        if "q_proj" not in name and "k_proj" not in name:
            return weight
        return interleave(weight, model.blocks[0].attention.head_dim)


class GraniteSWA(Architecture):
    """Granite with a sink in each head, and optional windows."""

    model_type = "granite_swa"
    fixed_options = {"sink": True}
    free_options = ("bias", "window")
    constants = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0}
    names = LLAMA_NAMES | {"sink": "sinks"}

    def own_config(self, tree: dict, layers: LayerConfigs) -> dict:
        return self.constants | {
            "attention_multiplier": common_value(layers, "head_dim") ** -0.5,
            "layer_types": layer_types(layers),
            # A size is required even if no layer has a window.
            "sliding_window": common_value(layers, "window", tree["context"]),
        }


class DiffLlama(Architecture):
    """Differential attention, 2410.05258."""

    model_type = "diffllama"
    fixed_options = {"_target_": "model.attention.differential.DifferentialAttention"}
    names = LLAMA_NAMES | {
        "q1": "lambda_q1",
        "k1": "lambda_k1",
        "q2": "lambda_q2",
        "k2": "lambda_k2",
    }


class DeepseekV3(Architecture):
    """DeepSeek-V3 without experts: multi-head latent attention and dense layers, 2412.19437."""

    model_type = "deepseek_v3"
    fixed_options = {"_target_": LATENT}
    names = LLAMA_NAMES | {
        "q_down_proj": "q_a_proj",
        "q_down_norm": "q_a_layernorm",
        "latent_proj": "kv_a_proj_with_mqa",  # one tensor holds this entry and the next
        "rope_proj": "kv_a_proj_with_mqa",
        "latent_norm": "kv_a_layernorm",
        "kv_proj": "kv_b_proj",
    }
    constants = {
        "rope_interleave": True,  # programs that ignore this entry assume true
        "num_mtp_layers": 0,
        # Required even if no layer has experts.
        "n_routed_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 1,
    }
    option_entries = {
        "kv_lora_rank": "rank",
        "q_lora_rank": "query_rank",
        "qk_nope_head_dim": "head_dim",
        "v_head_dim": "value_dim",
        "qk_rope_head_dim": "rope_dim",
        "head_dim": "rope_dim",
    }

    def own_config(self, tree: dict, layers: LayerConfigs) -> dict:
        return super().own_config(tree, layers) | {"first_k_dense_replace": tree["depth"]}

    def attention_names(self, attention: nn.Module) -> dict:
        if attention.q_down_proj is None:
            return {}
        return {"q_proj": "q_b_proj"}

    def pack(self, name: str, parts: list[Tensor], model: Transformer) -> Tensor:
        attention = model.blocks[0].attention
        if "kv_a_proj" in name:
            latent, rope = parts
            return torch.cat((latent, interleave(rope, attention.rope_dim)))
        if "q_proj" in name or "q_b_proj" in name:
            # In each head, the rows without positions precede the rows that RoPE rotates.
            heads = parts[0].unflatten(0, (attention.heads, -1))
            plain, rope = heads.tensor_split([-attention.rope_dim], dim=1)
            rope = interleave(rope.flatten(0, 1), attention.rope_dim).view_as(rope)
            return torch.cat((plain, rope), dim=1).flatten(0, 1)
        return super().pack(name, parts, model)


class KimiLinear(DeepseekV3):
    """Kimi Linear without experts, 2510.26692: delta attention, and MLA without positions."""

    model_type = "kimi_linear"
    fixed_model_options = {"tied": False}
    fixed_options = {"_target_": LATENT, "rope_base": None}
    recurrent_options = {"decay": "channel", "erase": True, "gate": "sigmoid", "low_rank": True}
    recurrent_names = {
        "conv": "conv1d",
        "taps": "weight",
        "decay_latent": "forget_gate.f_a_proj",
        "decay_proj": "forget_gate.f_b_proj",
        "decay_rate": "forget_gate.A_log",
        "decay_bias": "forget_gate.dt_bias",
        "write_proj": "b_proj",
        "gate_latent": "g_a_proj",
        "gate_proj": "g_b_proj",
        "out_norm": "o_norm",
    }

    def own_config(self, tree: dict, layers: LayerConfigs) -> dict:
        recurrent_layers = [layer for layer in layers if layer["_target_"] == RECURRENT]
        latent_layers = [layer for layer in layers if layer["_target_"] == LATENT]
        return super().own_config(tree, latent_layers) | {
            "layer_types": layer_types(layers),
            "linear_num_heads": tree["heads"],
            # Sizes are required even if no layer is recurrent.
            "linear_head_dim": common_value(recurrent_layers, "head_dim", 1),
            "linear_conv_kernel_dim": common_value(recurrent_layers, "kernel", 1),
        }

    def attention_names(self, attention: nn.Module) -> dict:
        if isinstance(attention, GatedRecurrence):
            return self.recurrent_names
        return super().attention_names(attention)

    def pack(self, name: str, parts: list[Tensor], model: Transformer) -> Tensor:
        # There are no positions, so no rows are interleaved.
        tensor = Architecture.pack(self, name, parts, model)
        if name.endswith("A_log"):
            tensor = tensor[None, None, :, None]  # (1, 1, H, 1)
        return tensor


class Qwen3_5(Architecture):
    """Qwen3.5 without experts: gated softmax attention, and the gated delta rule, 2412.06464."""

    model_type = "qwen3_5_text"
    fixed_options = {"qk_norm": "before_rope", "gated": True}
    free_options = ("bias", "rope_fraction")
    recurrent_options = {"decay": "head", "erase": True, "gate": "silu", "low_rank": False}
    recurrent_names = {
        "attention": "linear_attn",
        "q_proj": "in_proj_qkv",  # one tensor holds these three
        "k_proj": "in_proj_qkv",
        "v_proj": "in_proj_qkv",
        "conv": "conv1d",
        "taps": "weight",
        "decay_rate": "A_log",
        "decay_bias": "dt_bias",
        "decay_proj": "in_proj_a",
        "write_proj": "in_proj_b",
        "gate_proj": "in_proj_z",
        "out_norm": "norm",
        "o_proj": "out_proj",
    }

    def own_config(self, tree: dict, layers: LayerConfigs) -> dict:
        entries = {"layer_types": layer_types(layers)}
        # Queries and keys have as many heads as values.
        recurrent_layers = [layer for layer in layers if layer["_target_"] == RECURRENT]
        if recurrent_layers:
            head_dim = common_value(recurrent_layers, "head_dim")
            entries |= {
                "linear_num_key_heads": tree["heads"],
                "linear_num_value_heads": tree["heads"],
                "linear_key_head_dim": head_dim,
                "linear_value_head_dim": head_dim,
                "linear_conv_kernel_dim": common_value(recurrent_layers, "kernel"),
            }
        return entries

    def attention_names(self, attention: nn.Module) -> dict:
        if isinstance(attention, GatedRecurrence):
            return self.recurrent_names
        return {"gate_proj": "q_proj"}

    def pack(self, name: str, parts: list[Tensor], model: Transformer) -> Tensor:
        # In each head, the query precedes the gate.
        if "self_attn.q_proj" in name:
            heads = model.blocks[-1].attention.heads
            by_head = [part.unflatten(0, (heads, -1)) for part in parts]
            return torch.cat(by_head, dim=1).flatten(0, 1)
        tensor = super().pack(name, parts, model)
        # Norm weights are stored minus 1, except in the delta rule.
        if "norm" in name and "linear_attn" not in name:
            tensor = tensor - 1
        return tensor


# In order of preference: a model is exported as the first class that can express it.
ARCHITECTURES = {
    f"{architecture.__name__}ForCausalLM": architecture()
    for architecture in (
        Llama,
        Qwen3,
        Mistral,
        SmolLM3,
        Qwen2,
        Llama4,
        GraniteSWA,
        DiffLlama,
        DeepseekV3,
        KimiLinear,
        Qwen3_5,
    )
}
