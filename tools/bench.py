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
import subprocess
import sys
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn

from data.corpus import Corpus
from data.loader import Loader
from inference import quantize
from inference.batch import new_sampler_state
from inference.engine import compile_decode_step, decode_step
from model.build import build_model, materialize
from run import compilation, errors, hardware
from run.config import compose, micro_batch_size, report_errors, sequences_per_process
from run.distributed import DistEnv
from run.instantiate import ROOT
from run.signals import Signals
from tools import roofline
from tools.formats import hf_config
from tools.formats.weights import weight_map
from tools.latency import time_generation
from training.setup import load_settings
from training.trainer import Trainer

NUM_TURNS = 8  # of each competitor, after one that compiles
NUM_PROBES = 4  # measurements of the machine's ceiling in a turn; the best of all turns counts
DECODE_CASES = ((1, 256), (8, 256), (1, 2048), (8, 2048))  # rows, and length of each at the end
NEW_TOKENS = 255  # generated in each row, after a random prompt
UTILIZATION = {"flops": "mfu", "bytes_read": "bandwidth_share"}  # fractions of the peak rate

# Trains for a step, or decodes all tokens and returns what it measured.
Step = Callable[[], dict | None]


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
            take_turns(kind, name, overrides)
        case _:
            errors.exit_with(
                errors.INPUT,
                f"nothing to measure (got {' '.join(args) or 'no arguments'}). "
                "fix: python -m tools.bench train or decode",
            )


# The parent: starts the competitors, gives them turns, and prints what they measured.


def compare(kind: str, overrides: list[str], case: dict[str, int]) -> None:
    """Prints a line for each competitor, and the ratios of ours to the best of the others."""
    settings, device, precision = bench_settings(overrides)  # ends here where they are wrong
    work = work_of_step(kind, settings, precision)
    # Let all build their models at the same time, and then work one at a time, for a fair share.
    processes = {name: start_worker(kind, name, overrides) for name in COMPETITORS[kind]}
    turns = {name: [] for name in processes}
    for number in range(NUM_TURNS + 1):
        for name, process in processes.items():
            turn = request_turn(name, process)
            turns[name].append(turn)
            print(f"turn {number} of {NUM_TURNS}: {name} {turn['seconds']:.3f} s", file=sys.stderr)
    for process in processes.values():
        process.communicate()

    # Within a turn all meet the same machine, so the ratio of speeds is the median over turns.
    ours, *others = [summarize(name, turns[name], work) for name in turns]
    if kind == "train" and device.type == "cpu":
        ceiling = max(turn["ceiling"] for turn in turns["ours"])
        ours["predicted_seconds"] = predicted_seconds(settings, ceiling)
    best = min(others, key=lambda line: line["seconds"])
    pairs = zip(turns["ours"][1:], turns[best["name"]][1:], strict=True)
    ratios = {
        "speed": median(theirs["seconds"] / our["seconds"] for our, theirs in pairs),
        "peak_memory": ours["peak_memory_bytes"] / best["peak_memory_bytes"],
    }
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
    print(file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        errors.exit_with(errors.BUG, f"{name} ended. fix: see above")
    return json.loads(line)


def summarize(name: str, turns: list[dict], work: dict[str, float]) -> dict:
    """Medians of all turns but the first, which compiles, and the rates that follow from them."""
    first, *timed_turns = turns
    line = {"name": name}
    for key in ("seconds", "first_token_seconds"):
        if key in first:
            line[key] = median(turn[key] for turn in timed_turns)

    # Rates, and how near they come to the machine's: FLOP/s in training, bytes/s in decoding.
    ceiling = max(turn["ceiling"] for turn in turns)
    for unit, amount in work.items():
        rate = amount / line["seconds"]
        line[f"{unit}_per_second"] = rate
        if unit in UTILIZATION:
            line[UTILIZATION[unit]] = rate / ceiling

    return line | {
        "peak_memory_bytes": turns[-1]["memory"],
        "cold_seconds": first.get("first_token_seconds", first["seconds"]),
        "cache_bytes": first.get("cache_bytes"),
    }


def work_of_step(kind: str, settings: dict, precision: torch.dtype) -> dict[str, float]:
    """What a step does: the tokens that it learns or makes, and FLOPs or bytes that it takes.

    Decoding makes all tokens but the first, and reads weights and cache for each.
    """
    tokens = settings["batch_tokens"]
    model = build_model(settings["model"])
    if kind == "train":
        return {"tokens": tokens, "flops": tokens * model.training_flops()}

    # The cache at the middle step.
    rows = sequences_per_process(settings, 1)
    token_bytes = model.cache_bytes(2, precision) - model.cache_bytes(1, precision)
    cache_bytes = rows * token_bytes * (settings["context"] - 1 - NEW_TOKENS / 2)
    num_steps = NEW_TOKENS - 1
    bytes_read = num_steps * (roofline.decoded_weights(model) * precision.itemsize + cache_bytes)
    return {"tokens": rows * num_steps, "bytes_read": bytes_read}


def predicted_seconds(settings: dict, flops_per_second: float) -> float:
    """What tools.cost --gpu would predict of a step on this CPU, from its measured rates."""
    model = build_model(settings["model"])
    machine = roofline.cpu_machine(flops_per_second, read_bandwidth(torch.device("cpu")))
    sequences = micro_batch_size(settings, 1)
    parts = roofline.step_seconds(machine, model, sequences, settings["batch_tokens"])
    return sum(parts.values())


# The worker: one competitor in a process of its own.


def take_turns(kind: str, name: str, overrides: list[str]) -> None:
    """For each line of standard input, times some steps and prints what was measured as JSON."""
    settings, device, precision = bench_settings(overrides)
    step = COMPETITORS[kind][name](settings, device, precision)
    if kind == "train":
        hardware.prepare_for_training(device)
    else:
        hardware.keep_freed_memory(device)
    compilation.use_cache()
    for number, _ in enumerate(sys.stdin):
        if kind == "decode":
            turn = step()
        else:
            # Time two steps of training at once, but only one in the first turn, which compiles.
            turn = {"seconds": time_steps(step, 1 if number == 0 else 2, device)}
        # Memory is read before the probes of the machine's rate, which take some too.
        turn["memory"] = hardware.peak_memory(device)
        turn["ceiling"] = peak_rate(kind, device)
        print(json.dumps(turn), flush=True)


def time_steps(step: Step, num_steps: int, device: torch.device) -> float:
    """Measures the seconds of a step, as the mean of `num_steps`."""
    start = perf_counter()
    for _ in range(num_steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (perf_counter() - start) / num_steps


def peak_rate(kind: str, device: torch.device) -> float:
    """FLOP/s for training, known for a GPU and measured on a CPU; bytes/s for decoding."""
    if kind == "train":
        return hardware.peak_flops(device) or matmul_flops()
    return read_bandwidth(device)


def matmul_flops(size: int = 4096) -> float:
    """Measures FLOP/s of a product of square matrices in bf16, on a CPU."""
    x = torch.randn(size, size, dtype=torch.bfloat16)
    return 2 * size**3 / min(timeit.repeat(lambda: x @ x, number=1, repeat=NUM_PROBES))


def read_bandwidth(device: torch.device) -> float:
    """Measures bytes/s at which numbers are read and summed."""
    x = torch.ones(2**28 if device.type == "cuda" else 2**26, device=device)
    return x.nbytes / min(timeit.repeat(lambda: x.sum().item(), number=1, repeat=NUM_PROBES))


# Training: a step of the optimizer on random tokens.


def train_ours(settings: dict, device: torch.device, precision: torch.dtype) -> Step:
    # Random tokens are as fast as text.
    tokens = random_tokens(settings, 100 * settings["context"], torch.device("cpu"))
    shards = [tokens.flatten().numpy().astype(np.uint32)]
    batch_size = sequences_per_process(settings, 1)
    trainer = Trainer(
        settings,
        Corpus(shards, shards, 1, None, ""),
        Loader(shards, context=settings["context"], batch_size=batch_size, seed=0),
        Path(os.devnull),
        DistEnv(0, 1, device),
        precision,
        Signals(),
        perf_counter(),
    )
    if settings["compile"] is not False:
        trainer.compile()
    return trainer.train_step


def train_transformers(settings: dict, device: torch.device, precision: torch.dtype) -> Step:
    """Llama with torch's fused AdamW, autocast and torch.compile of the whole model."""
    model = transformers_llama(settings).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    forward = model if settings["compile"] is False else torch.compile(model)
    tokens = random_tokens(settings, settings["context"], device)

    # One optimizer step over the micro-batches, with the gradient of the mean over the batch.
    def step() -> None:
        for part in tokens.split(micro_batch_size(settings, 1)):
            with hardware.autocast(device, precision):
                loss = forward(input_ids=part, labels=part, use_cache=False).loss
            (loss * len(part) / len(tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# Decoding: NEW_TOKENS greedy tokens after random prompts, with the same random weights.


def decode_ours(settings: dict, device: torch.device, precision: torch.dtype) -> Step:
    reference, prompts = decoding_case(settings, device, precision)
    model = materialize(build_model(settings["model"]), device, precision)

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
    cache = model.new_cache(len(prompts), settings["context"] - 1, precision, device)
    state = new_sampler_state(model, len(prompts))

    def run() -> dict:
        first, rest, tokens = time_generation(
            model, prompts.tolist(), NEW_TOKENS, cache, state, step
        )
        return {
            "seconds": rest,
            "first_token_seconds": first,
            "cache_bytes": cache.nbytes,
            "tokens": tokens,
        }

    return run


def decode_transformers(
    cache_kind: str, settings: dict, device: torch.device, precision: torch.dtype
) -> Step:
    """`generate` with a dynamic cache, a static one, or a static one and a compiled forward."""
    from transformers import DynamicCache, StaticCache

    model, prompts = decoding_case(settings, device, precision)
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

    return run


def decoding_case(
    settings: dict, device: torch.device, precision: torch.dtype
) -> tuple[nn.Module, Tensor]:
    """A Llama of `transformers` with random weights, and prompts (B, T)."""
    torch.manual_seed(0)
    model = transformers_llama(settings).to(device, precision)
    return model.eval(), random_tokens(settings, settings["context"] - 1 - NEW_TOKENS, device)


# What both have in common.


def random_tokens(settings: dict, length: int, device: torch.device) -> Tensor:
    """Tokens (B, T): as many rows as a batch has, each of this length."""
    shape = (sequences_per_process(settings, 1), length)
    return torch.randint(settings["model"]["vocab_size"], shape, device=device)


def transformers_llama(settings: dict) -> nn.Module:
    """LlamaForCausalLM of the same shape, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with errors.user_input():
        config = hf_config.to_hf_config(settings["model"])
        if config["model_type"] != "llama" or settings["document_mask"]:
            raise ValueError(
                "LlamaForCausalLM has another shape. fix: attention=llama, and nothing else of ours"
            )
    # Of weights this large, few logits are nearly equal.
    config |= {"initializer_range": 0.05, "bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**config))


def bench_settings(overrides: list[str]) -> tuple[dict, torch.device, torch.dtype]:
    """Settings, device and the dtype of matrix products. Ends with exit code 2."""
    settings = load_settings(
        compose(["name=bench", "max_minutes=null", "steps=1000000", "micro_batch=8", *overrides])
    )
    with errors.user_input():
        device = hardware.pick_device(settings["device"])
        return settings, device, hardware.pick_precision(settings["precision"], device)


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
