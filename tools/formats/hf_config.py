"""Convert our model configs to and from a class of `transformers` and its config.json."""

import json
from pathlib import Path

from model.build import build_model
from run.checkpoint import MOST_LAYERS
from tools.formats.architectures import ARCHITECTURES
from tools.formats.decoder import (
    GATED_FFN,
    HYBRID,
    PLAIN_SOFTMAX,
    RMS_NORM,
    TRANSFORMER,
    Architecture,
    attention_options,
    common_value,
    layer_types,
)
from tools.formats.hf_rope import rope_from_hf, rope_to_hf
from tools.formats.verify import LOCAL, import_transformers, malformed

# Classes of published models that our layers can express and that store tensors as we do.
CLASSES = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")
IMPORTED = [f"{name}ForCausalLM" for name in CLASSES]
SHAPE = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "hidden": "intermediate_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
# Entries that are not compared with our own export: positions, which hf_rope.py reads or refuses,
# and entries that change no logits. `transformers` may act on any other entry.
READ = {"rope_parameters", "original_max_position_embeddings"}
IGNORED = {
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "attention_dropout",
    "bos_token_id",
    "classifier_dropout",
    "do_sample",
    "dtype",
    "eos_token_id",
    "gradient_checkpointing",
    "initializer_range",
    "is_llama_config",
    "max_length",
    "max_sequence_length",
    "max_window_layers",
    "no_rope_layer_interval",
    "pad_token_id",
    "pretraining_tp",
    "rope_interleaved",
    "sep_token_id",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "transformers_version",
    "unk_token_id",
    "use_cache",
    "use_mrope",
}


def to_hf_config(tree: dict, name: str | None = None) -> dict:
    """Return the config.json of a model, without the entries that depend on its tokenizer.

    The config.json is for the class `name`, or else for the first class that can express the model.
    Raises ValueError for a model that no class can express.
    """
    layers = attention_options(tree)
    name = name or choose_architecture(tree, layers)
    architecture = ARCHITECTURES[name]
    # If an option is null, the attention may derive a value and store it in an attribute of the
    # same name. The attribute `rope_scaling` is an object, so the option itself is kept.
    for layer, block in zip(layers, build_model(tree, "meta").blocks, strict=True):
        scaling = layer.get("rope_scaling")
        layer |= vars(block.attention) | {"rope_scaling": scaling}

    # Positions.
    rope_layers = [layer for layer in layers if layer.get("rope_base") is not None]
    scaling = common_value(rope_layers, "rope_scaling")
    rope = rope_to_hf(common_value(layers, "rope_base", 10000.0), scaling)
    if "rope_fraction" in architecture.free_options:
        rope["partial_rotary_factor"] = common_value(layers, "rope_fraction", 1.0)

    # Entries of all classes.
    softmax_layers = [layer for layer in layers if "kv_heads" in layer]
    config = {theirs: tree[ours] for ours, theirs in SHAPE.items()}
    config |= {
        "architectures": [name],
        "model_type": architecture.model_type,
        "num_key_value_heads": common_value(layers, "kv_heads", tree["heads"]),
        "head_dim": common_value(softmax_layers, "head_dim", tree["dim"] // tree["heads"]),
        "hidden_act": tree["ffn"]["activation"],
        "attention_bias": common_value(layers, "bias", False),
        "mlp_bias": False,
    }
    if "rope_base" not in architecture.fixed_options:
        # The first two are for programs that do not know `rope_parameters`.
        config |= {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if scaling is None else rope,
            "rope_parameters": rope,
        }
    # Despite the name of this entry, 1 means that the layer has RoPE.
    if "rope_base" in architecture.free_options:
        config["no_rope_layers"] = [int(layer["rope_base"] is not None) for layer in layers]
    return config | architecture.own_config(tree, layers)


def choose_architecture(tree: dict, layers: list[dict]) -> str:
    """Return the name of the first class that fits a model. Raises ValueError if none does."""
    misfits = {name: each.misfits(tree, layers) for name, each in ARCHITECTURES.items()}

    # The nearest class has the right mechanism and the fewest misfits, preferably in QK-norm, which
    # can be changed without changing the mechanism.
    def distance(name: str) -> tuple[bool, int, bool]:
        found = misfits[name]
        has_mechanism = not any("_target_" in each for each in found)
        has_norms_among = any("qk_norm" in each for each in found)
        return not has_mechanism, len(found), not has_norms_among

    nearest = min(misfits, key=distance)
    found = sorted(misfits[nearest])
    if found:
        fix = "attention=gqa ffn=swiglu norm=rmsnorm model.softcap=null"
        if found == ["attention.qk_norm=before_rope"]:
            needed = ARCHITECTURES[nearest].required_options(layers[0])["qk_norm"]
            fix = f"attention.qk_norm={needed or 'null'} in each kind of layer"
        raise ValueError(
            f"no known transformers class has this architecture ({nearest} is the closest, but "
            f"does not support {', '.join(found)}). fix: train again with {fix}"
        )
    return nearest


def read_config(folder: Path) -> tuple[str, dict]:
    """Return the name of the class of a folder's model, and the model as a config of ours.

    Raises ValueError for an invalid config.json, or a model that our layers cannot express.
    """
    content = read_json(folder / "config.json")
    with malformed(f"cannot import this config ({folder / 'config.json'})"):
        names = content["architectures"]
        if len(names) != 1 or names[0] not in IMPORTED:
            raise ValueError(
                f"unknown architecture ({names}). fix: use a model of {' or '.join(IMPORTED)}"
            )
        if content["num_hidden_layers"] > MOST_LAYERS:
            raise ValueError(f"too many layers: the limit is {MOST_LAYERS}")
        config = import_transformers().AutoConfig.from_pretrained(folder, **LOCAL)
        return names[0], from_hf_config(config.to_dict(), names[0])


def from_hf_config(entries: dict, name: str) -> dict:
    """Return our config of the model in `entries`, a config.json with all of its defaults.

    The model is built from the entries that we read, then exported again: every entry that is not
    null, and not in READ or IGNORED, must have the value that we would write. For example, we do
    not read `mlp_bias` and would write `mlp_bias: false`, so a config with `mlp_bias: true` is
    refused, and so is one with a `quantization_config`.
    Raises ValueError for a model that our layers cannot express.
    """
    architecture = ARCHITECTURES[name]
    entries = {entry: value for entry, value in entries.items() if value is not None}
    # In a class without layer types, a window applies to all layers.
    has_window = "sliding_window" in entries
    layer_type = "sliding_attention" if has_window else "full_attention"
    entries = {"layer_types": [layer_type] * entries["num_hidden_layers"]} | entries
    if not entries.get("use_sliding_window", True):
        entries.pop("sliding_window", None)
    tree = read_model(entries, architecture)
    layers = attention_options(tree)
    different = sorted(architecture.misfits(tree, layers))

    # Compare the entries with our own export.
    export = to_hf_config(tree, name)
    written = {"layer_types": layer_types(layers), "is_causal": True}
    written |= import_transformers().AutoConfig.for_model(**export).to_dict()
    for entry in sorted(entries.keys() - READ - IGNORED):
        if entries[entry] != written.get(entry):
            different.append(f"{entry}={entries[entry]}")
    if different:
        raise ValueError(f"attend cannot express this {name} (config.json: {', '.join(different)})")
    return tree


def read_json(file: Path) -> dict:
    """Return the object in a JSON file. Raises ValueError, naming the file, if this fails."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return dict(content)
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise ValueError(
            f"missing or not a JSON object ({file}: {error}). fix: download all files of the "
            "model. A run or checkpoint of attend needs no import"
        ) from None


def read_model(config: dict, architecture: Architecture) -> dict:
    """Return the model that the entries of a config.json seem to describe."""
    types = config["layer_types"]
    has_rope = [1] * len(types)
    if "rope_base" in architecture.free_options:
        has_rope = config["no_rope_layers"]
    if {len(types), len(has_rope)} != {config["num_hidden_layers"]}:
        raise ValueError("layer_types and no_rope_layers must have num_hidden_layers entries")
    # The layers of a type with RoPE are one kind, and the layers of this type without RoPE another.
    kinds = {}
    pattern = []
    for layer_type, has_rope_here in zip(types, has_rope, strict=True):
        kind = layer_type.removesuffix("_attention")
        if not has_rope_here:
            kind += "_nope"
        kinds[kind] = read_layer(config, architecture, layer_type, has_rope_here)
        pattern.append(kind)
    attention = kinds[pattern[0]]
    if len(kinds) > 1:
        attention = {"_target_": HYBRID, "_partial_": True, "kinds": kinds, "pattern": pattern}
    return {
        "_target_": TRANSFORMER,
        **{ours: config[theirs] for ours, theirs in SHAPE.items()},
        "softcap": None,
        "attention": attention,
        "ffn": {"_target_": GATED_FFN, "_partial_": True, "activation": config["hidden_act"]},
        "norm": {"_target_": RMS_NORM, "_partial_": True},
    }


def read_layer(config: dict, architecture: Architecture, layer_type: str, has_rope: int) -> dict:
    """Return the options of a layer's attention."""
    options = PLAIN_SOFTMAX | architecture.fixed_options | rope_from_hf(config)
    windows = {"full_attention": None, "sliding_attention": config.get("sliding_window")}
    options |= {
        "kv_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
        "bias": config.get("attention_bias", architecture.fixed_options.get("bias", False)),
        "dropout": 0.0,
        "window": windows[layer_type],  # KeyError for any other type
    }
    if not has_rope:
        options |= {"rope_base": None, "rope_scaling": None}
    return options
