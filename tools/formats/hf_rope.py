"""Convert RoPE's base and scaling to and from a config.json of `transformers`."""

from typing import NamedTuple


class Scaling(NamedTuple):
    """Our class for a scaling, and its options by their keys in `transformers`."""

    target: str
    options: dict[str, str]


SCALINGS = {  # by rope_type
    "linear": Scaling("model.rope.LinearScaling", {"factor": "factor"}),
    "llama3": Scaling(
        "model.rope.Llama3",
        {
            "factor": "factor",
            "original_max_position_embeddings": "context",
            "low_freq_factor": "low",
            "high_freq_factor": "high",
        },
    ),
    "yarn": Scaling(
        "model.rope.YaRN",
        {
            "factor": "factor",
            "original_max_position_embeddings": "context",
            "beta_fast": "fast",
            "beta_slow": "slow",
        },
    ),
}
OTHER_KEYS = {"rope_type", "type", "rope_theta"}


def rope_to_hf(base: float, scaling: dict | None) -> dict:
    """Return `rope_parameters` for a base and scaling. Raises ValueError for an unknown scaling."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": base}
    for rope_type, known in SCALINGS.items():
        if known.target == scaling["_target_"]:
            parameters = {key: scaling[option] for key, option in known.options.items()}
            return {"rope_type": rope_type, "rope_theta": base, **parameters}
    raise ValueError(
        f"no known transformers class supports this RoPE scaling ({scaling}). fix: train again "
        "without rope_scaling"
    )


def rope_from_hf(config: dict) -> dict:
    """Return our options `rope_base` and `rope_scaling` for a config of transformers 5.

    Raises ValueError for parameters of RoPE that we do not support.
    """
    parameters = {
        key: value for key, value in config["rope_parameters"].items() if value is not None
    }
    rope_type = parameters["rope_type"]
    base = parameters["rope_theta"]
    known = SCALINGS.get(rope_type)
    unknown_keys = parameters.keys() - OTHER_KEYS
    if known is not None:
        unknown_keys -= known.options.keys()
    is_default = rope_type == "default"
    if unknown_keys or (known is None and not is_default):
        raise ValueError(
            f"unsupported RoPE parameters (config.json: {parameters}). fix: use only the standard "
            f"parameters of rope_type default or one of {', '.join(SCALINGS)}"
        )
    if known is None:
        return {"rope_base": base, "rope_scaling": None}
    parameters = {"beta_fast": 32.0, "beta_slow": 1.0, **parameters}
    # transformers prefers a value outside `rope_parameters`.
    if "original_max_position_embeddings" in config:
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    scaling = {option: parameters[key] for key, option in known.options.items()}
    return {"rope_base": base, "rope_scaling": {"_target_": known.target, **scaling}}
