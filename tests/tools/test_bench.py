"""The benchmarks measure what they say; how fast anything is, is not tested."""

import io
import json
import subprocess
import sys

import pytest
import torch

from run.instantiate import instantiate
from tests.conftest import TINY
from tools import bench

WORDS = [*TINY, "attention=llama", "data.vocab_size=512", "optimizer=adamw", "precision=fp32"]


def test_competitors_train_the_same_shape():
    settings, _, precision = bench.bench_settings(WORDS)
    model = instantiate(settings.model)
    tokens, flops = bench.work_of_step("train", settings, precision)
    assert (tokens, flops) == (512, 512 * model.training_flops())
    theirs = bench.transformers_llama(settings)
    assert sorted(p.shape for p in model.parameters()) == sorted(
        p.shape for p in theirs.parameters()
    )


def test_speeds_are_compared_turn_by_turn(monkeypatch, capfd):
    """Of processes that take 1 s and 2 s a turn."""

    def start_worker(kind: str, name: str, overrides: list[str]) -> subprocess.Popen:
        turn = json.dumps({"seconds": 1.0 if name == "ours" else 2.0})
        program = f"import sys\nfor _ in sys.stdin: print({turn!r}, flush=True)"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", program], text=True, **pipes)

    monkeypatch.setattr(bench, "start_worker", start_worker)
    monkeypatch.setattr(bench, "measure_ceiling", lambda *_: 1e9)
    bench.main(["train", *WORDS])
    out, err = capfd.readouterr()
    ours, theirs, ratio = map(json.loads, out.splitlines())
    assert (ours["name"], ours["tokens_per_second"]) == ("ours", 512)
    assert (theirs["name"], theirs["tokens_per_second"]) == ("transformers", 256)
    assert ratio == {"speed": 2.0, "of": "transformers"}
    assert err.count("turn ") == 2 * (bench.NUM_TURNS + 1)


@pytest.mark.parametrize("name", ["ours", "transformers"])
def test_a_worker_measures_once_a_line(monkeypatch, capfd, name):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    bench.take_turns("train", name, WORDS)
    turns = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert len(turns) == 2
    assert all(turn["seconds"] > 0 and turn["memory_bytes"] > 0 for turn in turns)


@pytest.mark.parametrize("name", ["ours", "transformers"])
def test_decoding_is_timed_to_the_first_token_and_from_there(monkeypatch, name):
    monkeypatch.setattr(bench, "NEW_TOKENS", 6)
    words = [*WORDS, "context=16", "batch_tokens=48"]
    settings, device, precision = bench.bench_settings(words)
    measured = bench.COMPETITORS["decode"][name](settings, device, precision)()
    assert measured.keys() == {"seconds", "first_token_seconds"}
    assert all(seconds > 0 for seconds in measured.values())


@pytest.mark.parametrize("tied", ["true", "false"])
def test_decoding_reads_the_weights_and_the_cache(monkeypatch, tied):
    monkeypatch.setattr(bench, "NEW_TOKENS", 6)
    words = [*WORDS, "context=16", "batch_tokens=48", f"model.tied={tied}"]
    settings, _, precision = bench.bench_settings(words)
    tokens, nbytes = bench.work_of_step("decode", settings, precision)
    # 3 rows of 5 tokens after the first, which have 12 tokens in front of them on average.
    assert tokens == 3 * 5
    model = instantiate(settings.model)
    short, long = (model.new_cache(3, length, precision, "cpu").nbytes for length in (1, 13))
    # The embedding and the head are as large as each other.
    weights = sum(p.nbytes for name, p in model.named_parameters() if name != "head.weight")
    assert nbytes == 5 * (weights + long - short)


def test_shares_are_of_the_ceiling():
    turns = [{"seconds": seconds} for seconds in (9.0, 2.0, 2.0)]
    line = bench.summarize("x", turns, 100, 0.5)
    assert (line["tokens_per_second"], line["share_of_ceiling"]) == (50, 0.25)
    assert (line["seconds"], line["cold_seconds"]) == (2.0, 9.0)


def test_a_product_is_timed():
    assert bench.matmul_flops(torch.float32, size=64) > 0


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nothing"],
        ["worker", "train", "nobody"],
        ["train", "model=none"],
        ["decode", "device=cpu", "precision=fp16"],
        ["worker", "train", "transformers", "attention=mla"],
    ],
)
def test_what_cannot_be_measured_is_a_line(command, words):
    result = command("tools/bench.py", *words)
    assert result.code in (1, 2)
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
