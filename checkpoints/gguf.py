"""A model as one GGUF file, for llama.cpp and all that is built on it.

The format: docs/gguf.md of github.com/ggml-org/ggml. What keys and layouts each architecture wants: src/models and
conversion/ of github.com/ggml-org/llama.cpp.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from torch import Tensor

from checkpoints.weights import StoredTensor
from common.instantiate import instantiate

NAMES = {
    "Llama": "llama",
    "Mistral": "llama",
    "Qwen3": "qwen3",
    "SmolLM3": "smollm3",
    "GraniteSWA": "granite_swa",
}
NAMES |= {
    "DeepseekV3": "deepseek2",
    "Qwen3_5": "qwen35",
}  # of the classes of transformers that it runs
SIDE_BY_SIDE = ("llama", "smollm3", "granite_swa")  # where what RoPE turns together is


def check_exportable(config: dict) -> str:
    """The architecture of a config.json. Raises ValueError for one that llama.cpp does not run, or not so."""
    if find_spec("gguf") is None:
        raise ValueError("the package gguf is not installed. fix: pip install gguf")
    name = config["architectures"][0].removesuffix("ForCausalLM")
    architecture, types = NAMES.get(name), config.get("layer_types") or []
    turned = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    lacks = {
        f"no {name}": architecture is None,
        "no windows here": name != "GraniteSWA"
        and ("sliding_attention" in types or config.get("sliding_window")),
        "positions in all but every fourth layer": config.get("no_rope_layers", turned) != turned,
        "no delta layer": architecture == "qwen35" and "linear_attention" not in types,
        "no biases here": config["attention_bias"] and architecture != "llama",
        "no stretched positions here": config["rope_scaling"]
        and architecture not in ("llama", "qwen3"),
    }
    if found := [what for what, is_so in lacks.items() if is_so]:
        near = ", ".join(sorted({*NAMES} - {name}))
        raise ValueError(
            f"llama.cpp cannot run this {name} (it has {', '.join(found)}). fix: --format hf, or {near}"
        )
    return architecture


def write(
    place: Path, config: dict, weights: dict[str, Tensor], vocabulary: ModelProto, dtype: str
) -> None:
    """`weights` are those of a class of `transformers`; vectors stay fp32, rows that q8_0 cannot cut become f16."""
    import gguf

    architecture, depth = check_exportable(config), config["num_hidden_layers"]
    out = gguf.GGUFWriter(place / f"model-{dtype}.gguf", architecture)
    numbers(out, config)
    tokens(out, config, vocabulary)
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    out.add_file_type(
        gguf.LlamaFileType["ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"]
    )
    known = {"granite_swa": "llama"}.get(architecture, architecture)
    of = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    names = gguf.get_tensor_name_map(of, depth)
    for name, weight in arranged(architecture, config, weights):
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        array, its = (
            weight.contiguous().float().numpy(),
            kind if weight.ndim > 1 and "conv1d" not in name else 0,
        )
        try:
            array = gguf.quantize(array, its := gguf.GGMLQuantizationType(its))
        except gguf.QuantError:
            array = gguf.quantize(array, its := gguf.GGMLQuantizationType.F16)
        out.add_tensor(theirs, array, raw_dtype=its)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def numbers(out, config: dict) -> None:
    """What its loader asks for beside tensors and tokens."""
    from gguf import RopeScalingType

    rope, width, depth = config["rope_parameters"], config["head_dim"], config["num_hidden_layers"]
    out.add_block_count(depth)
    out.add_vocab_size(config["vocab_size"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(rope["rope_theta"])
    out.add_rope_dimension_count(int(width * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        out.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        out.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        out.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        out.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        out.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    match out.arch:
        case "deepseek2":
            latent = config["kv_lora_rank"]
            out.add_head_count_kv(1)  # all heads read one latent
            out.add_key_length(latent + width)
            out.add_value_length(latent)
            out.add_key_length_mla(config["qk_nope_head_dim"] + width)
            out.add_value_length_mla(config["v_head_dim"])
            out.add_kv_lora_rank(latent)
            out.add_q_lora_rank(config["q_lora_rank"] or 0)
            out.add_leading_dense_block_count(depth)
            out.add_expert_feed_forward_length(config["intermediate_size"])  # asked for, not used
            out.add_expert_shared_count(0)
            return
        case "granite_swa":
            out.add_logit_scale(1.0)
            out.add_attention_scale(config["attention_multiplier"])
            out.add_sliding_window(config["sliding_window"])
            some = (
                "sliding_attention" in config["layer_types"]
            )  # it needs one: else all have the context as window
            out.add_sliding_window_pattern(
                [kind == "sliding_attention" or not some for kind in config["layer_types"]]
            )
        case "qwen35":
            part = int(width * rope["partial_rotary_factor"]) // 2
            out.add_rope_dimension_sections(
                [part - 2 * (part // 3), part // 3, part // 3, 0]
            )  # alike for text
            linear = [kind == "linear_attention" for kind in config["layer_types"]]
            heads, size = (
                config.get("linear_num_key_heads", 1),
                config.get("linear_key_head_dim", width),
            )
            out.add_array("qwen35.attention.recurrent_layers", linear)
            out.add_ssm_conv_kernel(config.get("linear_conv_kernel_dim", 4))
            out.add_ssm_state_size(size)
            out.add_ssm_group_count(heads)
            out.add_ssm_time_step_rank(heads)
            out.add_ssm_inner_size(heads * size)
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_key_length(width)
    out.add_value_length(width)


def tokens(out, config: dict, vocabulary: ModelProto) -> None:
    """A SentencePiece vocabulary; its types are numbered as GGUF's."""
    out.add_tokenizer_model("llama")
    out.add_token_list([piece.piece for piece in vocabulary.pieces])
    out.add_token_scores([piece.score for piece in vocabulary.pieces])
    out.add_token_types([piece.type for piece in vocabulary.pieces])
    out.add_bos_token_id(config["bos_token_id"])
    out.add_eos_token_id(config["eos_token_id"])
    out.add_unk_token_id(vocabulary.trainer_spec.unk_id)
    out.add_add_bos_token(True)
    out.add_add_eos_token(False)
    out.add_add_space_prefix(vocabulary.normalizer_spec.add_dummy_prefix)
    out.add_remove_extra_whitespaces(vocabulary.normalizer_spec.remove_extra_whitespaces)


def arranged(architecture: str, config: dict, weights: dict[str, Tensor]):
    """(name in transformers, tensor) of all that a file holds, as llama.cpp computes with it."""
    heads, width = config["num_attention_heads"], config["head_dim"]
    turn = StoredTensor([], [], turned=width)
    for name, weight in weights.items():
        if architecture in SIDE_BY_SIDE and ("q_proj" in name or "k_proj" in name):
            weight = turn.join([weight])
        if architecture == "qwen35" and name.endswith("norm.weight") and "linear_attn" not in name:
            weight = weight + 1
        if name.endswith("sinks"):
            name = f"blk.{name.split('.')[2]}.attn_sinks.weight"
        if name.endswith("conv1d.weight"):
            weight = weight.squeeze(1)
        if name.endswith("dt_bias"):
            name = name.replace("dt_bias", "dt_proj.bias")
        if name.endswith("A_log"):
            weight = -weight.exp()
        if name.endswith("kv_a_proj_with_mqa.weight"):
            latent, key = weight.split([config["kv_lora_rank"], width])
            weight = torch.cat((latent, turn.join([key])))
        if architecture == "deepseek2" and name.endswith(("q_proj.weight", "q_b_proj.weight")):
            plain, turned = weight.unflatten(0, (heads, -1)).split(
                [config["qk_nope_head_dim"], width], dim=1
            )
            turned = turn.join([turned.flatten(0, 1)]).view_as(turned)
            weight = torch.cat((plain, turned), dim=1).flatten(0, 1)
        if name.endswith("kv_b_proj.weight"):  # read by absorbed queries
            key, value = weight.unflatten(0, (heads, -1)).split(
                [config["qk_nope_head_dim"], config["v_head_dim"]], 1
            )
            yield name.replace("kv_b_proj", "k_b_proj"), key.transpose(1, 2)
            name, weight = name.replace("kv_b_proj", "v_b_proj"), value
        yield name, weight
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
        target, knobs = config.SCALINGS["llama3"]
        plain = rope["rope_theta"] ** -(torch.arange(0, width, 2) / width)
        scaling = instantiate(
            {"_target_": target} | {ours: rope[theirs] for theirs, ours in knobs.items()}
        )
        yield "rope_freqs.weight", plain / scaling(plain, width, rope["rope_theta"])[0]
