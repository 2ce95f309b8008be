"""The benchmarks measure what they say; how fast anything is, is not tested."""

import json

import pytest
import torch

from run.instantiate import instantiate
from tests.conftest import TINY
from tools import bench

WORDS = [*TINY, "attention=llama", "data.vocab_size=512", "optimizer=adamw", "precision=fp32"]


def test_competitors_train_the_same_shape():
    settings, device, precision = bench.bench_settings(WORDS)
    assert (
        bench.work_of_step("train", settings, precision)["tokens"] == 512 and device.type == "cpu"
    )
    sizes = [
        sorted(p.shape for p in model.parameters())
        for model in (instantiate(settings["model"]), bench.transformers_llama(settings))
    ]
    assert sizes[0] == sizes[1]
    (
        bench.train_ours(settings, device, precision)(),
        bench.train_transformers(settings, device, precision)(),
    )


def test_competitors_are_measured_in_turns(monkeypatch, capfd):
    monkeypatch.setattr(bench, "NUM_TURNS", 1)
    bench.main(["train", *WORDS])
    out, err = capfd.readouterr()
    ours, theirs, ratios = map(json.loads, out.splitlines())
    assert (ours["name"], theirs["name"]) == ("ours", "transformers")
    expected = ours["tokens_per_second"] / theirs["tokens_per_second"]
    assert ratios["speed"] == pytest.approx(expected, rel=1e-2)
    assert ours["predicted_seconds"] > 0 and "predicted_seconds" not in theirs
    assert err.count("turn ") == 4


@pytest.mark.parametrize("tied", ["true", "false"])
def test_decoders_say_the_same_and_time_it(monkeypatch, tied):
    monkeypatch.setattr(bench, "NEW_TOKENS", 6)
    words = [*WORDS, "context=16", "batch_tokens=48", f"model.tied={tied}"]
    settings, device, precision = bench.bench_settings(words)
    work = bench.work_of_step("decode", settings, precision)
    assert work["tokens"] == 3 * 5
    said = []
    for name in ("ours", "dynamic", "static"):
        measured = bench.COMPETITORS["decode"][name](settings, device, precision)()
        assert measured["seconds"] > 0 < measured["first_token_seconds"]
        assert measured["cache_bytes"] >= 2 * 3 * 14 * 2 * 32 * 4  # less one, unread
        said.append(torch.tensor(measured["tokens"]))
    # The two largest logits lie 0.001 apart or more.
    assert (
        torch.equal(said[0], said[1]) and torch.equal(said[1], said[2]) and said[0].shape == (3, 15)
    )


def test_utilization_is_of_the_best_product():
    turn = {"seconds": 2.0, "memory": 7, "ceiling": 1e9}
    turns = [turn | {"seconds": 9.0}, turn, turn | {"ceiling": 2e9}]
    line = bench.summarize("x", turns, {"tokens": 100, "flops": 1e9})
    assert (line["tokens_per_second"], line["mfu"], line["cold_seconds"]) == (50, 0.25, 9.0)


def test_a_product_is_timed():
    assert bench.matmul_flops(64) > 0


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nothing"],
        ["data"],
        ["worker"],
        ["worker", "train", "nobody"],
        ["train", "model=none"],
        ["decode", "device=cpu", "precision=fp16"],
        ["worker", "train", "transformers", "attention=mla"],
    ],
)
def test_what_cannot_be_measured_is_a_line(command, words):
    result = command("tools/bench.py", *words)
    assert (
        result.code in (1, 2) and result.err.startswith("error: ") and result.err.count("\n") == 1
    )
