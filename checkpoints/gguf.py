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

from checkpoints.huggingface.rope import rope_from_hf
from checkpoints.weights import interleave_rope
from common.instantiate import instantiate

# Classes of `transformers` that llama.cpp runs, and its names for them.
ARCHITECTURES = {
    "Llama": "llama",
    "Mistral": "llama",
    "Qwen3": "qwen3",
    "SmolLM3": "smollm3",
    "GraniteSWA": "granite_swa",
    "DeepseekV3": "deepseek2",
    "Qwen3_5": "qwen35",
}
# In these, llama.cpp rotates adjacent rows of queries and keys.
INTERLEAVED = ("llama", "smollm3", "granite_swa")


def check_exportable(config: dict) -> str:
    """config.json -> llama.cpp's name of the architecture.

    Raises ValueError for a model that llama.cpp cannot run.
    """
    if find_spec("gguf") is None:
        raise ValueError("the package gguf is not installed. fix: pip install gguf")
    name = config["architectures"][0].removesuffix("ForCausalLM")
    architecture = ARCHITECTURES.get(name)
    layer_types = config.get("layer_types") or []
    has_window = "sliding_attention" in layer_types or config.get("sliding_window") is not None
    every_fourth_nope = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    # What llama.cpp lacks, and whether this model has it.
    lacks = {
        f"no {name}": architecture is None,
        "no windows here": has_window and name != "GraniteSWA",
        "positions in all but every fourth layer": config.get("no_rope_layers", every_fourth_nope)
        != every_fourth_nope,
        "no delta layer": architecture == "qwen35" and "linear_attention" not in layer_types,
        "no biases here": config["attention_bias"] and architecture != "llama",
        "no stretched positions here": config["rope_scaling"] is not None
        and architecture not in ("llama", "qwen3"),
    }
    problems = [problem for problem, is_so in lacks.items() if is_so]
    if problems:
        others = ", ".join(sorted({*ARCHITECTURES} - {name}))
        raise ValueError(
            f"llama.cpp cannot run this {name} (it has {', '.join(problems)}). "
            f"fix: --format hf, or {others}"
        )
    return architecture


def write(
    folder: Path, config: dict, weights: dict[str, Tensor], vocabulary: ModelProto, dtype: str
) -> None:
    """Write model-DTYPE.gguf.

    Vectors and convolutions stay in fp32. Rows that q8_0 cannot cut into blocks become f16.
    """
    import gguf

    architecture = check_exportable(config)
    writer = gguf.GGUFWriter(folder / f"model-{dtype}.gguf", architecture)
    write_metadata(writer, config)
    write_vocab(writer, config, vocabulary)
    writer.add_file_type(
        gguf.LlamaFileType["ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"]
    )

    # The package lacks granite_swa, whose tensors have llama's names.
    named_as = "llama" if architecture == "granite_swa" else architecture
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[named_as.upper()], config["num_hidden_layers"])
    kinds = gguf.GGMLQuantizationType

    # Convert and quantize tensor after tensor.
    for name, weight in convert_tensors(architecture, config, weights):
        array = weight.contiguous().float().numpy()
        kind = kinds[dtype.upper()]
        if weight.ndim == 1 or "conv1d" in name:
            kind = kinds.F32
        try:
            array = gguf.quantize(array, kind)
        except gguf.QuantError:
            kind = kinds.F16
            array = gguf.quantize(array, kind)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        writer.add_tensor(gguf_name, array, raw_dtype=kind)

    # Until here, all was gathered in memory.
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(writer, config: dict) -> None:
    """Write the sizes and settings that llama.cpp's loader asks for."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    write_rope(writer, config)
    if writer.arch == "deepseek2":
        write_latent_attention(writer, config)
        return
    if writer.arch == "granite_swa":
        write_sinks_and_windows(writer, config)
    if writer.arch == "qwen35":
        write_delta_rule(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])


def write_rope(writer, config: dict) -> None:
    from gguf import RopeScalingType

    rope = config["rope_parameters"]
    rotary_dim = int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(rotary_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def write_latent_attention(writer, config: dict) -> None:
    """Write the sizes of MLA, whose cache is one key of latent and rotary part for all heads."""
    rank = config["kv_lora_rank"]
    rope_dim = config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope_dim)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_kv_lora_rank(rank)
    writer.add_q_lora_rank(config["q_lora_rank"] or 0)
    # Without experts, their sizes are asked for, but not used.
    writer.add_leading_dense_block_count(config["num_hidden_layers"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_count(0)


def write_sinks_and_windows(writer, config: dict) -> None:
    writer.add_logit_scale(1.0)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_sliding_window(config["sliding_window"])
    # It needs a window in some layer: where none has one, all have the context as their window.
    has_window = [kind == "sliding_attention" for kind in config["layer_types"]]
    if not any(has_window):
        has_window = [True] * len(has_window)
    writer.add_sliding_window_pattern(has_window)


def write_delta_rule(writer, config: dict) -> None:
    rope = config["rope_parameters"]
    pairs = int(config["head_dim"] * rope["partial_rotary_factor"]) // 2
    third = pairs // 3
    # Frequencies of time, height and width in an image: for text, all have the same position.
    writer.add_rope_dimension_sections([pairs - 2 * third, third, third, 0])

    # In llama.cpp, the delta rule is one of its state-space models (SSM).
    is_linear = [kind == "linear_attention" for kind in config["layer_types"]]
    heads = config["linear_num_key_heads"]
    head_dim = config["linear_key_head_dim"]
    writer.add_array("qwen35.attention.recurrent_layers", is_linear)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(head_dim)
    writer.add_ssm_group_count(heads)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * head_dim)


def write_vocab(writer, config: dict, vocabulary: ModelProto) -> None:
    """Write a SentencePiece vocabulary, whose types of pieces have the numbers of GGUF's."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.piece for piece in vocabulary.pieces])
    writer.add_token_scores([piece.score for piece in vocabulary.pieces])
    writer.add_token_types([piece.type for piece in vocabulary.pieces])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_unk_token_id(vocabulary.trainer_spec.unk_id)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    normalizer = vocabulary.normalizer_spec
    writer.add_add_space_prefix(normalizer.add_dummy_prefix)
    writer.add_remove_extra_whitespaces(normalizer.remove_extra_whitespaces)


def convert_tensors(
    architecture: str, config: dict, weights: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a class of `transformers` -> (name, tensor) as llama.cpp computes with them.

    A name stays that of `transformers` where llama.cpp's own table of names has it.
    """
    for name, weight in weights.items():
        if architecture == "deepseek2" and ".self_attn." in name:
            yield from convert_latent_attention(name, weight, config)
        elif architecture == "qwen35":
            yield convert_delta_rule(name, weight)
        elif name.endswith("sinks"):
            yield f"blk.{name.split('.')[2]}.attn_sinks.weight", weight
        elif architecture in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            yield name, interleave_rope(weight, config["head_dim"])
        else:
            yield name, weight
    if config["rope_parameters"]["rope_type"] == "llama3":
        yield "rope_freqs.weight", llama3_divisors(config)


def convert_latent_attention(
    name: str, weight: Tensor, config: dict
) -> Iterator[tuple[str, Tensor]]:
    """Interleave rotary parts, and split the read-out of keys and values into a tensor for each."""
    heads = config["num_attention_heads"]
    rope_dim = config["qk_rope_head_dim"]
    if name.endswith("kv_a_proj_with_mqa.weight"):
        yield name, interleave_last_rows(weight, 1, rope_dim)
    elif name.endswith(("q_proj.weight", "q_b_proj.weight")):
        yield name, interleave_last_rows(weight, heads, rope_dim)
    elif name.endswith("kv_b_proj.weight"):
        sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
        key, value = weight.unflatten(0, (heads, -1)).split(sizes, dim=1)
        yield name.replace("kv_b_proj", "k_b_proj"), key.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), value
    else:
        yield name, weight


def interleave_last_rows(weight: Tensor, heads: int, rope_dim: int) -> Tensor:
    """Interleave the last `rope_dim` rows of each head."""
    by_head = weight.unflatten(0, (heads, -1))
    rotary = interleave_rope(by_head[:, -rope_dim:].flatten(0, 1), rope_dim)
    rotary = rotary.unflatten(0, (heads, -1))
    return torch.cat((by_head[:, :-rope_dim], rotary), dim=1).flatten(0, 1)


def convert_delta_rule(name: str, weight: Tensor) -> tuple[str, Tensor]:
    """Norms are stored whole, and the decay's logarithm as the decay itself."""
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return name, weight + 1
    if name.endswith("conv1d.weight"):
        return name, weight.squeeze(1)
    if name.endswith("dt_bias"):
        return name.replace("dt_bias", "dt_proj.bias"), weight
    if name.endswith("A_log"):
        return name, -weight.exp()
    return name, weight


def llama3_divisors(config: dict) -> Tensor:
    """What each frequency of RoPE is divided by: (D/2,)."""
    head_dim = config["head_dim"]
    base = config["rope_parameters"]["rope_theta"]
    frequency = base ** -(torch.arange(0, head_dim, 2) / head_dim)
    scaled, _ = instantiate(rope_from_hf(config)["rope_scaling"])(frequency, head_dim, base)
    return frequency / scaled
