"""Models from mutated config.json files match the logits of transformers, or are refused."""

import json
import random

import pytest
import torch

from model.build import build_model
from run.errors import IntegrityError
from tests.conftest import close
from tests.tools.families import CONFIGS, SHARED
from tools.formats.hf_config import read_config
from tools.import_hf import import_weights

NUM_CONFIGS = 300  # of each family
TYPES = ["full_attention", "sliding_attention", "full_attention"]
# Entries that few published models have.
MORE = {
    "SmolLM2-135M": {"attention_bias": True},
    "Qwen2.5-0.5B": {"use_sliding_window": True, "sliding_window": 5, "layer_types": TYPES},
    "Mistral-7B-v0.3": {"sliding_window": 5},
    "SmolLM3-3B": {"layer_types": ["full_attention"] * 3, "no_rope_layers": [1, 0, 1]},
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
ROPES = [
    {"type": "linear", "factor": 3.0},
    LLAMA3 | {"original_max_position_embeddings": 16},
    YARN | {"beta_slow": 2, "rope_theta": 50.0},
    YARN | {"truncate": False},
    {"rope_type": "dynamic", "factor": 2.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 300.0}},
]
# Replacement values, in addition to null, booleans and nearby numbers.
VALUES = {
    "model_type": ["llama", "qwen2", "qwen3", "mistral", "smollm3", "arcee"],
    "hidden_act": ["gelu", "gelu_pytorch_tanh"],
    "layer_types": [TYPES, ["full_attention"] * 3, ["sliding_attention"] * 3, TYPES + TYPES],
    "no_rope_layers": [[1, 1, 1], [0, 1, 0], [1, 0], [1, 1, 1, 0]],
    "rope_scaling": ROPES,
    "rope_parameters": ROPES,
    "original_max_position_embeddings": [8, 1024],
    "sliding_window": [0, 3, 9],
    "partial_rotary_factor": [0.5],
    "quantization_config": [{"quant_method": "fp8"}],
    "per_layer_config": [{"1": {"rms_norm_eps": 0.5}}],
    "max_window_layers": [0, 1],
}
VALUES |= dict.fromkeys(("is_causal", "attention_bias", "mlp_bias", "use_cache"), ())


def mutate(config: dict, draw: random.Random) -> dict:
    """Remove or change one or two entries."""
    config = dict(config)
    for _ in range(draw.randint(1, 2)):
        entry = draw.choice([*VALUES, *config])
        value = config.pop(entry, None)
        values = [None, True, False, *3 * VALUES.get(entry, [])]
        if isinstance(value, int | float):
            values += [2 * value, value / 2, value + 1, -value]
        if draw.random() < 0.9:
            config[entry] = draw.choice(values)
    return config


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_mutated_configs_match_transformers_or_are_refused(family, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    draw = random.Random(family)
    sizes = {"vocab_size": 128, "initializer_range": 0.2, "torch_dtype": "float32"}
    whole = SHARED | CONFIGS[family] | sizes | {"num_hidden_layers": 3} | MORE.get(family, {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**whole))
    whole["architectures"] = [type(model).__name__]
    model.save_pretrained(tmp_path)
    tokens = torch.randint(128, (2, 33))
    num_accepted = 0
    for number in range(NUM_CONFIGS):
        config = mutate(whole, draw) if number else whole
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            architecture, tree = read_config(tmp_path)
            weights = import_weights(tmp_path, architecture, tree)
        except (ValueError, IntegrityError):
            assert number > 0
            continue
        ours = build_model(tree, seed=None).eval()
        ours.load_state_dict(weights)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0, msg=str(config))
        num_accepted += 1
    assert num_accepted > NUM_CONFIGS / 10
