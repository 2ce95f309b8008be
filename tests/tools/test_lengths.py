"""The loss at 2 and 4 times the training context is that of the same targets."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from inference.load import load_model
from run import checkpoint
from tests.conftest import drawn, settings_of, tree_of
from tools import lengths
from tools.lengths import measure_lengths

CONTEXT = 8


def saved_run(folder: Path, settings: dict, step: int = 1) -> torch.nn.Module:
    """A run with these settings whose only checkpoint is a tiny model, every parameter drawn."""
    corpus = lengths.open_corpus(settings)
    sizes = {"vocab_size": corpus.tokenizer.vocab_size, "context": settings["context"]}
    tree = tree_of("gqa") | {"attention": settings["model"]["attention"]} | sizes
    model = drawn(tree)
    settings = settings | {"model": tree, "device": "cpu"}
    checkpoint.save(folder, step, model.state_dict(), settings, corpus.tokenizer.files, {})
    return model


@pytest.fixture
def run_of(tmp_path, monkeypatch, story):
    """Makes a run on the story with the overrides of an attention -> its folder."""
    monkeypatch.chdir(tmp_path)
    text = (f"context={CONTEXT}", "data=text", f"data.path={story}", "data.vocab_size=400")

    def make(*overrides: str) -> Path:
        saved_run(Path("runs/drawn"), settings_of(*text, *overrides).model_dump())
        return Path("runs/drawn")

    return make


def held_out_tokens() -> list[int]:
    (shard,) = Path(".cache").glob("*/validation-00000.bin")
    return np.fromfile(shard, np.uint16).tolist()


@pytest.mark.parametrize("variant", ["gqa", "delta", "mla"])
def test_losses_are_those_of_a_plain_loop(run_of, variant):
    run = run_of(f"attention={variant}")
    measured = measure_lengths(run)
    assert measured.keys() == {"1", "2", "4"}
    tokens = held_out_tokens()
    for multiple in (1, 2, 4):
        context = multiple * CONTEXT
        newest = checkpoint.newest_checkpoint(run)
        model = load_model(newest, "cpu", context=context).double()
        nats = []
        # Blocks of half a context are scored, the first after three and a half contexts.
        for first in range(4 * CONTEXT - CONTEXT // 2, len(tokens) - CONTEXT // 2, CONTEXT // 2):
            inputs = tokens[first + CONTEXT // 2 - context : first + CONTEXT // 2]
            scores = model(torch.tensor([inputs]))[0].log_softmax(-1)
            for at in range(CONTEXT // 2):
                target = tokens[first + 1 + at]
                nats.append(-scores[context - CONTEXT // 2 + at, target].item())
        assert len(nats) > 30
        assert measured[str(multiple)] == pytest.approx(sum(nats) / len(nats), rel=1e-5)


def test_too_little_text_is_the_reason(run_of, monkeypatch):
    monkeypatch.setattr(lengths, "LONGEST", 4000)
    with pytest.raises(ValueError, match=r"held-out tokens \(a window has 32001\)"):
        measure_lengths(run_of("attention=gqa"))


def test_the_command_prints_lengths(command, run_of):
    run = run_of("attention=gqa")
    result = command("tools/evaluate.py", "--run", str(run), "--lengths")
    assert result.code == 0, result.err
    assert json.loads(result.out) == measure_lengths(run)
