"""Measures how fast training and decoding are beside `transformers`, on this machine.

    python -m tools.bench train model=15m attention=llama optimizer=adamw
        an optimizer step, and one of `transformers`' Llama
    python -m tools.bench decode model=15m attention=llama precision=bf16
        greedy text, and `generate` of `transformers` with three kinds of cache

Overrides are those of train.py. Competitors are processes that live side by side and take turns, so
that a slow moment of the machine meets all of them. Each prints a JSON line, and so do the ratios.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn

from checkpoints.huggingface import mapping
from checkpoints.weights import weight_map
from common import compilation, errors, hardware
from common.config import compose, report_errors
from common.instantiate import ROOT, instantiate
from data.loader import Loader
from data.prepare import Corpus
from inference import quantize
from inference.engine import compile_decode_step, decode_step
from model.materialize import build_model, materialize
from tools.latency import timed
from training.distributed import DistEnv
from training.setup import load_settings
from training.signals import Signals
from training.trainer import Trainer

NUM_TURNS = 8  # of each competitor, after one that compiles
PROBES_PER_TURN = 3  # measurements of the machine's ceiling; the best of all counts
DECODE_CASES = ((1, 256), (8, 256), (1, 2048), (8, 2048))  # rows, tokens of each at the end
NEW_TOKENS = 255  # of them are generated


def main(args: list[str]) -> None:
    match args:
        case ["train", *overrides]:
            compare("train", overrides, {})
        case ["decode", *overrides]:
            for rows, length in DECODE_CASES:
                context = length + 1
                sizes = [f"context={context}", f"batch_tokens={rows * context}"]
                compare("decode", [*sizes, *overrides], {"rows": rows, "length": length})
        case ["worker", kind, name, *overrides] if name in COMPETITORS.get(kind, {}):
            take_turns(COMPETITORS[kind][name](overrides))
        case _:
            problem = f"nothing to measure (got {' '.join(args) or 'no arguments'})"
            errors.exit_with(errors.INPUT, f"{problem}. fix: python -m tools.bench train or decode")


# The parent: starts the competitors, gives them turns, and prints what they measured.


def compare(kind: str, overrides: list[str], case: dict[str, int]) -> None:
    """Prints a line for each competitor, and the ratios of ours to the best of the others."""
    bench_settings(overrides)  # ends here where the overrides are wrong
    # Let all build their models at the same time, and then work one at a time, for a fair share.
    processes = {}
    turns = {}
    for name in COMPETITORS[kind]:
        processes[name] = start_worker(kind, name, overrides)
        turns[name] = []
    for number in range(NUM_TURNS + 1):
        for name, process in processes.items():
            turn = request_turn(name, process)
            turns[name].append(turn)
            print(f"turn {number} of {NUM_TURNS}: {name} {turn['seconds']:.3f} s", file=sys.stderr)
    for process in processes.values():
        process.communicate()

    # Within a turn all meet the same machine, so the ratio of speeds is the median over turns.
    ours, *others = [summarize(name, measured) for name, measured in turns.items()]
    best = min(others, key=lambda line: line["seconds"])
    pairs = zip(turns[ours["name"]][1:], turns[best["name"]][1:], strict=True)
    speed = statistics.median(theirs["seconds"] / our["seconds"] for our, theirs in pairs)
    memory = ours["peak_memory_bytes"] / best["peak_memory_bytes"]
    ratios = {"speed": round(speed, 3), "peak_memory": round(memory, 3)}
    for line in (ours, *others, ratios):
        print(json.dumps(case | line))


def start_worker(kind: str, name: str, overrides: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tools.bench", "worker", kind, name, *overrides],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def request_turn(name: str, process: subprocess.Popen) -> dict:
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        errors.exit_with(errors.BUG, f"{name} ended. fix: see above")
    return json.loads(line)


def summarize(name: str, turns: list[dict]) -> dict:
    """Medians of all turns but the first, which compiles, and the rates that follow from them."""
    first, *timed_turns = turns
    medians = {}
    rounded = {}
    for key in first:
        if key.endswith("seconds"):
            medians[key] = statistics.median(turn[key] for turn in timed_turns)
            rounded[key] = round(medians[key], 4)

    # Rates, and how near they come to the machine's: FLOP/s in training, bytes/s in decoding.
    rates = {}
    ceiling = max(turn["ceiling"] for turn in turns)
    utilization = {}
    for unit, amount in first["work"].items():
        rate = amount / medians["seconds"]
        rates[f"{unit}_per_second"] = round(rate)
        if unit == "flops":
            utilization["mfu"] = round(rate / ceiling, 3)
        if unit == "bytes_read":
            utilization["bandwidth_share"] = round(rate / ceiling, 3)

    cold = first.get("first_token_seconds", first["seconds"])
    return {
        "name": name,
        **rounded,
        **rates,
        **utilization,
        "peak_memory_bytes": turns[-1]["memory"],
        "cold_seconds": round(cold, 2),
        "cache_bytes": first.get("cache_bytes"),
    }


# The worker: one competitor in a process of its own.


@dataclass
class Competitor:
    """A step to be timed, and what one step does: tokens, and either flops or bytes_read.

    A step of decoding measures itself, and returns what it measured.
    """

    step: Callable[[], dict | None]
    work: dict[str, float]
    device: torch.device


def take_turns(competitor: Competitor) -> None:
    """For each line of standard input, times some steps and prints what was measured as JSON."""
    device = competitor.device
    is_training = "flops" in competitor.work
    hardware.keep_freed_memory(device)
    compilation.use_cache()
    for number, _ in enumerate(sys.stdin):
        # Time two steps of training at once, but only one in the first turn, which compiles.
        num_steps = 2 if is_training and number > 0 else 1
        start = perf_counter()
        for _ in range(num_steps):
            measured = competitor.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (perf_counter() - start) / num_steps
        # Memory is read before the probes of the machine's rate, which take some too.
        turn = {
            "seconds": seconds,
            "work": competitor.work,
            "memory": hardware.peak_memory(device),
            "ceiling": peak_rate(device, is_training),
        }
        print(json.dumps(turn | (measured or {})), flush=True)


def peak_rate(device: torch.device, is_training: bool) -> float:
    """FLOP/s for training, known for a GPU and measured on a CPU; bytes/s for decoding."""
    rate = hardware.peak_flops(device) if is_training else None
    if rate is None:
        probe = matmul_flops if is_training else partial(read_bandwidth, device)
        rate = max(probe() for _ in range(PROBES_PER_TURN))
    return rate


def matmul_flops(size: int = 4096) -> float:
    """Measures FLOP/s of a product of square matrices in bf16, on a CPU."""
    a = torch.randn(size, size, dtype=torch.bfloat16)
    b = torch.randn(size, size, dtype=torch.bfloat16)
    start = perf_counter()
    a @ b
    return 2 * size**3 / (perf_counter() - start)


def read_bandwidth(device: torch.device) -> float:
    """Measures bytes/s at which numbers are read and summed."""
    x = torch.ones(2**28 if device.type == "cuda" else 2**26, device=device)
    x.sum().item()
    start = perf_counter()
    x.sum().item()
    return x.nbytes / (perf_counter() - start)


# Training: a step of the optimizer on random tokens.


def train_ours(overrides: list[str]) -> Competitor:
    settings, device = bench_settings(overrides)
    batch_tokens = settings["batch_tokens"]
    vocab_size = settings["model"]["vocab_size"]
    # Random tokens are as fast as text.
    tokens = np.random.default_rng(0).integers(0, vocab_size, 100 * batch_tokens).astype(np.uint32)
    context = settings["context"]
    loader = Loader([tokens], context=context, batch_size=batch_tokens // context, seed=0)
    corpus = Corpus([tokens], [tokens[:1000]], 1, None, "")
    precision = hardware.pick_precision(settings["precision"], device)
    trainer = Trainer(
        settings,
        corpus,
        loader,
        Path(os.devnull),
        DistEnv(0, 1, device),
        precision,
        Signals(),
        perf_counter(),
    )
    if settings["compile"] is not False:
        trainer.compile()

    return Competitor(trainer.train_step, training_work(settings), device)


def train_transformers(overrides: list[str]) -> Competitor:
    """Llama with torch's fused AdamW, autocast and torch.compile of the whole model."""
    settings, device = bench_settings(overrides)
    batch_size = settings["batch_tokens"] // settings["context"]
    model = transformers_llama(settings).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    forward = model if settings["compile"] is False else torch.compile(model)
    precision = hardware.pick_precision(settings["precision"], device)
    shape = (batch_size, settings["context"])
    tokens = torch.randint(0, settings["model"]["vocab_size"], shape, device=device)

    # One optimizer step over the micro-batches, with the gradient of the mean over the batch.
    def step() -> None:
        for part in tokens.split(settings["micro_batch"]):
            with hardware.autocast(device, precision):
                loss = forward(input_ids=part, labels=part, use_cache=False).loss
            (loss * len(part) / batch_size).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Competitor(step, training_work(settings), device)


def training_work(settings: dict) -> dict[str, float]:
    with torch.device("meta"):
        flops_per_token = instantiate(settings["model"]).training_flops()
    tokens = settings["batch_tokens"]
    return {"tokens": tokens, "flops": tokens * flops_per_token}


# Decoding: NEW_TOKENS greedy tokens after random prompts, with the same random weights.


def decode_ours(overrides: list[str]) -> Competitor:
    settings, device = bench_settings(overrides)
    reference, prompts = decoding_case(settings, device)
    dtype = reference.dtype
    model = materialize(build_model(settings["model"]), device, dtype)

    # Load the weights under our names.
    weights = reference.state_dict()
    stored = weight_map(model, "LlamaForCausalLM")
    parameters = {}
    for name, tensor in stored.items():
        parameters |= tensor.from_file(weights[name])
    model.load_state_dict(parameters)

    # As generate.py does: products for few rows, and a compiled step.
    quantize.load_matvec(ROOT / ".cache", compilation.cpp_compiler())
    quantize.optimize_for_decoding(model, int8=False)
    step = decode_step if settings["compile"] is False else compile_decode_step(device)
    cache = model.new_cache(len(prompts), settings["context"] - 1, dtype, device)

    def run() -> dict:
        first, rest, tokens = timed(model, prompts.tolist(), NEW_TOKENS, cache, step)
        return {
            "seconds": rest,
            "first_token_seconds": first,
            "cache_bytes": cache.nbytes,
            "tokens": tokens,
        }

    return Competitor(run, decoding_work(settings, reference, prompts), device)


def decode_transformers(cache_kind: str, overrides: list[str]) -> Competitor:
    """`generate` with a dynamic cache, a static one, or a static one and a compiled forward."""
    from transformers import DynamicCache, StaticCache

    settings, device = bench_settings(overrides)
    model, prompts = decoding_case(settings, device)
    if cache_kind == "compiled":
        model.forward = torch.compile(model.forward, dynamic=False)
    # When each token came; a stopping criterion that never stops is called after each.
    times = []

    def record_time(ids: Tensor, *_) -> Tensor:
        times.append(perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=device)

    def run() -> dict:
        times.clear()
        start = perf_counter()
        if cache_kind == "dynamic":
            cache = DynamicCache(config=model.config)
        else:
            cache = StaticCache(config=model.config, max_cache_len=settings["context"] - 1)
        tokens = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            past_key_values=cache,
            pad_token_id=0,
            stopping_criteria=[record_time],
        )
        tokens = tokens.tolist()  # waits for a GPU
        end = perf_counter()
        return {
            "seconds": end - times[0],
            "first_token_seconds": times[0] - start,
            "cache_bytes": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers),
            "tokens": tokens,
        }

    return Competitor(run, decoding_work(settings, model, prompts), device)


def decoding_case(settings: dict, device: torch.device) -> tuple[nn.Module, Tensor]:
    """A Llama of `transformers` with random weights, and prompts (B, T)."""
    torch.manual_seed(0)
    dtype = hardware.pick_precision(settings["precision"], device)
    model = transformers_llama(settings).to(device, dtype)
    # Random matrices, and norms of ones.
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.05)
        else:
            nn.init.ones_(p)
    context = settings["context"]
    shape = (settings["batch_tokens"] // context, context - 1 - NEW_TOKENS)
    prompts = torch.randint(settings["model"]["vocab_size"], shape, device=device)
    return model.eval(), prompts


def decoding_work(settings: dict, model: nn.Module, prompts: Tensor) -> dict[str, float]:
    """Tokens after the first, and the bytes of weights and cache that are read for them."""
    tree = settings["model"]
    rows, prompt_length = prompts.shape
    weight_bytes = sum(p.nbytes for p in model.parameters())
    if not tree["tied"]:  # of the embedding, only some rows are read
        weight_bytes -= model.lm_head.weight.nbytes
    kv_dim = tree["attention"]["kv_heads"] * tree["dim"] // tree["heads"]
    token_bytes = 2 * tree["depth"] * kv_dim * model.dtype.itemsize
    cache_bytes = rows * token_bytes * (prompt_length + NEW_TOKENS / 2)  # at the middle step
    num_steps = NEW_TOKENS - 1
    bytes_read = num_steps * (weight_bytes + cache_bytes)
    return {"tokens": rows * num_steps, "bytes_read": bytes_read}


# What both have in common.


def transformers_llama(settings: dict) -> nn.Module:
    """LlamaForCausalLM of the same shape, with its own initial weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with errors.user_input():
        config = mapping.to_hf_config(settings["model"])
    if config["model_type"] != "llama" or settings["document_mask"]:
        problem = "LlamaForCausalLM has another shape"
        errors.exit_with(errors.INPUT, f"{problem}. fix: attention=llama, and nothing else of ours")
    return LlamaForCausalLM(LlamaConfig(**config, bos_token_id=None, eos_token_id=None))


def bench_settings(overrides: list[str]) -> tuple[dict, torch.device]:
    settings = load_settings(
        compose(["name=bench", "max_minutes=null", "steps=1000000", *overrides])
    )
    with errors.user_input():
        return settings, hardware.pick_device(settings["device"])


COMPETITORS = {
    "train": {"ours": train_ours, "transformers": train_transformers},
    "decode": {
        "ours": decode_ours,
        "dynamic": partial(decode_transformers, "dynamic"),
        "static": partial(decode_transformers, "static"),
        "compiled": partial(decode_transformers, "compiled"),
    },
}

if __name__ == "__main__":
    with report_errors():
        main(sys.argv[1:])
