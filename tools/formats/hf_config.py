"""Our models as classes of `transformers` and back: which class, and its config.json."""

from model.build import build_model
from run.config import LARGEST
from tools.formats.architectures import (
    ARCHITECTURES,
    EXPERT_SIZES,
    MOST_LAYERS,
    PARTS,
    PLAIN_SOFTMAX,
    Architecture,
    common_value,
)
from tools.formats.hf_rope import rope_to_hf

TRANSFORMER = "model.transformer.Transformer"
HYBRID = "model.attention.hybrid.hybrid"
SHAPE = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "hidden": "intermediate_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}
# Entries that are not compared with what we would write: they may be written in several ways, and
# are read as they are, or they have no meaning for dense layers.
IGNORED_ENTRIES = {
    "architectures",
    "model_type",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "layer_types",
    "no_rope_layers",
    "sliding_window",
    "attention_chunk_size",
    "num_mtp_layers",
    *EXPERT_SIZES,
}


def to_hf_config(tree: dict) -> dict:
    """The config.json of a model, without what only its tokenizer knows.

    Raises ValueError for a model that no class can express.
    """
    name = choose_architecture(tree)
    architecture = ARCHITECTURES[name]
    layers = layer_knobs(tree)

    # Where a knob is null, the attention derives its value and has it in an attribute of the same
    # name. So build the layers, without memory, and read their attributes.
    blocks = build_model(tree).blocks
    for layer, block in zip(layers, blocks, strict=True):
        layer |= vars(block.attention)
    softmax_layers = [layer for layer in layers if "kv_heads" in layer]

    # Positions.
    rope_layers = [layer for layer in layers if layer.get("rope_base") is not None]
    scaling = common_value(rope_layers, "rope_scaling")
    rope = rope_to_hf(common_value(layers, "rope_base", 10000.0), scaling)
    if "rope_fraction" in architecture.free_knobs:
        rope["partial_rotary_factor"] = common_value(layers, "rope_fraction", 1.0)

    # What all classes have.
    tree = {"norm_eps": 1e-6} | tree
    config = {"architectures": [name], "model_type": architecture.model_type}
    config |= {theirs: tree[ours] for ours, theirs in SHAPE.items()}
    config |= {
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


def choose_architecture(tree: dict) -> str:
    """The first class that can express a model.

    Raises ValueError, with the nearest class and what to change for it, where none can.
    """
    layers = layer_knobs(tree)
    misfits = {}
    for name, architecture in ARCHITECTURES.items():
        misfits[name] = architecture.misfits(layers) | architecture.part_misfits(tree)
    # The nearest has the right mechanism, and the fewest knobs to change.
    nearest = min(misfits, key=lambda name: ("_target_" in misfits[name], len(misfits[name])))
    needed = misfits[nearest]
    if not needed:
        return nearest

    # Say what the model has, and what it would need.
    values = []
    changes = []
    for knob, (ours, theirs) in needed.items():
        values.append(f"{knob}={ours}")
        key = knob if knob in ("ffn", "norm") else f"attention.{knob}"
        changes.append(f"{key}={'null' if theirs is None else theirs}")
    if "_target_" in needed:
        nearest = "Qwen3ForCausalLM"
        changes = ["attention=gqa ffn=swiglu norm=rmsnorm"]
    raise ValueError(
        f"no class of transformers has these layers ({', '.join(values)}; "
        f"the nearest class is {nearest}). "
        f"fix: train anew with {' '.join(changes)}"
    )


def layer_knobs(tree: dict) -> list[dict]:
    """As attention_knobs(). Raises ValueError for what no class has around attention."""
    decoder = tree["_target_"]
    softcap = tree.get("softcap")
    if decoder != TRANSFORMER or softcap is not None:
        raise ValueError(
            f"no class of transformers has this decoder ({decoder}, {softcap=}). "
            f"fix: train {TRANSFORMER} with softcap=null"
        )
    return attention_knobs(tree)


def attention_knobs(tree: dict) -> list[dict]:
    """The knobs of each layer's attention."""
    kinds, kind_of_layer = attention_kinds(tree["attention"], tree["depth"])
    return [with_defaults(kinds[kind]) for kind in kind_of_layer]


def attention_kinds(attention: dict, depth: int) -> tuple[dict[str, dict], list[str]]:
    """The knobs of each kind of layers, and the kind of each layer; of a single kind, ""."""
    if attention["_target_"] != HYBRID:
        return {"": attention}, [""] * depth
    # The pattern is repeated so that it ends with the last layer.
    pattern = attention["pattern"]
    kind_of_layer = [pattern[(layer - depth) % len(pattern)] for layer in range(depth)]
    return attention["kinds"], kind_of_layer


def with_defaults(knobs: dict) -> dict:
    """The knobs of an attention, with those of softmax attention that an older run lacks."""
    return PLAIN_SOFTMAX | knobs if "kv_heads" in knobs else dict(knobs)


def from_hf_config(config: dict) -> dict:
    """The model that a config.json of `transformers` describes.

    The model is built from the entries that we read, then exported again: every entry that we would
    write must have the same value in the config. For example, we do not read `mlp_bias` and would
    write `mlp_bias: false`, so a config with `mlp_bias: true` is refused. Entries that we never
    write are ignored.
    Raises ValueError for a model that our layers cannot express.
    """
    names = config.get("architectures")
    if names not in [[name] for name in ARCHITECTURES]:
        raise ValueError(
            f"unknown architecture (config.json has {names}). "
            f"fix: one of {', '.join(ARCHITECTURES)}"
        )
    if config.get("auto_map"):
        raise ValueError(
            f"a model with code of its own (config.json: auto_map={config['auto_map']}). "
            "fix: another model; nothing in a folder is run"
        )
    (name,) = names
    architecture = ARCHITECTURES[name]
    try:
        # Build the model that the config seems to describe.
        shape = read_shape(config) | {"norm_eps": config[architecture.norm_eps_entry]}
        config = dict(config)
        for entry, default in architecture.defaults(config).items():
            if config.get(entry) is None and entry not in architecture.needed_entries:
                config[entry] = default
        attention = read_attention(config, architecture)
        tree = {"_target_": TRANSFORMER, **shape, "softcap": None, "attention": attention}
        tree["ffn"] = {
            "_target_": PARTS[architecture.ffn],
            "_partial_": True,
            "activation": config["hidden_act"],
        }
        tree["norm"] = {"_target_": PARTS[architecture.norm], "_partial_": True}
        written = to_hf_config(tree)
    except (LookupError, TypeError, AttributeError, ZeroDivisionError, RuntimeError) as error:
        raise ValueError(
            f"not a config of {name} (config.json: {error!r}). fix: as transformers saves it"
        ) from None
    # Compare it with what we would write.
    different = []
    for entry, value in written.items():
        if entry not in IGNORED_ENTRIES and config.get(entry) != value:
            different.append(f"{entry}={config.get(entry)}")
    if different:
        raise ValueError(
            f"this {name} has what our layers lack (config.json: {', '.join(different)}). "
            "fix: another model"
        )
    return tree


def read_shape(config: dict) -> dict:
    """The sizes of a model. Raises ValueError for one that is not in the range of models."""
    shape = {ours: config[theirs] for ours, theirs in SHAPE.items()}
    sizes = [size for name, size in shape.items() if name != "tied"]
    if not all(0 < size <= LARGEST for size in sizes) or shape["depth"] > MOST_LAYERS:
        raise ValueError(
            f"not the sizes of a model (config.json: {shape}). fix: as transformers saves it"
        )
    return shape


def read_attention(config: dict, architecture: Architecture) -> dict:
    """The attention of a model, as far as our layers can express it.

    Raises ValueError for types of layers that the class lacks.
    """
    types = config["layer_types"]
    unknown = {*types} - {*architecture.layer_types}
    if unknown:
        model_type = architecture.model_type
        known = ", ".join(architecture.layer_types)
        raise ValueError(
            f"{model_type} has no such layers (config.json: {unknown}). fix: one of {known}"
        )
    has_rope = [1] * config["num_hidden_layers"]
    if "rope_base" in architecture.free_knobs:
        has_rope = config["no_rope_layers"]

    # Layers of one type that all have, or all lack, RoPE are one kind.
    kinds = {}
    pattern = []
    for layer_type, has_rope_here in zip(types, has_rope, strict=True):
        kind = layer_type.removesuffix("_attention")
        if not has_rope_here:
            kind += "_nope"
        kinds[kind] = architecture.layer_from_config(config, layer_type, bool(has_rope_here))
        pattern.append(kind)
    if len(kinds) == 1:
        return kinds[pattern[0]]
    return {"_target_": HYBRID, "_partial_": True, "kinds": kinds, "pattern": pattern}
