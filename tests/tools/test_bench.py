"""The benchmarks measure correctly. The speeds themselves are not tested."""

import json
import multiprocessing
import os
import signal
from argparse import Namespace
from collections import Counter
from unittest import mock

import pytest
import torch

from run import compilation, hardware
from run.instantiate import instantiate
from tests.conftest import LONG, TINY, poisoned_memory
from tools import bench

WORDS = [*TINY, "attention=llama", "data.vocab_size=512", "optimizer=adamw", "precision=fp32"]


def test_competitors_train_models_with_the_same_shapes():
    settings, *_ = bench.bench_settings(WORDS)
    model = instantiate(settings.model)
    theirs = bench.transformers_llama(settings)
    assert sorted(p.shape for p in model.parameters()) == sorted(
        p.shape for p in theirs.parameters()
    )


def test_speeds_are_measured_in_alternating_turns(monkeypatch, capfd):
    """Simulates two workers that take 1 s and 2 s per turn."""
    monkeypatch.setattr(bench, "start_worker", lambda kind, name, _: mock.Mock())
    num_turns = Counter()

    def request_turn(name: str, _: mock.Mock) -> dict[str, float]:
        num_turns[name] += 1
        if num_turns[name] == 1:  # the first turn compiles and is not counted
            return {"seconds": 1000.0}
        return {"seconds": 1.0 if name == "ours" else 2.0}

    # With only one counted turn, also counting the first one would change the median.
    monkeypatch.setattr(bench, "NUM_TURNS", 1)
    monkeypatch.setattr(bench, "request_turn", request_turn)
    model = instantiate(bench.bench_settings(WORDS)[0].model)
    flops = model.training_flops()
    monkeypatch.setattr(bench, "measure_ceiling", lambda *_: 1024 * flops)
    bench.main(Namespace(kind="train", overrides=WORDS))
    out, err = capfd.readouterr()
    ours, theirs, ratio = map(json.loads, out.splitlines())
    assert (ours["name"], ours["tokens_per_second"]) == ("ours", 512)
    assert (theirs["name"], theirs["tokens_per_second"]) == ("transformers", 256)
    assert (ours["share_of_ceiling"], theirs["share_of_ceiling"]) == (0.5, 0.25)
    ratio_of_flops = model.training_flops(whole_attention=True) / flops
    assert ours["share_whole_attention"] == pytest.approx(0.5 * ratio_of_flops)
    assert ratio == {"speed": 2.0, "of": "transformers"}
    _, *lines, last = err.splitlines()
    assert last.startswith("next: ")
    assert lines[:8] == [
        "turn 0 of 1: ours",
        "    1000.000 s",
        "turn 0 of 1: transformers",
        "    1000.000 s",
        "turn 1 of 1: ours",
        "    1.000 s",
        "turn 1 of 1: transformers",
        "    2.000 s",
    ]
    assert len(lines) == 4 * (bench.NUM_TURNS + 1)


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("precision, size", [("fp32", 4), ("bf16", 2)])
def test_decoding_reports_its_share_of_the_memory_bandwidth(
    monkeypatch, capfd, precision, size, tied
):
    """Simulates steps of 1 s and a memory bandwidth of 1 MB/s."""
    rows, length, num_new = 3, 19, 7
    words = [*WORDS, f"model.tied={tied}", f"precision={precision}"]
    sizes = [f"context={length + 1}", f"batch_tokens={rows * (length + 1)}"]
    model = bench.transformers_llama(bench.bench_settings([*words, *sizes])[0])
    config = model.config
    # The whole embedding is read only if it is also the head.
    weights = [p for name, p in model.named_parameters() if "embed" not in name or tied == "true"]
    matrices = [p for p in weights if p.ndim == 2]
    # The weights of norms stay in fp32; the scales of int8 weights have the given precision.
    vectors = 4 * sum(p.numel() for p in weights if p.ndim == 1)
    in_fp32 = vectors + 4 * sum(p.numel() for p in matrices)
    in_precision = vectors + size * sum(p.numel() for p in matrices)
    in_int8 = vectors + sum(p.numel() + size * len(p) for p in matrices)
    # The steps store tokens 13 to 18, which is 15.5 on average, rounded up.
    kv_size = 2 * config.num_key_value_heads * config.head_dim
    cached = rows * config.num_hidden_layers * kv_size * 16
    cache = size * cached

    monkeypatch.setattr(bench, "start_worker", lambda *_: mock.Mock())
    monkeypatch.setattr(bench, "request_turn", lambda *_: {"seconds": num_new - 1.0})
    monkeypatch.setattr(bench, "measure_bandwidth", lambda _: 1e6)
    monkeypatch.setattr(bench, "NEW_TOKENS", num_new)
    monkeypatch.setattr(bench, "DECODE_CASES", ((rows, length),))
    bench.main(Namespace(kind="decode", overrides=words))
    *lines, ratio = map(json.loads, capfd.readouterr().out.splitlines())
    shares = {line["name"]: line["share_of_bandwidth"] for line in lines}
    expected = {
        "ours": (in_precision + cache) / 1e6,
        "ours, int8": (in_int8 + cache) / 1e6,
        "transformers": (in_precision + cache) / 1e6,
        "transformers, compiled": (in_precision + cache) / 1e6,
    }
    if precision != "fp32":
        expected["ours, fp32"] = (in_fp32 + 4 * cached) / 1e6
    assert shares == pytest.approx(expected)
    assert ratio["speed"] == 1 and ratio["of"].startswith("transformers")


@pytest.mark.parametrize(
    "name, bandwidth",
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA A100-SXM4-80GB", 2.04e12),
        ("NVIDIA A100 80GB PCIe", 1.94e12),
        ("NVIDIA A100-PCIE-40GB", 1.56e12),
        ("NVIDIA L4", 0.3e12),
        ("NVIDIA GeForce RTX 4090", 1.01e12),
    ],
)
def test_gpu_bandwidth_comes_from_the_data_sheet(monkeypatch, name, bandwidth):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert bench.measure_bandwidth(torch.device("cuda")) == bandwidth


def test_cpu_bandwidth_is_measured(monkeypatch):
    """Simulates summing 1 MB in 2 ms."""
    monkeypatch.setattr(bench, "READ_PROBE_SIZE", 10**6)
    monkeypatch.setattr(bench.timeit, "repeat", lambda read, **_: [read() and 0.003, 0.002])
    assert bench.measure_bandwidth(torch.device("cpu")) == 5e8


def test_a_worker_measures_once_per_message_and_ignores_ctrl_c():
    worker = bench.start_worker("train", "ours", WORDS)
    (process,) = multiprocessing.active_children()
    os.kill(process.pid, signal.SIGINT)
    turns = [bench.request_turn("ours", worker) for _ in range(2)]
    assert all(turn["seconds"] > 0 and turn["memory_bytes"] > 0 for turn in turns)
    assert process.daemon
    worker.close()
    process.join(LONG)
    assert process.exitcode == 0


def test_a_failed_worker_ends_the_benchmark(capfd):
    worker = bench.start_worker("train", "transformers", [*WORDS, "attention=mla"])
    with pytest.raises(SystemExit) as end:
        bench.request_turn("transformers", worker)
    assert end.value.code == 1
    what, where = capfd.readouterr().err.splitlines()
    assert what.startswith("error: LlamaForCausalLM cannot express") and "failed" in where


@pytest.mark.parametrize("name", ["ours", "ours, fp32", "ours, int8", "transformers"])
def test_prefill_and_decoding_are_timed_separately(monkeypatch, name):
    monkeypatch.setattr(bench, "NEW_TOKENS", 6)
    words = [*WORDS, "context=16", "batch_tokens=48"]
    settings, device, precision = bench.bench_settings(words)
    measured = bench.COMPETITORS["decode"][name](settings, device, precision)()
    assert measured.keys() == {"seconds", "first_token_seconds"}
    assert all(seconds > 0 for seconds in measured.values())


def test_our_decoding_reads_initialized_weights(monkeypatch):
    """Reading untouched memory is faster: all of its pages are one page of zeros."""
    engines = []
    monkeypatch.setattr(bench, "Engine", lambda *args: engines.append(args[0]) or mock.Mock())
    words = [*WORDS, "context=16", "batch_tokens=48", "compile=false"]
    monkeypatch.setattr(bench, "NEW_TOKENS", 6)
    settings = bench.bench_settings(words)
    with poisoned_memory():
        bench.decode_ours(*settings)
    assert all(weight.isfinite().all() for weight in engines[0].parameters())


def test_our_decoding_is_compiled_only_on_a_machine_that_can_compile(monkeypatch):
    engine = mock.Mock(can_capture=False, compiled_step=None)
    monkeypatch.setattr(bench, "Engine", lambda *_: engine)
    monkeypatch.setattr(bench, "time_generation", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(bench, "NEW_TOKENS", 6)
    settings = bench.bench_settings([*WORDS, "context=16", "batch_tokens=48", "compile=auto"])
    for missing in ("a C++ compiler", None):
        monkeypatch.setattr(compilation, "missing_for_compilation", lambda _, m=missing: m)
        bench.decode_ours(*settings)()
        assert engine.compile.called == (missing is None)


def test_a_summary_reports_medians_over_turns_and_the_rate():
    turns = [{"seconds": seconds} for seconds in (9.0, 2.0, 2.0)]
    line = bench.summarize("x", turns, 100)
    assert (line["seconds"], line["tokens_per_second"]) == (2.0, 50)


@pytest.mark.parametrize("has_bf16, precision", [(True, torch.bfloat16), (False, torch.float32)])
def test_the_compute_ceiling_is_never_measured_with_emulated_products(
    monkeypatch, has_bf16, precision
):
    monkeypatch.setattr(hardware, "multiplies_bf16", lambda _: has_bf16)
    monkeypatch.setattr(bench, "PROBE_SIZE", 64)
    multiply = torch.Tensor.__matmul__
    dtypes = set()
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: dtypes.add(a.dtype) or multiply(a, b)
    )
    devices = []
    draw = torch.randn
    monkeypatch.setattr(
        torch, "randn", lambda *size, device: devices.append(device) or draw(*size, device=device)
    )
    device = torch.device("cpu")
    assert bench.measure_ceiling(device, torch.bfloat16) > 0
    assert dtypes == {precision} and devices == [device]


@pytest.mark.parametrize(
    "words", [[], ["nothing"], ["train", "model=none"], ["decode", "device=cpu", "precision=fp16"]]
)
def test_an_unsupported_benchmark_is_refused_in_one_line(command, words):
    result = command("tools/bench.py", *words)
    assert result.code in (1, 2)
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
