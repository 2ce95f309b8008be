"""The base class of our descriptions of decoder classes in `transformers`.

A layer is described by a dict of its attention's options.
"""

import torch
from torch import Tensor, nn

from model.transformer import Transformer

LayerConfigs = list[dict]
TRANSFORMER = "model.transformer.Transformer"
RECURRENT = "model.attention.recurrent.GatedRecurrence"
LATENT = "model.attention.mla.LatentAttention"
# SoftmaxAttention with its optional mechanisms off, except RoPE.
PLAIN_SOFTMAX = {
    "_target_": "model.attention.softmax.SoftmaxAttention",
    "_partial_": True,
    "rope_fraction": 1.0,
    "qk_norm": None,
    "window": None,
    "chunk": None,
    "softcap": None,
    "sink": False,
    "gated": False,
    "bias": False,
}
# Options that do not prevent an export, unless a class requires a value: they do not change logits,
# or every class that has their mechanism has an entry for them.
EXPRESSED = {
    "_target_",
    "_partial_",
    "kv_heads",
    "head_dim",
    "rope_base",
    "rope_scaling",
    "dropout",
    "rank",
    "rope_dim",
    "query_rank",
    "kernel",
    "chunk",
}
GATED_FFN = "model.layers.GatedFeedForward"
RMS_NORM = "model.layers.RMSNorm"
# Parts of our parameter names -> parts of Llama's names.
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


HYBRID = "model.attention.hybrid.hybrid"


def attention_options(tree: dict) -> LayerConfigs:
    """Return the attention options of each layer of a model."""
    attention = tree["attention"]
    depth = tree["depth"]
    if attention["_target_"] != HYBRID:
        return [dict(attention) for _ in range(depth)]
    # The pattern is repeated so that it ends with the last layer.
    pattern = attention["pattern"]
    kinds = [pattern[(layer - depth) % len(pattern)] for layer in range(depth)]
    return [dict(attention["kinds"][kind]) for kind in kinds]


class Architecture:
    """The options and names shared by most classes; a subclass overrides those that differ."""

    model_type: str
    # Options of the model that must have these values.
    fixed_model_options = {}
    # Options of the attention that must have these values, and those that may have any value. All
    # others in PLAIN_SOFTMAX must have its values.
    fixed_options = {}
    free_options = ("bias",)
    # Required options of gated recurrences. A class without recurrences requires the `_target_` of
    # softmax attention instead, which no recurrence has.
    recurrent_options = {"_target_": PLAIN_SOFTMAX["_target_"]}
    # Constant entries of this class in config.json, and entries that correspond to our options.
    constants = {}
    option_entries = {}
    names = LLAMA_NAMES
    # Suffixes of the names of our parameters that the class lacks and that must be zero.
    zeros = ()

    def misfits(self, tree: dict, layers: LayerConfigs) -> set[str]:
        """Return what this class cannot express of a model, mostly options as KEY=VALUE."""
        needed = {"_target_": TRANSFORMER, "softcap": None, "ffn": GATED_FFN, "norm": RMS_NORM}
        needed |= self.fixed_model_options
        actual = tree | {"ffn": tree["ffn"]["_target_"], "norm": tree["norm"]["_target_"]}
        found = {f"{key}={actual[key]}" for key in needed if actual[key] != needed[key]}
        for layer in layers:
            for option in self.unfit_options(layer):
                found.add(f"attention.{option}={layer[option]}")
        if all(layer["_target_"] == RECURRENT for layer in layers):
            found.add("models without softmax attention")
        return found

    def unfit_options(self, layer: dict) -> list[str]:
        """Return the options of a layer whose values this class cannot express."""
        needed = dict(self.required_options(layer))
        # Unless the class has layers without positions, the base of RoPE must be a number.
        may_lack_rope = "rope_base" in self.free_options or "rope_base" in needed
        if not may_lack_rope and "rope_base" in layer and layer["rope_base"] is None:
            needed["rope_base"] = 10000.0

        unfit = []
        for option, value in layer.items():
            is_expressed = option in EXPRESSED and option not in needed
            if option in self.free_options or is_expressed:
                continue
            # An option in no list, such as a new one, must be off: null, false or 0.
            wanted = needed.get(option)
            is_off = not value and not wanted
            if value != wanted and not is_off:
                unfit.append(option)
        return unfit

    def required_options(self, layer: dict) -> dict:
        """Return the required values of a layer's options; values of free options do not matter."""
        if layer["_target_"] == RECURRENT:
            return self.recurrent_options
        return PLAIN_SOFTMAX | self.fixed_options

    def own_config(self, tree: dict, layers: LayerConfigs) -> dict:
        """Return this class's own entries of config.json.

        For an option that is null in `tree`, `layers` has the value that the attention derived.
        Raises ValueError for options that the class cannot express.
        """
        entries = dict(self.constants)
        for entry, option in self.option_entries.items():
            entries[entry] = common_value(layers, option)
        return entries

    def attention_names(self, attention: nn.Module) -> dict:
        """Return the entries that this attention adds to `names`, or replaces in it."""
        return {}

    def pack(self, name: str, parts: list[Tensor], model: Transformer) -> Tensor:
        """Assemble the class's tensor `name` from `parts`, which are parameters of our model."""
        if len(parts) > 1:
            return torch.cat(parts)
        return parts[0]


def common_value(layers: LayerConfigs, option: str, default: object = None) -> object:
    """Return the value of an option in all layers that have it; `default` if no layer has it.

    Raises ValueError if the values differ.
    """
    values = [layer[option] for layer in layers if option in layer]
    # Layers without a window, chunk or RoPE may be mixed with layers that have one.
    if option in ("window", "chunk", "rope_base"):
        values = [value for value in values if value is not None]
    if not values:
        return default
    common = values[0]
    if any(value != common for value in values):
        raise ValueError(
            f"no known transformers class supports layers with different {option} ({values}). fix: "
            f"train again with the same {option} in all kinds of layers"
        )
    return common


def layer_types(layers: LayerConfigs) -> list[str]:
    """Return the entry `layer_types` for a config.json."""
    types = []
    for layer in layers:
        if layer["_target_"] == RECURRENT:
            types.append("linear_attention")
        elif layer.get("window") is not None:
            types.append("sliding_attention")
        elif layer.get("chunk") is not None:
            types.append("chunked_attention")
        else:
            types.append("full_attention")
    return types
