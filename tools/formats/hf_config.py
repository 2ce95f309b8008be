"""Our models as classes of `transformers` and back: which class, and its config.json."""

from model.build import build_model
from tools.formats.architectures import (
    ARCHITECTURES,
    PLAIN_SOFTMAX,
    TRANSFORMER,
    Architecture,
    common_value,
)
from tools.formats.hf_rope import rope_from_hf, rope_to_hf
from tools.formats.layer_knobs import HYBRID, attention_knobs

# Classes of published models that our layers express, and whose tensors are stored as ours.
IMPORTED = [f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen3", "SmolLM3", "Arcee")]
MOST_LAYERS = 2**12  # accepted from a config.json, which is not trusted
SHAPE = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "hidden": "intermediate_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}
# Entries that may be written in several ways, and are read as they are.
READ_ENTRIES = {
    "architectures",
    "model_type",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "layer_types",
    "no_rope_layers",
    "sliding_window",
}


def to_hf_config(tree: dict) -> dict:
    """The config.json of a model, without what only its tokenizer knows.

    Raises ValueError for a model that no class can express.
    """
    layers = attention_knobs(tree)
    name = choose_architecture(tree, layers)
    architecture = ARCHITECTURES[name]
    # Where a knob is null, the attention derives its value and has it in an attribute of the same
    # name.
    for layer, block in zip(layers, build_model(tree, "meta").blocks, strict=True):
        layer |= vars(block.attention)

    # Positions.
    rope_layers = [layer for layer in layers if layer.get("rope_base") is not None]
    scaling = common_value(rope_layers, "rope_scaling")
    rope = rope_to_hf(common_value(layers, "rope_base", 10000.0), scaling)
    if "rope_fraction" in architecture.free_knobs:
        rope["partial_rotary_factor"] = common_value(layers, "rope_fraction", 1.0)

    # What all classes have.
    softmax_layers = [layer for layer in layers if "kv_heads" in layer]
    config = {theirs: tree[ours] for ours, theirs in SHAPE.items()}
    config |= {
        "architectures": [name],
        "model_type": architecture.model_type,
        architecture.norm_eps_entry: tree["norm_eps"],
        "num_key_value_heads": common_value(layers, "kv_heads", tree["heads"]),
        "head_dim": common_value(softmax_layers, "head_dim", tree["dim"] // tree["heads"]),
        "hidden_act": tree["ffn"]["activation"],
        "attention_bias": common_value(layers, "bias", False),
        "mlp_bias": False,
        # The first two are for readers that do not know `rope_parameters`.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling is None else rope,
        "rope_parameters": rope,
    }
    # Despite its name, 1 means that the layer has RoPE.
    if "rope_base" in architecture.free_knobs:
        config["no_rope_layers"] = [int(layer["rope_base"] is not None) for layer in layers]
    return config | architecture.own_config(tree, layers)


def choose_architecture(tree: dict, layers: list[dict]) -> str:
    """The first class that can express a model. Raises ValueError where none can."""
    misfits = {name: ARCHITECTURES[name].misfits(tree, layers) for name in ARCHITECTURES}
    # The nearest has the right mechanism, and the fewest misfits.
    nearest = min(misfits, key=lambda name: ("_target_" in str(misfits[name]), len(misfits[name])))
    if misfits[nearest]:
        raise ValueError(
            f"no class of transformers has this model ({nearest} is the nearest, and lacks "
            f"{', '.join(sorted(misfits[nearest]))}). "
            "fix: train anew with attention=gqa ffn=swiglu norm=rmsnorm model.softcap=null"
        )
    return nearest


def from_hf_config(config: dict) -> tuple[str, dict]:
    """A config.json of `transformers` -> the name of its class, and the model that it describes.

    The model is built from the entries that we read, then exported again: every entry that we would
    write must have the same value in the config. For example, we do not read `mlp_bias` and would
    write `mlp_bias: false`, so a config with `mlp_bias: true` is refused. Entries that we never
    write are ignored.
    Raises ValueError for a model that our layers cannot express.
    """
    names = config.get("architectures")
    if names not in [[name] for name in IMPORTED] or config.get("auto_map"):
        raise ValueError(
            f"an unknown architecture, or a model with code of its own (config.json: {names}, "
            f"auto_map={config.get('auto_map')}). fix: one of {', '.join(IMPORTED)}"
        )
    (name,) = names
    try:
        config = with_defaults(config, ARCHITECTURES[name])
        tree = read_model(config, ARCHITECTURES[name])
        written = to_hf_config(tree)
    except (LookupError, TypeError, AttributeError, ZeroDivisionError, RuntimeError) as error:
        raise ValueError(
            f"not a config of {name} (config.json: {error!r}). fix: as transformers saves it"
        ) from None
    # Compare it with what we would write.
    different = []
    for entry, value in written.items():
        if entry not in READ_ENTRIES and config.get(entry) != value:
            different.append(f"{entry}={config.get(entry)}")
    if different:
        raise ValueError(
            f"this {name} has what our layers lack (config.json: {', '.join(different)}). "
            "fix: another model"
        )
    return name, tree


def with_defaults(config: dict, architecture: Architecture) -> dict:
    """The config, with the values of entries that are missing or null."""
    if config["num_hidden_layers"] > MOST_LAYERS:
        raise RuntimeError(f"more than {MOST_LAYERS} layers")
    heads = config["num_attention_heads"]
    derived = {"head_dim": config["hidden_size"] // heads, "num_key_value_heads": heads}
    defaults = {key: derived.get(key, value) for key, value in architecture.defaults.items()}
    # A window of Mistral is in all layers, unless `layer_types` says otherwise.
    layer_type = "full_attention"
    if architecture.model_type == "mistral" and config["sliding_window"] is not None:
        layer_type = "sliding_attention"
    defaults["layer_types"] = [layer_type] * config["num_hidden_layers"]
    return defaults | {key: value for key, value in config.items() if value is not None}


def read_model(config: dict, architecture: Architecture) -> dict:
    """The model that the entries seem to describe."""
    types = config["layer_types"]
    has_rope = [1] * len(types)
    if "rope_base" in architecture.free_knobs:
        has_rope = config["no_rope_layers"]
    # Layers of one type that all have, or all lack, RoPE are one kind.
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
    ffn = {"_target_": architecture.ffn, "activation": config["hidden_act"]}
    return {
        "_target_": TRANSFORMER,
        **{ours: config[theirs] for ours, theirs in SHAPE.items()},
        "norm_eps": config[architecture.norm_eps_entry],
        "softcap": None,
        "attention": attention,
        "ffn": {"_partial_": True, **ffn},
        "norm": {"_target_": architecture.norm, "_partial_": True},
    }


def read_layer(config: dict, architecture: Architecture, layer_type: str, has_rope: int) -> dict:
    """The knobs of a layer's attention."""
    knobs = PLAIN_SOFTMAX | architecture.fixed_knobs | rope_from_hf(config)
    windows = {"full_attention": None, "sliding_attention": config.get("sliding_window")}
    knobs |= {
        "kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "bias": config["attention_bias"],
        "dropout": 0.0,
        "window": windows[layer_type],  # KeyError for a type that the class lacks
    }
    if not has_rope:
        knobs |= {"rope_base": None, "rope_scaling": None}
    return knobs
