"""The decoder classes of `transformers` that we export to and import from, an adapter each.

An adapter says what its class can express, which entries only its config.json has, how it describes
a layer there, and how its weights are named and laid out. A layer is the dict of the knobs of its
attention.
"""

from torch import nn

from model.attention.gated_delta import GatedDelta
from tools.formats.hf_rope import rope_from_hf, rope_parameters

Layers = list[dict]
SOFTMAX = "model.attention.softmax.SoftmaxAttention"
DIFFERENTIAL = "model.attention.differential.DifferentialAttention"
LATENT = "model.attention.mla.LatentAttention"
DELTA = "model.attention.gated_delta.GatedDelta"
# The optional knobs of SoftmaxAttention, all off.
PLAIN_SOFTMAX = {
    "_target_": SOFTMAX,
    "_partial_": True,
    "head_dim": None,
    "rope_fraction": 1.0,
    "rope_scaling": None,
    "qk_norm": None,
    "window": None,
    "chunk": None,
    "softcap": None,
    "sink": False,
    "gated": False,
    "dropout": 0.0,
    "bias": False,
}
# Presets of feed-forwards and norms -> their classes. An activation may be any that we have.
PARTS = {
    "swiglu": "model.layers.GatedFeedForward",
    "relu2": "model.layers.FeedForward",
    "rmsnorm": "model.layers.RMSNorm",
    "layernorm": "model.layers.LayerNorm",
}
MOST_LAYERS = 2**12  # accepted from a config.json, which is not trusted
# Entries that `transformers` requires even if no layer has experts.
EXPERT_SIZES = {
    "n_routed_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 1,
}
# Parts of our parameter names -> those of Llama.
LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "blocks": "model.layers",
    "norm": "model.norm",
    "head": "lm_head",
    "ffn": "mlp",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "ffn_norm": "post_attention_layernorm",
}


class Architecture:
    """What most classes have in common; a subclass says where its class differs."""

    model_type: str
    layer_types = ("full_attention",)
    # Knobs that must have these values, and knobs that may have any value. All others must have
    # the values of PLAIN_SOFTMAX.
    fixed_knobs = {}
    free_knobs = ("bias",)
    # Its feed-forward and norm, as keys of PARTS.
    ffn = "swiglu"
    norm = "rmsnorm"
    norm_eps_entry = "rms_norm_eps"
    # Entries that config.json must have: without them, `transformers` assumes other values than
    # our `defaults`.
    needed_entries = ("num_key_value_heads", "rope_theta")
    # How its weights are stored.
    names = LLAMA_NAMES
    has_interleaved_rope = False

    def required_knobs(self, has_rope: bool) -> dict:
        """What the knobs of a layer must be, free ones aside."""
        return PLAIN_SOFTMAX | self.fixed_knobs

    def part_misfits(self, tree: dict) -> dict:
        """The ffn or norm of a model that this class lacks -> its class, and the preset needed."""
        needed = {}
        for part, preset in (("ffn", self.ffn), ("norm", self.norm)):
            target = tree[part]["_target_"]
            if target != PARTS[preset]:
                needed[part] = target, preset
        return needed

    def misfits(self, layers: Layers) -> dict:
        """The knobs that this class cannot express -> a value in `layers`, and the one needed."""
        free = {"head_dim", "rope_scaling", "dropout", *self.free_knobs}
        needed = {}
        for layer in layers:
            required = self.required_knobs(layer.get("rope_base") is not None)
            for knob, value in required.items():
                if knob not in free and layer.get(knob, value) != value:
                    needed[knob] = layer[knob], value
            if "rope_base" not in free and layer.get("rope_base", 10000.0) is None:
                needed["rope_base"] = None, 10000.0
        return needed

    def own_config(self, tree: dict, layers: Layers) -> dict:
        """The entries of config.json that only this class has.

        Where a knob is null, `layers` has the value that its attention derived.
        Raises ValueError for what the class cannot express.
        """
        return {}

    def defaults(self, config: dict) -> dict:
        """The values of entries that are missing or null in config.json."""
        heads = config["num_attention_heads"]
        return {
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
            "rope_theta": 10000.0,
            "num_key_value_heads": heads,
            "head_dim": config["hidden_size"] // heads,
            "layer_types": ["full_attention"] * config["num_hidden_layers"],
        }

    def layer_from_config(self, config: dict, layer_type: str, has_rope: bool) -> dict:
        """The knobs of a layer's attention."""
        # What all layers of a model share.
        knobs = self.required_knobs(has_rope)
        knobs["kv_heads"] = config["num_key_value_heads"]
        if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
            knobs["head_dim"] = config["head_dim"]
        knobs["bias"] = config["attention_bias"]
        knobs |= rope_from_hf(config)
        if "rope_fraction" in self.free_knobs:
            knobs["rope_fraction"] = rope_parameters(config)["partial_rotary_factor"]
        # What makes this layer differ from others.
        if not has_rope:
            knobs |= {"rope_base": None, "rope_scaling": None}
        if layer_type == "sliding_attention":
            knobs["window"] = config["sliding_window"]
        if layer_type == "chunked_attention":
            knobs["chunk"] = config["attention_chunk_size"]
        return knobs

    def attention_names(self, attention: nn.Module) -> dict:
        """Parts of parameter names inside of this attention, where they are not as in `names`."""
        return {}

    def layout(self, name: str, attention: nn.Module) -> dict:
        """The fields of StoredTensor for a tensor in a file, where it is not stored as ours."""
        if self.has_interleaved_rope and ("q_proj" in name or "k_proj" in name):
            return {"interleaved_head_dim": attention.head_dim}
        return {}


class Llama(Architecture):
    """Llama 2 and 3, 2307.09288 and 2407.21783."""

    model_type = "llama"
    needed_entries = ()


class Arcee(Llama):
    """Llama with a feed-forward without a gate."""

    model_type = "arcee"
    ffn = "relu2"
    needed_entries = ("hidden_act",)


class StableLm(Architecture):
    """Llama with LayerNorm."""

    model_type = "stablelm"
    free_knobs = ("rope_fraction",)
    norm = "layernorm"
    norm_eps_entry = "layer_norm_eps"

    def own_config(self, tree: dict, layers: Layers) -> dict:
        head_dim = common_value(layers, "head_dim")
        if head_dim * tree["heads"] != tree["dim"]:
            raise ValueError(
                f"StableLm needs a head_dim of dim / heads ({head_dim=}). "
                "fix: train again with attention.head_dim=null"
            )
        return {"use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False}


class Qwen3(Architecture):
    """Qwen3, 2505.09388: QK-norm, and windows in some layers."""

    model_type = "qwen3"
    layer_types = ("full_attention", "sliding_attention")
    fixed_knobs = {"qk_norm": "before_rope"}
    free_knobs = ("bias", "window")
    needed_entries = ("num_key_value_heads", "rope_theta", "head_dim")

    def own_config(self, tree: dict, layers: Layers) -> dict:
        window = common_value(layers, "window")
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": layer_types(layers),
        }


class Mistral(Architecture):
    """Mistral 7B, 2310.06825: one window for all layers, or none."""

    model_type = "mistral"
    layer_types = ("full_attention", "sliding_attention")
    free_knobs = ("window",)

    def misfits(self, layers: Layers) -> dict:
        needed = super().misfits(layers)
        windows = {layer.get("window") for layer in layers}
        if len(windows) > 1:
            needed["window"] = windows, None
        return needed

    def own_config(self, tree: dict, layers: Layers) -> dict:
        return {"sliding_window": common_value(layers, "window")}

    def defaults(self, config: dict) -> dict:
        defaults = super().defaults(config)
        # The window is in all layers, unless `layer_types` says otherwise.
        if config["sliding_window"] is not None:
            defaults["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
        return defaults


class Starcoder2(Mistral):
    """LayerNorm and a feed-forward without a gate, 2402.19173."""

    model_type = "starcoder2"
    ffn = "relu2"
    norm = "layernorm"
    norm_eps_entry = "norm_epsilon"
    needed_entries = ("num_key_value_heads", "rope_theta", "hidden_act")
    names = LLAMA_NAMES | {"up_proj": "c_fc", "down_proj": "c_proj"}

    def own_config(self, tree: dict, layers: Layers) -> dict:
        return super().own_config(tree, layers) | {"use_bias": False}


class SmolLM3(Qwen3):
    """SmolLM3: as Qwen3 without QK-norm, and with some layers without positions."""

    model_type = "smollm3"
    fixed_knobs = {}
    free_knobs = ("bias", "window", "rope_base")
    needed_entries = ("num_key_value_heads", "rope_theta")


class Llama4(Architecture):
    """Llama 4 without experts.

    Layers have RoPE, QK-norm after it, and chunks; or none of these.
    """

    model_type = "llama4_text"
    layer_types = ("full_attention", "chunked_attention")
    free_knobs = ("bias", "chunk", "rope_base")
    needed_entries = ("num_key_value_heads", "rope_theta", "head_dim", "layer_types")
    names = LLAMA_NAMES | {"ffn": "feed_forward"}
    has_interleaved_rope = True

    def required_knobs(self, has_rope: bool) -> dict:
        return PLAIN_SOFTMAX | {"qk_norm": "after_rope" if has_rope else None}

    def own_config(self, tree: dict, layers: Layers) -> dict:
        return {
            "moe_layers": [],
            "intermediate_size_mlp": tree["hidden"],
            "use_qk_norm": True,
            "attn_temperature_tuning": False,
            # There must be a size, even where no layer has chunks.
            "attention_chunk_size": common_value(layers, "chunk", tree["context"]),
            "layer_types": layer_types(layers),
        }


class GraniteSWA(Architecture):
    """Granite with a sink in each head, and windows in some layers."""

    model_type = "granite_swa"
    layer_types = ("full_attention", "sliding_attention")
    fixed_knobs = {"sink": True}
    free_knobs = ("bias", "window")
    needed_entries = ("num_key_value_heads", "rope_theta", "layer_types")
    names = LLAMA_NAMES | {"sink": "sinks"}

    def own_config(self, tree: dict, layers: Layers) -> dict:
        return {
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": common_value(layers, "head_dim") ** -0.5,
            "layer_types": layer_types(layers),
            # There must be a size, even where no layer has a window.
            "sliding_window": common_value(layers, "window", tree["context"]),
        }


class DiffLlama(Architecture):
    """Differential attention, 2410.05258."""

    model_type = "diffllama"
    fixed_knobs = {"_target_": DIFFERENTIAL}
    needed_entries = ("rope_theta",)
    names = LLAMA_NAMES | {
        "q1": "lambda_q1",
        "k1": "lambda_k1",
        "q2": "lambda_q2",
        "k2": "lambda_k2",
    }


class DeepseekV3(Architecture):
    """Multi-head latent attention without experts, 2412.19437."""

    model_type = "deepseek_v3"
    fixed_knobs = {"_target_": LATENT}
    names = LLAMA_NAMES | {
        "q_down_proj": "q_a_proj",
        "q_down_norm": "q_a_layernorm",
        "latent_proj": "kv_a_proj_with_mqa",  # one tensor holds this and the next
        "rope_proj": "kv_a_proj_with_mqa",
        "latent_norm": "kv_a_layernorm",
        "kv_proj": "kv_b_proj",
    }

    def own_config(self, tree: dict, layers: Layers) -> dict:
        if tree["norm_eps"] != 1e-6:
            # `transformers` uses 1e-6 in the norms of the latents, whatever config.json says.
            raise ValueError(
                f"DeepseekV3 needs an epsilon of 1e-6 in its norms (got {tree['norm_eps']}). "
                "fix: train again with model.norm_eps=1e-6"
            )
        return {
            "kv_lora_rank": common_value(layers, "rank"),
            "q_lora_rank": common_value(layers, "query_rank"),
            "qk_nope_head_dim": common_value(layers, "head_dim"),
            "v_head_dim": common_value(layers, "value_dim"),
            "qk_rope_head_dim": common_value(layers, "rope_dim"),
            "head_dim": common_value(layers, "rope_dim"),
            "rope_interleave": False,
            **EXPERT_SIZES,
            "first_k_dense_replace": tree["depth"],
            "num_mtp_layers": 0,
        }

    def defaults(self, config: dict) -> dict:
        return super().defaults(config) | {"head_dim": config["qk_rope_head_dim"]}

    def layer_from_config(self, config: dict, layer_type: str, has_rope: bool) -> dict:
        return {
            "_target_": LATENT,
            "_partial_": True,
            "rank": config["kv_lora_rank"],
            "query_rank": config["q_lora_rank"],
            "head_dim": config["qk_nope_head_dim"],
            "rope_dim": config["qk_rope_head_dim"],
            "bias": config["attention_bias"],
            "dropout": 0.0,
            **rope_from_hf(config),
        }

    def attention_names(self, attention: nn.Module) -> dict:
        return {} if attention.q_down_proj is None else {"q_proj": "q_b_proj"}


class Qwen3_5(Architecture):
    """Qwen3.5 without experts: gated softmax attention, and the gated delta rule, 2412.06464."""

    model_type = "qwen3_5_text"
    layer_types = ("full_attention", "linear_attention")
    fixed_knobs = {"qk_norm": "before_rope", "gated": True}
    free_knobs = ("bias", "rope_fraction")
    needed_entries = ("num_key_value_heads", "rope_theta", "head_dim", "layer_types")

    def misfits(self, layers: Layers) -> dict:
        return super().misfits([layer for layer in layers if layer["_target_"] != DELTA])

    def own_config(self, tree: dict, layers: Layers) -> dict:
        types = layer_types(layers)
        if "full_attention" not in types:
            raise ValueError(
                "Qwen3_5ForCausalLM needs a layer of softmax attention (all are delta). "
                "fix: train again with one in attention.pattern"
            )
        # Queries and keys have as many heads as values.
        delta_layers = [layer for layer in layers if layer["_target_"] == DELTA]
        if not delta_layers:
            return {"layer_types": types}
        heads = common_value(delta_layers, "heads")
        head_dim = common_value(delta_layers, "head_dim")
        return {
            "linear_num_key_heads": heads,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": head_dim,
            "linear_value_head_dim": head_dim,
            "linear_conv_kernel_dim": common_value(delta_layers, "kernel"),
            "layer_types": types,
        }

    def layer_from_config(self, config: dict, layer_type: str, has_rope: bool) -> dict:
        if layer_type == "linear_attention":
            return {
                "_target_": DELTA,
                "_partial_": True,
                "head_dim": config["linear_key_head_dim"],
                "kernel": config["linear_conv_kernel_dim"],
                "chunk": 64,
            }
        return super().layer_from_config(config, layer_type, has_rope)

    def attention_names(self, attention: nn.Module) -> dict:
        if not isinstance(attention, GatedDelta):
            return {"gate_proj": "q_proj"}
        return {
            "attention": "linear_attn",
            "q_proj": "in_proj_qkv",  # one tensor holds these three
            "k_proj": "in_proj_qkv",
            "v_proj": "in_proj_qkv",
            "taps": "conv1d.weight",
            "decay_rate": "A_log",
            "decay_bias": "dt_bias",
            "decay_proj": "in_proj_a",
            "write_proj": "in_proj_b",
            "gate_proj": "in_proj_z",
            "out_norm": "norm",
            "o_proj": "out_proj",
        }

    def layout(self, name: str, attention: nn.Module) -> dict:
        # In each head, the query precedes the gate.
        if "self_attn.q_proj" in name:
            return {"groups": attention.heads}
        # Norms are stored less 1, but for those of the delta rule.
        if "norm" in name and "linear_attn" not in name:
            return {"offset": 1.0}
        return {}


# In the order of preference: a model becomes the first that can express it.
ARCHITECTURES = {
    f"{architecture.__name__}ForCausalLM": architecture()
    for architecture in (
        Llama,
        Arcee,
        StableLm,
        Qwen3,
        Mistral,
        Starcoder2,
        SmolLM3,
        Llama4,
        GraniteSWA,
        DiffLlama,
        DeepseekV3,
        Qwen3_5,
    )
}


def common_value(layers: Layers, knob: str, default: object = None) -> object:
    """The value that all layers with this knob have. Raises ValueError where they differ."""
    values = [layer[knob] for layer in layers if knob in layer]
    # A layer without a window, chunk or RoPE may stand beside those with one.
    if knob in ("window", "chunk", "rope_base"):
        values = [value for value in values if value is not None]
    if any(value != values[0] for value in values):
        raise ValueError(
            f"no class of transformers has layers of different {knob} ({values}). "
            f"fix: train again with one attention.{knob} for all layers"
        )
    return values[0] if values else default


def layer_types(layers: Layers) -> list[str]:
    """`layer_types` of a config.json."""
    types = []
    for layer in layers:
        if layer["_target_"] == DELTA:
            types.append("linear_attention")
        elif layer.get("window") is not None:
            types.append("sliding_attention")
        elif layer.get("chunk") is not None:
            types.append("chunked_attention")
        else:
            types.append("full_attention")
    return types
