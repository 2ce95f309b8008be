"""The options by which variants differ from the baseline, in the words of the field."""

from collections import Counter

from common import config
from tools.compare.runs import Groups

# What readers call options and mechanisms; others keep the names that they have in configs/.
NAMES = {
    "kv_heads": "KV heads",
    "rope_base": "RoPE base",
    "rope_fraction": "rotated fraction",
    "rope_scaling": "RoPE scaling",
    "qk_norm": "QK-norm",
    "softcap": "cap on scores",
    "sink": "attention sink",
    "gated": "output gate",
    "SoftmaxAttention": "softmax",
    "ALiBi": "softmax with linear biases (ALiBi)",
    "DifferentialAttention": "difference of two softmaxes",
    "LatentAttention": "softmax over a latent (MLA)",
    "SharedAttention": "softmax, KV shared by layers",
    "ValueResidualAttention": "softmax, values mixed with layer 1's",
    "GatedDelta": "gated delta rule",
    "Retention": "retention",
}
# Values of an option that is off, and options that do not change what is computed.
OFF = (None, False, 0)
WITHOUT_EFFECT = (
    "_target_",
    "_partial_",
    "rope_fraction=1.0",
    "GatedDelta.chunk",
    "Retention.chunk",
)


def option_rows(groups: Groups) -> list[list[str]]:
    """Lists the baseline's options, and for each other variant those with another value."""
    baseline = {}
    rows = []
    for name, runs in groups.items():
        options = describe_attention(runs[0].settings["model"]["attention"])
        texts = []
        for key in options | baseline:
            value = options.get(key, "none")
            if value != baseline.get(key, "none"):
                texts.append(f"{NAMES.get(key, key)}: {value}")
        baseline = baseline or options
        rows.append([name, "; ".join(texts) or "the same"])
    return rows


def describe_attention(attention: dict) -> dict[str, str]:
    """Maps each option that is on to its value, and to how many layers have it if not all do."""
    # Kinds of attention may take turns in a pattern of layers.
    pattern = attention.get("pattern", [None])
    kinds = attention.get("kinds", {None: attention})
    counts = Counter()
    for kind in pattern:
        mechanism = kinds[kind]["_target_"].rpartition(".")[2]
        counts["mechanism", NAMES.get(mechanism, mechanism)] += 1
        for key, value in config.flatten(kinds[kind]):
            names = {key, f"{key}={value}", f"{mechanism}.{key}"}
            if value not in OFF and names.isdisjoint(WITHOUT_EFFECT):
                counts[key, str(value).replace("_rope", " RoPE")] += 1

    options = {}
    for (key, text), count in counts.items():
        if count < len(pattern):
            text += f" ({count}/{len(pattern)} layers)"
        options[key] = f"{options[key]}, {text}" if key in options else text
    return options
