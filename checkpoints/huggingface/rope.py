"""Rotary positions (RoPE) in a config.json of `transformers`: their base and their scaling."""

# rope_type: our class, and our knobs by the key that `transformers` has for them
SCALINGS = {
    "linear": ("model.rope.Linear", {"factor": "factor"}),
    "llama3": (
        "model.rope.Llama3",
        {
            "factor": "factor",
            "original_max_position_embeddings": "context",
            "low_freq_factor": "low",
            "high_freq_factor": "high",
        },
    ),
    "yarn": (
        "model.rope.YaRN",
        {
            "factor": "factor",
            "original_max_position_embeddings": "context",
            "beta_fast": "fast",
            "beta_slow": "slow",
        },
    ),
}
OTHER_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def rope_to_hf(base: float, scaling: dict | None) -> dict:
    """Our base and scaling -> `rope_parameters`."""
    parameters = {"rope_type": "default", "rope_theta": base}
    for rope_type, (target, knobs) in SCALINGS.items():
        if scaling is not None and scaling["_target_"] == target:
            parameters["rope_type"] = rope_type
            parameters |= {theirs: scaling[ours] for theirs, ours in knobs.items()}
    return parameters


def rope_parameters(config: dict) -> dict:
    """`rope_parameters` of a config.json, without nulls; in transformers 4, `rope_scaling`."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return {key: value for key, value in parameters.items() if value is not None}


def rope_from_hf(config: dict) -> dict:
    """config.json -> our knobs `rope_base` and `rope_scaling`.

    Raises ValueError for a scaling that we lack.
    """
    parameters = rope_parameters(config)
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    target, knobs = SCALINGS.get(rope_type, (None, {}))
    unknown = parameters.keys() - OTHER_KEYS - knobs.keys()
    if unknown or (target is None and rope_type != "default"):
        raise ValueError(
            f"positions of another kind (config.json: {parameters}). "
            f"fix: one of {', '.join(SCALINGS)}"
        )
    base = parameters.get("rope_theta") or config["rope_theta"]
    scaling = None
    if target is not None:
        parameters = {
            "original_max_position_embeddings": config["max_position_embeddings"],
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            **parameters,
        }
        scaling = {"_target_": target}
        scaling |= {ours: parameters[theirs] for theirs, ours in knobs.items()}
    return {"rope_base": float(base), "rope_scaling": scaling}
