"""Losses at 2 and 4 times the training context use the same targets."""

import json
from pathlib import Path

import pytest

from run import checkpoint
from run.checkpoint import load_model
from tests.conftest import settings_of
from tests.tools.test_evaluate import held_out_tokens, nats_by_token, saved_run
from tools import lengths
from tools.lengths import measure_lengths
from training import setup

CONTEXT = 8


@pytest.fixture
def run_of(tmp_path, monkeypatch, story):
    """A function that returns the folder of a run on the story with given attention overrides."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(setup, "cache_folder", lambda: Path(".cache"))
    text = (f"context={CONTEXT}", "data=text", f"data.path={story}", "data.vocab_size=400")

    def make(*overrides: str) -> Path:
        saved_run(Path("runs/drawn"), settings_of(*text, *overrides).model_dump())
        return Path("runs/drawn")

    return make


@pytest.mark.parametrize("variant", ["gqa", "gdn", "mla"])
def test_losses_match_a_plain_loop(run_of, variant):
    run = run_of(f"attention={variant}")
    measured = measure_lengths(run)
    assert measured.keys() == {"1", "2", "4"}
    tokens = held_out_tokens()
    for multiple in (1, 2, 4):
        context = multiple * CONTEXT
        newest = checkpoint.newest_checkpoint(run)
        model = load_model(newest, "cpu", context=context).double()
        nats = []
        # Score blocks of half a context, starting after three and a half contexts.
        for end in range(4 * CONTEXT + 1, len(tokens) + 1, CONTEXT // 2):
            nats += nats_by_token(model, tokens[end - context - 1 : end])[-CONTEXT // 2 :]
        assert len(nats) > 30
        assert measured[str(multiple)] == pytest.approx(sum(nats) / len(nats), rel=1e-5)


def test_too_little_text_is_reported(run_of, monkeypatch):
    monkeypatch.setattr(lengths, "LONGEST", 4000)
    with pytest.raises(ValueError, match=r"held-out tokens \(\d+; a window needs 32001\)"):
        measure_lengths(run_of("attention=gqa"))


def test_the_evaluate_command_prints_losses_by_length(command, run_of, monkeypatch):
    run = run_of("attention=gqa")
    result = command("tools/evaluate.py", "--run", str(run), "--lengths").succeeded()
    assert json.loads(result.out) == measure_lengths(run)
    # The given device is used.
    devices = []
    load = lengths.load_to_score
    monkeypatch.setattr(
        lengths,
        "load_to_score",
        lambda path, device, **options: devices.append(device) or load(path, device, **options),
    )
    command("tools/evaluate.py", "--run", str(run), "--lengths", "--device", "cpu").succeeded()
    assert devices == ["cpu"] * len(lengths.MULTIPLES)
