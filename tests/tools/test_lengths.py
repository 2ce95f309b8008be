"""The loss at 2 and 4 times the training context is that of the same targets."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from inference.load import load_model
from run import checkpoint
from run.instantiate import instantiate
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
    assert measured.keys() == {"1", "2", "4", "4 YaRN"}
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


@pytest.mark.parametrize("variant", ["gqa", "mla", "nope"])
def test_yarn_is_that_of_a_model_with_scaled_positions(run_of, variant):
    """One that is built with YaRN, from the same weights, at four times the context."""
    run = run_of(f"attention={variant}")
    measured = measure_lengths(run)
    scaling = {"_target_": "model.rope.YaRN", "factor": 4, "fast": 32, "slow": 1}

    def scaled(tree):
        if not isinstance(tree, dict):
            return tree
        tree = {key: scaled(branch) for key, branch in tree.items()}
        if tree.get("rope_base") is not None:
            tree["rope_scaling"] = scaling | {"context": CONTEXT}
        return tree

    newest = checkpoint.newest_checkpoint(run)
    settings = checkpoint.load_config(newest)
    settings["model"]["attention"] = scaled(settings["model"]["attention"])
    weights = load_model(newest, "cpu").state_dict()
    proto = (newest / "tokenizer.model").read_bytes()
    checkpoint.save(Path("runs/scaled"), 1, weights, settings, {"tokenizer.model": proto}, {})
    expected = measure_lengths(Path("runs/scaled"))
    assert measured["4 YaRN"] == pytest.approx(expected["4"], rel=1e-5)
    assert measured["4"] != pytest.approx(expected["4"], rel=1e-4)
    assert expected["4 YaRN"] == expected["4"]  # what was trained with a scaling keeps that


def test_too_little_text_is_the_reason(run_of, monkeypatch):
    monkeypatch.setattr(lengths, "LONGEST", 4000)
    measured = measure_lengths(run_of("attention=gqa"))
    assert "held-out tokens (a window has 32001)" in measured["1"]


def test_lengths_are_measured_once_for_a_checkpoint(run_of):
    run = run_of("attention=gqa")
    measured = measure_lengths(run)
    file = run / "lengths-step-00000001.json"
    assert [*run.glob("lengths*")] == [file]
    assert json.loads(file.read_text()) == measured
    file.write_text(json.dumps(measured | {"4": 7.5}))
    assert measure_lengths(run)["4"] == 7.5
    file.rename(run / "lengths-step-00000000.json")  # of an older checkpoint
    assert measure_lengths(run) == measured


def test_the_command_prints_lengths(command, run_of):
    run = run_of("attention=gqa")
    result = command("tools/evaluate.py", "--run", str(run), "--lengths")
    assert result.code == 0, result.err
    assert json.loads(result.out) == measure_lengths(run)


def test_accuracies_of_a_task_are_those_of_rows_of_this_length(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = settings_of("data=recall", "context=24", "data.pairs=[2,4]", "data.vocab_size=16")
    run = Path("runs/recall")
    model = saved_run(run, settings.model_dump())
    measured = measure_lengths(run)
    task = instantiate(settings.data, "data")
    for multiple in (1, 2, 4):
        context = multiple * 24
        accuracies = {2: [], 4: []}
        batch_size = lengths.BATCH_TOKENS // context
        for batch in task.corpus().evaluation(512 * context, context, batch_size):
            for inputs, targets, _ in zip(*batch, strict=True):
                predicted = model(inputs[None])[0].argmax(-1)
                asked = (targets >= 0).nonzero().flatten().tolist()
                for at in asked:
                    accuracies[len(asked)].append(bool(predicted[at] == targets[at]))
        means = [np.mean(accuracies[pairs]) for pairs in (2, 4)]
        assert measured[str(multiple)] == pytest.approx(np.mean(means))
        assert measured[str(multiple)] > 0
