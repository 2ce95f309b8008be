"""The results of tools.evaluate match independent computations."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from data.tokenizer import Tokenizer
from run import checkpoint
from run.checkpoint import load_model
from tests.conftest import DATASETS, STORIES, drawn, saved, settings_of, stories, tree_of
from tests.tools.families import write_tokenizer
from tools.evaluate import Row, windows
from tools.import_hf import import_tokenizer
from training.setup import open_corpus


def evaluated(command, *words: str) -> dict:
    result = command("tools/evaluate.py", *words).succeeded()
    return json.loads(result.out.splitlines()[-1])


def saved_run(folder: Path, settings: dict) -> torch.nn.Module:
    """Save a run with these settings and one checkpoint of a tiny model with random parameters."""
    corpus = open_corpus(settings["data"])
    sizes = {"vocab_size": corpus.tokenizer.vocab_size, "context": settings["context"]}
    tree = tree_of("gqa") | {"attention": settings["model"]["attention"]} | sizes
    model = drawn(tree)
    settings = settings | {"model": tree, "device": "cpu", "text": corpus.sha256}
    checkpoint.save(folder, 1, model.state_dict(), settings, corpus.tokenizer.files, {})
    return model


def held_out_tokens() -> list[int]:
    (shard,) = Path(".cache").glob("*/validation-00000.bin")
    return np.fromfile(shard, np.uint16).tolist()


@stories
def test_an_imported_model_reproduces_its_reference_loss(command):
    stated = json.loads((STORIES / "reference.json").read_text(encoding="utf-8"))
    command("tools/import_hf.py", str(STORIES), "--out", "stories").succeeded()
    # Use only documents that the reference did not truncate, without spaces that it trimmed.
    documents = (
        (DATASETS / "tinystories" / "valid.txt").read_text(encoding="utf-8").split("<|endoftext|>")
    )
    scores = stated["per_doc_tokens_and_nll_sum"]
    whole = []
    for number, (count, _) in enumerate(scores):
        if count < 500 and "  " not in documents[number].strip():
            whole.append(number)
    text = "\n<|endoftext|>\n".join(documents[number].strip() for number in whole)
    Path("whole.txt").write_text(text, encoding="utf-8")
    num_tokens = sum(scores[number][0] for number in whole)
    nats = sum(scores[number][1] for number in whole)
    found = evaluated(command, "--run", "stories", "--text", "whole.txt")
    assert (found["documents"], found["tokens"]) == (len(whole), num_tokens)
    assert found["nats_per_token"] == pytest.approx(nats / num_tokens, abs=1e-4)


@torch.no_grad()
def nats_by_token(model: torch.nn.Module, tokens: list[int]) -> list[float]:
    """Nats of all tokens except the first, in windows of the model's context."""
    nats = []
    for start in range(0, len(tokens) - 1, model.context):
        window = torch.tensor(tokens[start : start + model.context + 1])
        logits = model(window[None, :-1])[0].double()
        nats += torch.nn.functional.cross_entropy(logits, window[1:], reduction="none").tolist()
    return nats


def nats_of(model: torch.nn.Module, tokens: list[int]) -> float:
    return sum(nats_by_token(model, tokens))


@torch.no_grad()
def rolling_nats(model: torch.nn.Module, tokens: list[int], context: int) -> float:
    """Total nats of all tokens except the first, by blocks; each block reads the same context."""
    total = 0.0
    for index in range(1, len(tokens)):
        block = (index - 1) // context
        end = min((block + 1) * context, len(tokens) - 1)
        seen = tokens[max(0, end - context) : index]
        log_probability = model(torch.tensor([seen]))[0, -1].double().log_softmax(0)
        total -= log_probability[tokens[index]].item()
    return total


def test_windows_match_lm_evaluation_harness():
    """Uses the get_rolling_token_windows example in lm-evaluation-harness, tests/test_utils.py."""
    prefix = -100
    rows = windows([prefix, *range(34)], 10)
    assert [(row.tokens[:-1], row.tokens[row.first :]) for row in rows] == [
        ([prefix, *range(9)], [*range(10)]),
        ([*range(9, 19)], [*range(10, 20)]),
        ([*range(19, 29)], [*range(20, 30)]),
        ([*range(23, 33)], [*range(30, 34)]),
    ]
    assert windows([prefix], 10) == [] and windows([prefix, 1], 10) == [Row([prefix, 1], 1)]
    assert len(windows([prefix, *range(20)], 10)) == 2


@pytest.mark.parametrize(
    "variant, family, context",
    [
        ("gqa", "SentencePiece", 64),  # the context of training
        ("gqa", "SmolLM2-135M", 40),  # a tokenizer that does not prepend BOS to a prompt
        ("gdn", "SentencePiece", 150),
    ],
)
def test_the_loss_of_a_text_matches_a_plain_loop(
    command, story, tokenizer, variant, family, context
):
    if family != "SentencePiece":
        write_tokenizer(Path(), family, [story.read_text(encoding="utf-8")])
        tokenizer = import_tokenizer(Path())
        assert not tokenizer.starts_with_bos
    model = saved(Path("runs/drawn"), tree_of(variant), tokenizer).double()
    # In a document, special tokens are plain text.
    texts = ["Ann had a red ball.", "Привет! Bob said: " * 20, "x", "a </s><|endoftext|> b"]
    Path("some.txt").write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    words = ["--run", "runs/drawn", "--text", "some.txt", "--batch-size", "2"]
    if context != model.context:
        words += ["--context", str(context)]
    found = evaluated(command, *words)
    rows = [[tokenizer.bos, *tokens] for tokens in tokenizer.encode_batch(texts)]
    assert all({tokenizer.bos, *tokenizer.eos_ids}.isdisjoint(row[1:]) for row in rows)
    assert max(map(len, rows)) > context
    nats = sum(rolling_nats(model, row, context) for row in rows)
    count = sum(len(row) - 1 for row in rows)
    assert (found["context"], found["tokens"]) == (context, count)
    assert found["bytes"] == len("".join(texts).encode())
    assert found["nats_per_token"] == pytest.approx(nats / count, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / found["bytes"], rel=1e-5)


def test_the_held_out_text_of_the_run_is_evaluated(command, trained, tokenizer, monkeypatch):
    words = ("--run", str(trained), "--slices")
    found = evaluated(command, *words)
    model = load_model(checkpoint.newest_checkpoint(trained), "cpu").double()
    tokens = held_out_tokens()
    expected = nats_of(model, tokens) / (len(tokens) - 1)
    assert found["val_loss"] == pytest.approx(expected, rel=1e-5)
    # The token-weighted mean of new and repeated tokens is the total loss.
    kinds = [found["slices"][name] for name in ("new", "repeated")]
    nats = sum(each["loss"] * each["tokens"] for each in kinds)
    assert nats / (len(tokens) - 1) == pytest.approx(found["val_loss"], abs=1e-6)

    # The checkpoint's tokenizer is used; a newly trained one would differ.
    monkeypatch.setattr(Tokenizer, "train", lambda *_: tokenizer)
    shutil.rmtree(".cache")
    assert evaluated(command, *words) == found


def test_a_text_that_has_changed_since_training_is_refused(command, story):
    text = ("context=8", "data=text", f"data.path={story}", "data.vocab_size=400")
    saved_run(Path("runs/drawn"), settings_of(*text).model_dump())
    words = ("tools/evaluate.py", "--run", "runs/drawn", "--slices")
    command(*words).succeeded()
    old = story.read_text(encoding="utf-8")
    story.write_text(old + "<|endoftext|>\nWords that no one has heard.\n", encoding="utf-8")
    result = command(*words)
    assert result.code == 2 and not result.out and "--text FILE" in result.err


def test_a_task_is_evaluated_in_rows_of_the_context(command):
    settings = settings_of("data=recall", "context=64", "data.pairs=[2,4]", "data.vocab_size=16")
    saved_run(Path("runs/recall"), settings.model_dump())
    words = ("--run", "runs/recall", "--slices", "--context")
    found, longer = (evaluated(command, *words, context) for context in ("64", "128"))
    # Answers follow the pairs, at distances shorter than a row.
    assert longer["slices"].keys() - found["slices"].keys() == {"distance 65-128"}
    mean = (found["recall_accuracy_2"] + found["recall_accuracy_4"]) / 2
    assert 0 < found["recall_accuracy"] == pytest.approx(mean)


@pytest.mark.parametrize("variant", ["gqa", "gdn"])
def test_losses_at_longer_contexts_match_a_plain_loop(command, story, variant):
    trained = 8
    text = (f"context={trained}", "data=text", f"data.path={story}", "data.vocab_size=400")
    saved_run(Path("runs/drawn"), settings_of(*text, f"attention={variant}").model_dump())
    found = evaluated(command, "--run", "runs/drawn", "--lengths")
    assert found.keys() == {"1", "2", "4"}
    tokens = held_out_tokens()
    for multiple in (1, 2, 4):
        context = multiple * trained
        newest = checkpoint.newest_checkpoint(Path("runs/drawn"))
        model = load_model(newest, "cpu", context=context).double()
        nats = []
        # Score blocks of half a context, starting after three and a half contexts.
        for end in range(4 * trained + 1, len(tokens) + 1, trained // 2):
            nats += nats_by_token(model, tokens[end - context - 1 : end])[-trained // 2 :]
        assert len(nats) > 30
        assert found[str(multiple)] == pytest.approx(sum(nats) / len(nats), rel=1e-5)


@pytest.mark.parametrize(
    "wanted, named",
    [
        (("--text", "none.txt"), "none.txt"),
        (("--slices",), "not a run"),
        (("--lengths", "--context", "9"), "--context"),
    ],
)
def test_an_invalid_evaluation_is_refused_by_name(command, drawn_run, wanted, named):
    result = command("tools/evaluate.py", "--run", str(drawn_run), *wanted)
    assert result.code == 2 and named in result.err and not result.out
