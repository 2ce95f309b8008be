"""A model starts from the weights of a model with a different attention."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from model.build import build_model
from run import checkpoint
from tests.conftest import SHORT, TINY, close, drawn, saved, tree_of
from tests.training.test_train_command import TEXT, metrics
from training.adoption import adopt_weights


@pytest.fixture
def adopt(tmp_path, tokenizer):
    """A function that returns a model in float64, and one that starts from its weights."""

    def start(source: str, target: str):
        trees = []
        for words in (source, target):
            trees.append(tree_of(*words.split()) | {"vocab_size": tokenizer.vocab_size})
        old = drawn(trees[0], torch.float64)
        checkpoint.save(tmp_path, 1, old.state_dict(), {"model": trees[0]}, tokenizer.files, {})
        new = build_model(trees[1], dtype=torch.float64).eval()
        adopt_weights(new, checkpoint.find_model(tmp_path))
        return old, new

    return start


SOFTMAX = "q_proj.weight k_proj.weight v_proj.weight o_proj.weight q_norm.weight k_norm.weight"
LATENT = "q_proj.weight latent_proj.weight latent_norm.weight rope_proj.weight kv_proj.weight"
LATENT += " o_proj.weight"
# The new weights in each layer of a model that starts from gqa.
NEW = {"mha": "", "gated": "gate_proj.weight", "gqa attention.head_dim=8": SOFTMAX, "mla": LATENT}


@pytest.mark.parametrize("variant", NEW)
def test_weights_that_fit_are_copied_and_the_others_are_new(variant, adopt):
    old, new = adopt("gqa", variant)
    stored = old.state_dict()
    initial = build_model(tree_of(*variant.split()), seed=0).state_dict()
    for name, weight in new.state_dict().items():
        _, _, name_in_layer = name.partition(".attention.")
        if name_in_layer in NEW[variant].split():
            close(weight, initial[name].double())
        elif weight.shape == stored[name].shape:
            close(weight, stored[name])
        else:  # another number of heads
            assert name.endswith(("k_proj.weight", "v_proj.weight"))
            assert not torch.allclose(weight, initial[name].double())


MORE = "attention.head_dim=24 attention.bias=true"


def test_repeating_key_heads_preserves_the_logits(adopt):
    old, new = adopt(f"gqa attention.kv_heads=2 {MORE}", f"mha {MORE}")
    tokens = torch.randint(128, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = old(tokens)
        close(new(tokens), expected, atol=1e-10, rtol=0)
    assert expected.std() > 0.1


def test_groups_of_key_heads_are_averaged(adopt):
    old, new = adopt(f"mha {MORE}", f"gqa attention.kv_heads=2 {MORE}")
    names = [name for name in new.state_dict() if re.search(r"[kv]_proj", name)]
    assert len(names) == 2 * 4  # weights and biases of two layers
    for name in names:
        before = old.state_dict()[name].numpy()
        mean = np.zeros((2 * 24, *before.shape[1:]))
        for head in range(4):
            for feature in range(24):
                mean[head // 2 * 24 + feature] += before[head * 24 + feature] / 2
        close(new.state_dict()[name], torch.from_numpy(mean))


def test_key_heads_that_do_not_divide_are_new(adopt):
    size = "model.heads=6 model.dim=96 attention.kv_heads="
    _, new = adopt(f"gqa {size}3", f"gqa {size}2")
    name = "blocks.0.attention.k_proj.weight"
    initial = build_model(tree_of(*f"gqa {size}2".split()), seed=0).state_dict()
    close(new.state_dict()[name], initial[name].double())


def test_a_run_starts_with_a_different_attention_and_resumes(command, story, tokenizer):
    # mha refers to the number of heads, which is not the default.
    saved(Path("old"), tree_of("gqa", "model.heads=2", "attention.kv_heads=1"), tokenizer)
    words = [*TINY[1:], *SHORT, *TEXT[:2], "init_from=old", "optimizer.lr=0.001"]
    words += ["attention=mha", "attention.gated=true", "run_dir=run"]
    command("train.py", *words).succeeded()
    attention = checkpoint.load_config(checkpoint.find_model("run"))["model"]["attention"]
    assert (attention["kv_heads"], attention["gated"]) == (2, True)
    command("train.py", *words, "resume=true", "steps=6").succeeded()
    assert metrics("run")[-1]["step"] == 6


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("model.dim=32", "model.dim"),
        ("attention.kv_heads=1", "attention=NAME"),
        ("attention=mqa ffn=gelu", "ffn._target_"),
        ("data.tokenizer=absent", "data.tokenizer"),
    ],
)
def test_only_the_attention_of_a_pretrained_model_can_change(command, trained, words, named):
    refused = command("train.py", *TINY[1:], *TEXT[:2], f"init_from={trained}", *words.split())
    assert refused.code == 2 and named in refused.err
