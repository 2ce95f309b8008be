"""A run that was saved before modules moved is resumed, generates and is exported."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from data.tokenizer import Tokenizer
from run import checkpoint
from tests.conftest import TINY, drawn, tree_of

# Module paths of today, and what they were.
MOVED = {
    "model.attention.mla.": "model.attention.latent.",
    "model.attention.gated_delta.": "model.attention.delta.",
    "model.attention.cross_layer.": "model.attention.across.",
    "model.attention.hybrid.hybrid": "model.attention.interleave.interleave",
}


def as_it_was(config: dict) -> dict:
    text = json.dumps(config)
    for new, old in MOVED.items():
        text = text.replace(new, old)
    return json.loads(text)


@pytest.mark.parametrize("variant", ["mla", "delta", "shared_kv", "value_residual", "local_global"])
def test_targets_that_moved_are_found(variant, tokenizer, tmp_path):
    tree = tree_of(variant) | {"vocab_size": tokenizer.vocab_size}
    older = as_it_was({"model": tree, "note": "model.attention.latent."})
    assert older["model"] != tree
    weights = drawn(tree).state_dict()
    path = checkpoint.save(tmp_path / "run", 1, weights, older, tokenizer.files, {})
    assert checkpoint.load_config(path) == {"model": tree, "note": "model.attention.latent."}
    assert checkpoint.load_model(path, "cpu").state_dict().keys() == weights.keys()


def test_an_older_run_is_resumed_and_generates_and_is_exported(command, story):
    options = (*TINY, "attention=delta", "optimizer=adamw", "data=text", f"data.path={story}")
    result = command("train.py", *options, "data.vocab_size=400", "steps=2", "run_dir=today")
    assert result.code == 0, result.err

    # The same checkpoint, as it was saved then.
    path = checkpoint.newest_checkpoint(Path("today"))
    checkpoint.save(
        Path("older"),
        2,
        load_file(path / "model.safetensors"),
        as_it_was(checkpoint.load_config(path)),
        Tokenizer.load(path / "tokenizer.model").files,
        checkpoint.load_state(path, set()),
    )
    older = ("data.vocab_size=400", "steps=3", "run_dir=older", "resume=true")
    result = command("train.py", *options, *older)
    assert result.code == 0 and "_target_" not in result.err, result.err
    assert checkpoint.newest_checkpoint(Path("older")).name == "step-00000003"
    assert command("generate.py", "Ann", "--run", "older", "--max-new-tokens", "2").code == 0
    export = ("tools/export_hf.py", "--run", "older", "--format", "hf", "--out", "there")
    assert command(*export).code == 0


def test_a_run_of_a_decoder_that_is_gone_is_refused_in_a_line(command, tokenizer, tmp_path):
    tree = tree_of("gqa") | {"vocab_size": tokenizer.vocab_size}
    gone = {"model": tree | {"_target_": "model.speedrun.Speedrun"}}
    checkpoint.save(tmp_path / "run", 1, drawn(tree).state_dict(), gone, tokenizer.files, {})
    result = command("generate.py", "Ann", "--run", "run")
    assert result.code == 3 and result.err.count("\n") == 1 and "Speedrun" in result.err
