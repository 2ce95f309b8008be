"""The benchmarks measure correctly. The speeds themselves are not tested."""

import json
import sys
from argparse import Namespace
from unittest import mock

import pytest
import torch

from run import hardware
from run.instantiate import instantiate
from tests.conftest import TINY, poisoned_memory
from tools import bench

WORDS = [*TINY, "attention=llama", "data.vocab_size=512", "optimizer=adamw", "precision=fp32"]
DECODING = [*WORDS, "context=16", "batch_tokens=48", "compile=false"]


def test_ratios_are_taken_within_alternating_turns(monkeypatch, capfd):
    """Simulates a machine that slows down, so that the ratio of the medians would be 1."""
    seconds = {"ours": [1.0, 2.0, 9.0], "transformers": [2.0, 2.0, 18.0]}
    order = []

    def start_turn(kind: str, name: str, overrides: list[str]) -> dict[str, float]:
        assert (kind, overrides) == ("train", WORDS)
        order.append(name)
        return {"seconds": seconds[name].pop(0), "memory_bytes": 7}

    monkeypatch.setattr(bench, "start_turn", start_turn)
    monkeypatch.setattr(bench, "NUM_TURNS", 3)
    monkeypatch.setattr(hardware, "peak_flops", lambda _: 1e9)
    bench.main(Namespace(kind="train", turn=None, overrides=WORDS))
    ours, theirs, ratio = map(json.loads, capfd.readouterr().out.splitlines())
    assert order == ["ours", "transformers"] * 3
    for line in (ours, theirs):
        assert (line["seconds"], line["tokens_per_second"], line["memory_bytes"]) == (2, 256, 7)
    model = instantiate(bench.bench_settings(WORDS)[0].model)
    assert ours["mfu"] == pytest.approx(256 * model.training_flops() / 1e9)
    assert ratio == {"speed": 2.0, "of": "transformers"}


def test_decoding_speed_counts_the_tokens_after_the_first(monkeypatch, capfd):
    """Simulates 3 rows that take 0.5 s per step, on a GPU that reads 1 MB/s."""
    monkeypatch.setattr(bench, "start_turn", lambda *_: {"seconds": 0.5 * (bench.NEW_TOKENS - 1)})
    monkeypatch.setattr(bench, "DECODE_CASES", ((3, 300),))
    monkeypatch.setattr(hardware, "peak_bandwidth", lambda _: 1e6)
    bench.main(Namespace(kind="decode", turn=None, overrides=WORDS))
    *lines, ratio = map(json.loads, capfd.readouterr().out.splitlines())
    settings, *_ = bench.bench_settings([*WORDS, "context=301", "batch_tokens=903"])
    for line in lines:
        assert (line["rows"], line["length"], line["tokens_per_second"]) == (3, 300, 6)
        read = bench.bytes_per_step(settings, torch.float32, int8="int8" in line["name"])
        assert line["share_of_bandwidth"] == pytest.approx(2 * read / 1e6)
    assert ratio["speed"] == 1 and ratio["of"].startswith("transformers")


@pytest.mark.parametrize("precision, size, tied", [("fp32", 4, "true"), ("bf16", 2, "false")])
def test_bytes_per_step_match_the_shapes_of_transformers(monkeypatch, precision, size, tied):
    rows, length = 3, 19
    words = [*WORDS, f"model.tied={tied}", f"precision={precision}"]
    sizes = [f"context={length + 1}", f"batch_tokens={rows * (length + 1)}"]
    settings, _, dtype = bench.bench_settings([*words, *sizes])
    model = bench.transformers_llama(settings)
    config = model.config
    # The whole embedding is read only if it is also the head.
    weights = [p for name, p in model.named_parameters() if "embed" not in name or tied == "true"]
    matrices = [p for p in weights if p.ndim == 2]
    # The weights of norms stay in fp32; the scales of int8 weights have the given precision.
    vectors = 4 * sum(p.numel() for p in weights if p.ndim == 1)
    in_precision = vectors + size * sum(p.numel() for p in matrices)
    in_int8 = vectors + sum(p.numel() + size * len(p) for p in matrices)
    # The steps after the first of 7 new tokens store tokens 13 to 18: 15.5 on average, rounded up.
    monkeypatch.setattr(bench, "NEW_TOKENS", 7)
    kv_size = 2 * config.num_key_value_heads * config.head_dim
    cache = size * rows * config.num_hidden_layers * kv_size * 16
    assert bench.bytes_per_step(settings, dtype, int8=False) == in_precision + cache
    assert bench.bytes_per_step(settings, dtype, int8=True) == in_int8 + cache


def test_a_turn_is_a_command_that_does_not_count_compiling(monkeypatch, capfd):
    seconds = iter((1000.0, 3.0))
    step = mock.Mock(side_effect=lambda: {"seconds": next(seconds)})
    monkeypatch.setitem(bench.COMPETITORS["train"], "ours", lambda *_: step)
    monkeypatch.setattr(bench, "TURN_SECONDS", 0)

    def run(command: list[str], **_) -> mock.Mock:
        monkeypatch.setattr(sys, "argv", command[2:])
        bench.main(bench.parse_arguments())
        return mock.Mock(returncode=0, stdout=capfd.readouterr().out)

    monkeypatch.setattr(bench.subprocess, "run", run)
    turn = bench.start_turn("train", "ours", WORDS)
    assert turn["seconds"] == 3 and turn["memory_bytes"] > 0


@pytest.mark.parametrize(
    "kind, name",
    [
        ("train", "ours"),
        ("train", "transformers"),
        ("decode", "ours"),
        ("decode", "ours, int8"),
        ("decode", "transformers"),
    ],
)
def test_each_competitor_is_measured(monkeypatch, kind, name):
    monkeypatch.setattr(bench, "NEW_TOKENS", 6)
    settings, device, precision = bench.bench_settings(DECODING)
    measured = bench.COMPETITORS[kind][name](settings, device, precision)()
    assert measured["seconds"] > 0
    assert ("first_token_seconds" in measured) == (kind == "decode")


def test_our_decoding_reads_initialized_weights(monkeypatch):
    """Reading untouched memory is faster: all of its pages are one page of zeros."""
    engines = []
    monkeypatch.setattr(bench, "Engine", lambda *args: engines.append(args[0]) or mock.Mock())
    monkeypatch.setattr(bench, "NEW_TOKENS", 6)
    settings = bench.bench_settings(DECODING)
    with poisoned_memory():
        bench.decode_ours(*settings)
    assert all(weight.isfinite().all() for weight in engines[0].parameters())
