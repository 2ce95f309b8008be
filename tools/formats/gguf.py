"""A model as one GGUF file, for llama.cpp and all that is built on it.

It is made from the config.json and the weights of a class of `transformers`. The format:
docs/gguf.md of github.com/ggml-org/ggml. What keys and layouts each architecture wants: src/models
and conversion/ of github.com/ggml-org/llama.cpp.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from torch import Tensor

from run.instantiate import instantiate
from tools.formats.hf_rope import rope_from_hf
from tools.formats.weights import Weights, interleave_rope

# Classes of `transformers` that llama.cpp runs, and its names for them.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteSWAForCausalLM": "granite_swa",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Qwen3_5ForCausalLM": "qwen35",
}
# In these, llama.cpp rotates adjacent rows of queries and keys.
INTERLEAVED = ("llama", "smollm3", "granite_swa")
# The keys of llama.cpp whose values are entries of config.json.
COPIED_ENTRIES = {
    "block_count": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
VALUE_TYPES = {str: "STRING", bool: "BOOL", int: "UINT32", float: "FLOAT32", list: "ARRAY"}


def check_exportable(config: dict) -> str:
    """config.json -> llama.cpp's name of the architecture.

    Raises ValueError for a model that llama.cpp cannot run.
    """
    if find_spec("gguf") is None:
        raise ValueError("the package gguf is not installed. fix: pip install gguf")
    name = config["architectures"][0]
    architecture = ARCHITECTURES.get(name)
    has_window = config.get("sliding_window") is not None
    has_delta = "linear_attention" in config.get("layer_types", ())
    has_scaling = config["rope_scaling"] is not None
    every_fourth_nope = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    rope_layers = config.get("no_rope_layers", every_fourth_nope)
    # What cannot be exported, and whether this model has it.
    unsupported = {
        f"the layers of {name}": architecture is None,
        f"the activation {config['hidden_act']}": config["hidden_act"] != "silu",
        "windows": has_window and architecture != "granite_swa",
        "layers without RoPE other than every fourth": rope_layers != every_fourth_nope,
        "no delta layer": architecture == "qwen35" and not has_delta,
        "biases": config["attention_bias"] and architecture != "llama",
        "scaled RoPE": has_scaling and architecture not in ("llama", "qwen3"),
    }
    problems = [problem for problem, is_present in unsupported.items() if is_present]
    if problems:
        raise ValueError(
            f"GGUF files are not written for such a model (it has {', '.join(problems)}). "
            "fix: --format hf, or train anew with attention=gqa ffn=swiglu norm=rmsnorm"
        )
    return architecture


def write(folder: Path, config: dict, weights: Weights, vocabulary: ModelProto, dtype: str) -> None:
    """Write model-DTYPE.gguf.

    Vectors and convolutions stay in fp32. Rows that q8_0 cannot cut into blocks become f16.
    """
    import gguf

    architecture = check_exportable(config)
    writer = gguf.GGUFWriter(folder / f"model-{dtype}.gguf", architecture)
    file_type = "ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    entries = vocabulary_entries(config, vocabulary)
    for key, value in model_entries(architecture, config).items():
        entries[f"{architecture}.{key}"] = value
    for key, value in entries.items():
        writer.add_key_value(key, value, gguf.GGUFValueType[VALUE_TYPES[type(value)]])

    # The package lacks granite_swa, whose tensors have llama's names.
    table = "llama" if architecture == "granite_swa" else architecture
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[table.upper()], config["num_hidden_layers"])

    # Convert and quantize one tensor at a time.
    for name, weight in convert_tensors(architecture, config, weights):
        array = weight.contiguous().float().numpy()
        gguf_type = gguf.GGMLQuantizationType[dtype.upper()]
        block_size, _ = gguf.GGML_QUANT_SIZES[gguf_type]
        if weight.ndim == 1 or "conv1d" in name:
            gguf_type = gguf.GGMLQuantizationType.F32
        elif weight.shape[-1] % block_size != 0:
            gguf_type = gguf.GGMLQuantizationType.F16
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        writer.add_tensor(gguf_name, gguf.quantize(array, gguf_type), raw_dtype=gguf_type)

    # So far, everything is in memory.
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_entries(architecture: str, config: dict) -> dict:
    """The sizes and settings that llama.cpp's loader asks for."""
    rope = config["rope_parameters"]
    rotary_dim = int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    entries = {key: config[entry] for key, entry in COPIED_ENTRIES.items()}
    entries["rope.freq_base"] = float(rope["rope_theta"])
    entries["rope.dimension_count"] = rotary_dim
    if rope["rope_type"] in ("linear", "yarn"):
        entries["rope.scaling.type"] = rope["rope_type"]
        entries["rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        context = rope["original_max_position_embeddings"]
        entries["rope.scaling.original_context_length"] = context
        entries["rope.scaling.yarn_beta_fast"] = float(rope["beta_fast"])
        entries["rope.scaling.yarn_beta_slow"] = float(rope["beta_slow"])
    if architecture == "deepseek2":
        entries |= latent_attention_entries(config)
    if architecture == "granite_swa":
        entries |= window_entries(config)
    if architecture == "qwen35":
        entries |= delta_rule_entries(config, rotary_dim // 2)
    return entries


def latent_attention_entries(config: dict) -> dict:
    """The sizes of MLA, whose cache is one key of latent and rotary part for all heads."""
    rank = config["kv_lora_rank"]
    rope_dim = config["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope_dim,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config["q_lora_rank"] or 0,
        # Without experts, their sizes are asked for, but not used.
        "leading_dense_block_count": config["num_hidden_layers"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_shared_count": 0,
    }


def window_entries(config: dict) -> dict:
    # It needs a window in some layer: where none has one, all have the context as their window.
    layer_types = config["layer_types"]
    needs_windows = "sliding_attention" not in layer_types
    return {
        "logit_scale": 1.0,
        "attention.scale": config["attention_multiplier"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [
            needs_windows or kind == "sliding_attention" for kind in layer_types
        ],
    }


def delta_rule_entries(config: dict, pairs: int) -> dict:
    """The sizes of the delta rule, in llama.cpp a state-space model (SSM); `pairs` are of RoPE."""
    third = pairs // 3
    heads = config["linear_num_key_heads"]
    head_dim = config["linear_key_head_dim"]
    return {
        # Frequencies of time, height and width in an image: for text, all have the same position.
        "rope.dimension_sections": [pairs - 2 * third, third, third, 0],
        "attention.recurrent_layers": [
            kind == "linear_attention" for kind in config["layer_types"]
        ],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": head_dim,
        "ssm.group_count": heads,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * head_dim,
    }


def vocabulary_entries(config: dict, vocabulary: ModelProto) -> dict:
    """A SentencePiece vocabulary, whose types of pieces have the numbers of GGUF's."""
    pieces = vocabulary.pieces
    normalizer = vocabulary.normalizer_spec
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in pieces],
        "tokenizer.ggml.scores": [piece.score for piece in pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in pieces],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.unknown_token_id": vocabulary.trainer_spec.unk_id,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": normalizer.add_dummy_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": normalizer.remove_extra_whitespaces,
    }


def convert_tensors(
    architecture: str, config: dict, weights: Weights
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a class of `transformers` -> (name, tensor) as llama.cpp computes with them.

    Names that gguf's own table translates are left as in `transformers`.
    """
    for name, weight in weights.items():
        if architecture == "deepseek2" and ".self_attn." in name:
            yield from convert_latent_attention(name, weight, config).items()
            continue
        if architecture == "qwen35":
            name, weight = convert_delta_rule(name, weight)
        elif name.endswith("sinks"):
            name = f"blk.{name.split('.')[2]}.attn_sinks.weight"
        elif architecture in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            weight = interleave_rope(weight, config["head_dim"])
        yield name, weight
    if config["rope_parameters"]["rope_type"] == "llama3":
        yield "rope_freqs.weight", llama3_divisors(config)


def convert_latent_attention(name: str, weight: Tensor, config: dict) -> dict[str, Tensor]:
    """Interleave rotary rows, and split the up-projection of keys and values into two tensors."""
    heads = config["num_attention_heads"]
    rope_dim = config["qk_rope_head_dim"]
    if name.endswith("kv_b_proj.weight"):
        by_head = weight.unflatten(0, (heads, -1))
        key, value = by_head.tensor_split([config["qk_nope_head_dim"]], dim=1)
        return {
            name.replace("kv_b_proj", "k_b_proj"): key.transpose(1, 2),
            name.replace("kv_b_proj", "v_b_proj"): value,
        }
    if name.endswith("kv_a_proj_with_mqa.weight"):
        weight = interleave_last_rows(weight, 1, rope_dim)
    if name.endswith(("q_proj.weight", "q_b_proj.weight")):
        weight = interleave_last_rows(weight, heads, rope_dim)
    return {name: weight}


def interleave_last_rows(weight: Tensor, heads: int, rope_dim: int) -> Tensor:
    """Interleave the last `rope_dim` rows of each head."""
    parts = []
    for head in weight.chunk(heads):
        parts += [head[:-rope_dim], interleave_rope(head[-rope_dim:], rope_dim)]
    return torch.cat(parts)


def convert_delta_rule(name: str, weight: Tensor) -> tuple[str, Tensor]:
    """Add the 1 that Qwen3.5 leaves out of norm weights, and store A = -exp(A_log)."""
    if name.endswith("norm.weight") and "linear_attn" not in name:
        weight = weight + 1
    if name.endswith("conv1d.weight"):
        weight = weight.squeeze(1)
    if name.endswith("A_log"):
        weight = -weight.exp()
    return name.replace("dt_bias", "dt_proj.bias"), weight


def llama3_divisors(config: dict) -> Tensor:
    """What each frequency of RoPE is divided by: (D/2,)."""
    head_dim = config["head_dim"]
    base = config["rope_parameters"]["rope_theta"]
    frequency = base ** -(torch.arange(0, head_dim, 2) / head_dim)
    scaled, _ = instantiate(rope_from_hf(config)["rope_scaling"])(frequency, head_dim, base)
    return frequency / scaled
