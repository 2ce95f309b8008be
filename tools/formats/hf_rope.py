"""Rotary positions (RoPE) in a config.json of `transformers`: their base and their scaling."""

# rope_type: our class, and our knobs by the key that `transformers` has for them
SCALINGS = {
    "linear": ("model.rope.LinearScaling", {"factor": "factor"}),
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
OTHER_KEYS = {"rope_type", "type", "rope_theta"}


def rope_to_hf(base: float, scaling: dict | None) -> dict:
    """Our base and scaling -> `rope_parameters`. Raises ValueError for an unknown scaling."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": base}
    for rope_type, (target, knobs) in SCALINGS.items():
        if target == scaling["_target_"]:
            parameters = {key: scaling[knob] for key, knob in knobs.items()}
            return {"rope_type": rope_type, "rope_theta": base, **parameters}
    raise ValueError(
        f"no class of transformers has this scaling ({scaling}). fix: attention.rope_scaling=null"
    )


def rope_from_hf(config: dict) -> dict:
    """config.json -> our knobs `rope_base` and `rope_scaling`.

    Raises ValueError for a scaling that we lack.
    """
    # transformers 4 has `rope_scaling`, and the base beside it.
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    parameters = {key: value for key, value in parameters.items() if value is not None}
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    base = parameters.get("rope_theta") or config["rope_theta"]
    target, knobs = SCALINGS.get(rope_type, (None, {}))
    is_known = target is not None or rope_type == "default"
    if not is_known or parameters.keys() - OTHER_KEYS - knobs.keys():
        raise ValueError(
            f"positions of another kind (config.json: {parameters}). "
            f"fix: default or one of {', '.join(SCALINGS)}"
        )
    if target is None:
        return {"rope_base": base, "rope_scaling": None}
    parameters = {
        "original_max_position_embeddings": config["max_position_embeddings"],
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        **parameters,
    }
    # Where it stands outside of `rope_parameters`, transformers prefers it.
    if "original_max_position_embeddings" in config:
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    scaling = {knob: parameters[key] for key, knob in knobs.items()}
    return {"rope_base": base, "rope_scaling": {"_target_": target, **scaling}}
