"""Our models as classes of `transformers`, and back: which class, and its config.json.

A class is chosen by what the layers are. A config that is read has to say what we would write for what we made of it:
what a class takes for granted is asked for, where our layers do not have it.
"""

import torch

from common.config import LARGEST
from common.instantiate import instantiate

DECODER = "model.transformer.Transformer"
SOFTMAX = "model.attention.softmax.SoftmaxAttention"
DIFFERENTIAL = "model.attention.differential.DifferentialAttention"
LATENT, DELTA = "model.attention.mla.LatentAttention", "model.attention.gated_delta.GatedDelta"
KNOWN = {SOFTMAX, DIFFERENTIAL, LATENT, DELTA}  # attentions that some class has
INTERLEAVE = "model.attention.hybrid.hybrid"
PLAIN = {
    "_target_": SOFTMAX,
    "_partial_": True,
    "rope_fraction": 1.0,
    "rope_scaling": None,
    "qk_norm": None,
}
PLAIN |= {
    "window": None,
    "chunk": None,
    "softcap": None,
    "sink": False,
    "gated": False,
    "dropout": 0.0,
    "bias": False,
}
SOME = {"window", "chunk", "rope_base"}  # null in a layer that has none
ANY, ALIKE = "anything", "the same in all layers"
# model_type of a class, and what its layers may be where they are not PLAIN
CLASSES = {
    "Llama": ("llama", {"bias": ANY}),
    "Qwen3": ("qwen3", {"qk_norm": ["before_rope"], "window": ANY, "bias": ANY}),
    "Mistral": ("mistral", {"window": ALIKE}),
    "SmolLM3": ("smollm3", {"rope_base": ANY, "window": ANY, "bias": ANY}),
    "Llama4": (
        "llama4_text",
        {"qk_norm": ["after_rope", None], "rope_base": ANY, "chunk": ANY, "bias": ANY},
    ),
    "GraniteSWA": ("granite_swa", {"sink": [True], "window": ANY, "bias": ANY}),
    "DiffLlama": ("diffllama", {"_target_": [DIFFERENTIAL], "bias": ANY}),
    "DeepseekV3": ("deepseek_v3", {"_target_": [LATENT], "bias": ANY}),
    "Qwen3_5": (
        "qwen3_5_text",
        {
            "_target_": [SOFTMAX, DELTA],
            "qk_norm": ["before_rope"],
            "gated": [True],
            "rope_fraction": ANY,
            "bias": ANY,
        },
    ),
}
SHAPE = {
    "vocab_size": "vocab_size", "dim": "hidden_size", "hidden": "intermediate_size", "depth": "num_hidden_layers",
    "heads": "num_attention_heads", "context": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}  # fmt: skip
STRETCHED = {"factor": "factor", "original_max_position_embeddings": "context"}
SCALINGS = {
    "linear": ("model.rope.Linear", {"factor": "factor"}),
    "llama3": (
        "model.rope.Llama3",
        STRETCHED | {"low_freq_factor": "low", "high_freq_factor": "high"},
    ),
    "yarn": ("model.rope.YaRN", STRETCHED | {"beta_fast": "fast", "beta_slow": "slow"}),
}
TYPES = {
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "gated",
}  # knobs beside them
TYPED = {"Llama4", "GraniteSWA", "Qwen3_5"}  # where not all layers are full if nothing is said
# read however they were written, or of no meaning to dense layers
READ = {
    "architectures",
    "model_type",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "layer_types",
}
READ |= {"no_rope_layers", "sliding_window", "attention_chunk_size"}
NO_EXPERTS = {
    "n_routed_experts",
    "n_group",
    "topk_group",
    "num_experts_per_tok",
    "moe_intermediate_size",
}
READ |= {*NO_EXPERTS, "num_mtp_layers"}
# what a class takes for granted where nothing is said, and in all that have the key
USUAL = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}


def layer_knobs(tree: dict) -> list[dict]:
    """The knobs of each layer's attention. Raises ValueError for a decoder that is not the plain one."""
    if tree["_target_"] != DECODER or tree.get("softcap") is not None:
        given = f"{tree['_target_']}, softcap={tree.get('softcap')}"
        raise ValueError(
            f"no class of transformers has this decoder ({given}). fix: train {DECODER} with softcap=null"
        )
    attention, layers = tree["attention"], []
    for layer in range(tree["depth"]):
        knobs = attention
        if attention["_target_"] == INTERLEAVE:
            pattern = attention["pattern"]
            knobs = attention["kinds"][pattern[(layer - tree["depth"]) % len(pattern)]]
        layers.append({**(PLAIN if "kv_heads" in knobs else {}), **knobs})
        if knobs["_target_"] == DELTA:
            del layers[-1]["chunk"]  # which is how it computes, and no mask
    return layers


def common_value(layers: list[dict], knob: str, default: object = None) -> object:
    """What all layers have that have it. Raises ValueError where they differ."""
    found = [
        layer[knob]
        for layer in layers
        if knob in layer and (layer[knob] is not None or knob not in SOME)
    ]
    if any(value != found[0] for value in found):
        raise ValueError(
            f"no class of transformers has layers of different {knob} ({found}). fix: the same in all"
        )
    return found[0] if found else default


def misfits(name: str, layers: list[dict]) -> dict[str, object]:
    """The knobs that keep such layers out of a class, with what they would have to be."""
    allowed, found = CLASSES[name][1], {}
    for layer in layers:
        of_softmax = layer["_target_"] not in (LATENT, DELTA)
        for knob, plain in PLAIN.items() if of_softmax else [("_target_", SOFTMAX)]:
            may = allowed.get(knob, ANY if knob in ("dropout", "rope_scaling") else [plain])
            if (
                layer[knob] not in may
                if isinstance(may, list)
                else may == ALIKE and layer[knob] != layers[0].get(knob)
            ):
                found[knob] = may[0] if isinstance(may, list) else layers[0].get(knob)
        if of_softmax and layer["rope_base"] is None and "rope_base" not in allowed:
            found["rope_base"] = 10000.0
        if name == "Llama4" and (layer.get("qk_norm") is None) != (layer.get("rope_base") is None):
            found["qk_norm"] = None if layer.get("rope_base") is None else "after_rope"
    return found


def choose_architecture(tree: dict) -> str:
    """The first class that can express a model. Raises ValueError, which names the nearest, where none can."""
    layers = layer_knobs(tree)
    unknown = sorted({layer["_target_"] for layer in layers} - KNOWN)
    if unknown:
        raise ValueError(
            "no class that is exported to has this attention "
            f"({', '.join(unknown)}, beside Qwen3ForCausalLM). fix: train anew with attention=gqa"
        )
    found = {name: misfits(name, layers) for name in CLASSES}
    nearest = min(found, key=lambda name: ("_target_" in found[name], len(found[name])))
    if not found[nearest]:
        return nearest
    has = ", ".join(
        f"{knob}={next(layer[knob] for layer in layers if knob in layer)}"
        for knob in found[nearest]
    )
    needs = " ".join(
        f"attention.{key}={'null' if value is None else value}"
        for key, value in found[nearest].items()
    )
    if "_target_" in found[nearest]:
        nearest, needs = "Qwen3", "attention=gqa"
    given = f"{has}, beside {nearest}ForCausalLM"
    raise ValueError(
        f"no class that is exported to has this attention ({given}). fix: train anew with {needs}"
    )


def to_hf_config(tree: dict) -> dict:
    """config.json of a model, but for what its tokenizer knows. Raises ValueError for one that no class can express."""
    name, layers = choose_architecture(tree), layer_knobs(tree)
    turned = [layer for layer in layers if layer.get("rope_base") is not None]
    window, chunk, scaling = (
        *(common_value(layers, knob) for knob in ("window", "chunk")),
        common_value(turned, "rope_scaling"),
    )
    rope = {"rope_type": "default", "rope_theta": common_value(layers, "rope_base", 10000.0)}
    for kind, (target, knobs) in SCALINGS.items():
        if scaling is not None and scaling["_target_"] == target:
            rope |= {"rope_type": kind} | {theirs: scaling[ours] for theirs, ours in knobs.items()}
    if name == "Qwen3_5":
        rope["partial_rotary_factor"] = common_value(layers, "rope_fraction", 1.0)
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": CLASSES[name][0],
        **{theirs: ({"norm_eps": 1e-6} | tree)[ours] for ours, theirs in SHAPE.items()},
        "num_key_value_heads": common_value(layers, "kv_heads", tree["heads"]),
        "head_dim": tree["dim"] // tree["heads"],
        "hidden_act": "silu",
        "attention_bias": common_value(layers, "bias", False),
        "mlp_bias": False,
        "rope_theta": rope["rope_theta"],  # these two for who does not know the third
        "rope_scaling": None if scaling is None else rope,
        "rope_parameters": rope,
        **class_specific_config(name, tree, layers, window, chunk),
    }


def class_specific_config(
    name: str, tree: dict, layers: list[dict], window: int | None, chunk: int | None
) -> dict:
    """What the config of one class alone has. Raises ValueError where its layers differ in that."""
    types = [layer_type(layer) for layer in layers]
    ropes = [int(layer.get("rope_base") is not None) for layer in layers]
    with torch.device("meta"):
        own = [vars(block.attention) for block in instantiate(tree).blocks]
    match name:
        case "Mistral":
            return {"sliding_window": window}
        case "Qwen3":
            return {
                "use_sliding_window": window is not None,
                "sliding_window": window,
                "layer_types": types,
            }
        case "SmolLM3":
            return class_specific_config("Qwen3", tree, layers, window, chunk) | {
                "no_rope_layers": ropes
            }
        case "Llama4":
            dense = {"moe_layers": [], "intermediate_size_mlp": tree["hidden"]}
            scores = {"use_qk_norm": True, "attn_temperature_tuning": False}
            chunks = {"attention_chunk_size": chunk or tree["context"], "layer_types": types}
            return {**dense, **scores, **chunks, "no_rope_layers": ropes}
        case "GraniteSWA":
            factors = dict.fromkeys(
                ("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0
            )
            factors["attention_multiplier"] = (tree["dim"] // tree["heads"]) ** -0.5
            return {**factors, "layer_types": types, "sliding_window": window or tree["context"]}
        case "DeepseekV3":
            if (
                tree.get("norm_eps", 1e-6) != 1e-6
            ):  # it has this one in the latents, whatever its config says
                raise ValueError(
                    f"DeepseekV3 has norms of 1e-6 (got {tree['norm_eps']}). fix: norm_eps=1e-6"
                )
            latent = {
                "kv_lora_rank": common_value(own, "rank"),
                "q_lora_rank": common_value(layers, "query_rank"),
            }
            widths = {
                "qk_nope_head_dim": common_value(own, "head_dim"),
                "v_head_dim": common_value(own, "value_dim"),
            }
            turned = dict.fromkeys(
                ("qk_rope_head_dim", "head_dim"), common_value(own, "rope_dim")
            ) | {"rope_interleave": False}
            dense = dict.fromkeys(NO_EXPERTS, 1) | {
                "first_k_dense_replace": tree["depth"],
                "num_mtp_layers": 0,
            }
            return {**latent, **widths, **turned, **dense}
        case "Qwen3_5" if "full_attention" not in types:
            raise ValueError(
                "Qwen3_5ForCausalLM needs a layer of softmax (all are delta). fix: one in the pattern"
            )
        case "Qwen3_5" if "linear_attention" in types:
            delta = [
                layer for layer, kind in zip(own, types, strict=True) if kind == "linear_attention"
            ]
            heads = dict.fromkeys(
                ("linear_num_key_heads", "linear_num_value_heads"), common_value(delta, "heads")
            )
            widths = dict.fromkeys(
                ("linear_key_head_dim", "linear_value_head_dim"), common_value(delta, "head_dim")
            )
            return {
                **heads,
                **widths,
                "linear_conv_kernel_dim": common_value(delta, "kernel"),
                "layer_types": types,
            }
        case "Qwen3_5":
            return {"layer_types": types}
    return {}


def layer_type(layer: dict) -> str:
    kinds = {
        "linear": layer["_target_"] == DELTA,
        "sliding": layer.get("window"),
        "chunked": layer.get("chunk"),
    }
    return next((kind for kind, is_one in kinds.items() if is_one), "full") + "_attention"


def from_hf_config(config: dict) -> dict:
    """The model that a config.json of `transformers` describes. Raises ValueError for one that is not ours."""
    known = {(f"{name}ForCausalLM",): name for name in CLASSES}
    given = config.get("architectures")
    name = known.get(tuple(map(str, given))) if isinstance(given, list) else None
    if name is None:
        fix = ", ".join(architecture for (architecture,) in known)
        raise ValueError(f"unknown architecture (config.json has {given}). fix: one of {fix}")
    try:
        shape = {ours: config[theirs] for ours, theirs in SHAPE.items()}
        usual = USUAL | (
            {"num_key_value_heads": shape["heads"]} if name in ("Llama", "DiffLlama") else {}
        )
        if name not in ("Qwen3", "Qwen3_5", "Llama4"):
            usual["head_dim"] = config.get("qk_rope_head_dim") or shape["dim"] // shape["heads"]
        config = usual | {
            key: value for key, value in config.items() if value is not None or key not in usual
        }
        sizes = [size for key, size in shape.items() if key not in ("norm_eps", "tied")]
        if not all(0 < size <= LARGEST for size in sizes) or shape["depth"] > 2**12:
            raise ValueError(
                f"not the sizes of a model (config.json: {shape}). fix: as transformers saves it"
            )
        kinds, pattern, allowed = {}, [], CLASSES[name][1]
        said = config["layer_types"] if name in TYPED else config.get("layer_types")
        if name == "Mistral" and config["sliding_window"] is not None:
            said = said or ["sliding_attention"] * shape["depth"]
        types = said or ["full_attention"] * shape["depth"]
        if other := {
            kind for kind in types if kind != "full_attention" and TYPES.get(kind) not in allowed
        }:
            raise ValueError(
                f"{name} has no such layers (config.json: {', '.join(map(str, other))}). fix: full ones"
            )
        ropes = config["no_rope_layers"] if name in ("SmolLM3", "Llama4") else [1] * shape["depth"]
        for kind, turns in zip(types, ropes, strict=True):
            pattern.append(kind.removesuffix("_attention") + ("" if turns else "_nope"))
            kinds[pattern[-1]] = layer_from_hf(name, config, kind, bool(turns))
        mixed = {"_target_": INTERLEAVE, "_partial_": True}
        attention = (
            kinds[pattern[0]] if len(kinds) == 1 else mixed | {"kinds": kinds, "pattern": pattern}
        )
        tree = {"_target_": DECODER, **shape, "softcap": None, "attention": attention}
        ours = to_hf_config(tree)
        other = [
            f"{key}={config.get(key)}" for key in ours.keys() - READ if config.get(key) != ours[key]
        ]
    except (LookupError, TypeError, AttributeError, ZeroDivisionError, RuntimeError) as error:
        raise ValueError(
            f"not a config of {name} (config.json: {error!r}). fix: as transformers saves it"
        ) from None
    if other:
        raise ValueError(
            f"this {name} has what our layers lack (config.json: {', '.join(other)}). fix: another model"
        )
    return tree


def layer_from_hf(name: str, config: dict, kind: str, turns: bool) -> dict:
    """The knobs of a layer's attention."""
    if kind == "linear_attention":
        sizes = {
            "head_dim": config["linear_key_head_dim"],
            "kernel": config["linear_conv_kernel_dim"],
            "chunk": 64,
        }
        return {"_target_": DELTA, "_partial_": True, **sizes}
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = {key: value for key, value in rope.items() if value is not None}
    base = rope.get("rope_theta") or (
        config.get("rope_theta", 10000.0) if name == "Llama" else config["rope_theta"]
    )
    common = {
        "rope_base": float(base),
        "rope_scaling": scaling_from_hf(rope, config),
        "bias": config["attention_bias"],
    }
    if name == "DeepseekV3":
        sizes = {"rank": config["kv_lora_rank"], "query_rank": config["q_lora_rank"]}
        widths = {"head_dim": config["qk_nope_head_dim"], "rope_dim": config["qk_rope_head_dim"]}
        return {"_target_": LATENT, "_partial_": True, **sizes, **widths, **common, "dropout": 0.0}
    own = {knob: may[0] for knob, may in CLASSES[name][1].items() if isinstance(may, list)}
    own |= (
        {"qk_norm": None, **common, "rope_base": None, "rope_scaling": None}
        if not turns
        else common
    )
    return (
        PLAIN
        | own
        | {
            "kv_heads": config["num_key_value_heads"],
            "rope_fraction": rope["partial_rotary_factor"] if name == "Qwen3_5" else 1.0,
            "window": config["sliding_window"] if kind == "sliding_attention" else None,
            "chunk": config["attention_chunk_size"] if kind == "chunked_attention" else None,
        }
    )


def scaling_from_hf(rope: dict, config: dict) -> dict | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    target, knobs = SCALINGS.get(kind, (None, {}))
    unknown = (
        rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"} - knobs.keys()
    )
    if unknown or (kind != "default" and target is None):
        raise ValueError(
            f"positions of another kind (config.json: {rope}). fix: one of {', '.join(SCALINGS)}"
        )
    usual = {
        "original_max_position_embeddings": config["max_position_embeddings"],
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    return target and {"_target_": target} | {
        ours: (usual | rope)[theirs] for theirs, ours in knobs.items()
    }
