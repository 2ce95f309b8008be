"""Compare our training and decoding speed with `transformers` on this machine.

    python -m tools.bench train model=15m attention=llama optimizer=adamw
        one optimizer step, with our model and with the Llama model of `transformers`
    python -m tools.bench decode model=15m attention=llama precision=bf16
        greedy decoding of 1 and 8 rows of 256 and 2,048 tokens, with our model (in this precision
        and with int8 weights) and with `generate` of `transformers` (with its default cache, and
        compiled with a static cache)
    python -m tools.bench attention
        attention of a decode step on a CPU, with each kernel; takes a few minutes

`train` and `decode` take the overrides of train.py. For decoding, context and batch_tokens are
fixed. The competitors take turns, so that a temporary slowdown of the machine affects all of them;
each turn is a process that compiles and then measures. The first turn of a competitor may compile
for minutes; compile=false disables this, except for the compiled competitor in decoding. A JSON
line with the medians over the turns is printed for each competitor. Another line has the median,
over the turns, of our speed divided by the speed of `transformers` in its faster form.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn

from data.loader import Loader
from inference import quantize
from inference.engine import Engine
from model.build import build_model
from run import compilation, errors, hardware
from run.cli import Parser
from run.compose import compose
from run.distributed import Ranks
from run.paths import cache_folder
from run.progress import print0
from run.settings import Settings
from run.signals import Signals
from tools.attention_bench import compare_kernels
from tools.formats import hf_config
from tools.latency import greedy, time_generation
from training.clock import Clock
from training.environment import Environment
from training.memory import choose_micro_batch
from training.setup import check_buildable
from training.steps import Progress
from training.trainer import Trainer

NUM_TURNS = 4  # of each competitor
TURN_SECONDS = 5  # minimum time that a turn measures, after compiling
DECODE_CASES = ((1, 256), (8, 256), (1, 2048), (8, 2048))  # number of rows, their final length
NEW_TOKENS = 255  # generated in each row, after a random prompt

Measurements = dict[str, float]  # seconds or bytes, by name
Step = Callable[[], Measurements]  # trains for two steps, or decodes all tokens


def parse_arguments() -> argparse.Namespace:
    parser = Parser("python -m tools.bench", __doc__)
    add = parser.add_argument
    add("kind", choices=[*COMPETITORS, "attention"], help="what to measure")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of train.py")
    # Measure this competitor in this process; used by `start_turn`.
    add("--turn", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind == "attention" and args.overrides:
        parser.error(f"attention takes no overrides (got {args.overrides[0]})")
    return args


def main(args: argparse.Namespace) -> None:
    if args.kind == "attention":
        compare_kernels()
        return
    if args.turn is not None:
        print(json.dumps(take_turn(args.kind, args.turn, args.overrides)))
        return
    if args.kind == "train":
        compare("train", args.overrides, {})
    else:
        for rows, length in DECODE_CASES:
            context = length + 1
            sizes = [f"context={context}", f"batch_tokens={rows * context}"]
            compare("decode", [*args.overrides, *sizes], {"rows": rows, "length": length})
    print0("next: try another size or precision (see python -m tools.bench --help)")


def compare(kind: str, overrides: list[str], case: dict[str, int]) -> None:
    """Print a line for each competitor, and our speed divided by the speed of `transformers`."""
    settings, device, precision = bench_settings(overrides)  # exits if an override is wrong
    names = [*COMPETITORS[kind]]
    if compilation.missing_for_compilation(device) is not None and COMPILED in names:
        names.remove(COMPILED)
    turns = {name: [] for name in names}
    for number in range(1, NUM_TURNS + 1):
        for name in names:
            print0(f"{kind}, turn {number} of {NUM_TURNS}: {name}")
            turn = start_turn(kind, name, overrides)
            print0(f"    {turn['seconds']:.3f} s")
            turns[name].append(turn)

    # The decoding time covers all tokens but the first.
    num_rows = settings.sequences_per_process(1)
    tokens = settings.batch_tokens if kind == "train" else num_rows * (NEW_TOKENS - 1)
    training_flops = build_model(settings.model, "meta").training_flops()
    lines = {}
    for name in names:
        line = medians(turns[name])
        rate = tokens / line["seconds"]
        line["tokens_per_second"] = rate
        # The fractions of a GPU's peaks; null if the peaks are unknown, as for a CPU.
        if kind == "train":
            line["mfu"] = fraction(rate * training_flops, hardware.peak_flops(device))
        else:
            read = rate / num_rows * bytes_per_step(settings, precision, int8=name == OURS_INT8)
            line["share_of_bandwidth"] = fraction(read, hardware.peak_bandwidth(device))
        print(json.dumps(case | {"name": name} | line))
        lines[name] = line

    # The machine's load changes between turns, so divide speeds turn by turn; report the median.
    competitors = [name for name in names if not name.startswith("ours")]
    best = min(competitors, key=lambda name: lines[name]["seconds"])
    ratios = []
    for ours, theirs in zip(turns["ours"], turns[best], strict=True):
        ratios.append(theirs["seconds"] / ours["seconds"])
    print(json.dumps(case | {"speed": median(ratios), "of": best}))


def medians(measured: list[Measurements]) -> Measurements:
    return {name: median(each[name] for each in measured) for name in measured[0]}


def fraction(rate: float, peak: float | None) -> float | None:
    return None if peak is None else rate / peak


def bytes_per_step(settings: Settings, precision: torch.dtype, *, int8: bool) -> int:
    """Return the bytes of weights and cache that a decode step must read, averaged over steps."""
    model = build_model(settings.model, "meta", dtype=precision)
    if int8:
        quantize.optimize_for_decoding(model, int8=True)
    read = sum(weight.nbytes for weight in (*model.parameters(), *model.buffers()))
    # If the embedding is not also the head, a step reads only one of its vectors per row.
    if model.head is not None:
        read -= model.embed.weight.nbytes
    # The step that samples token i of NEW_TOKENS, for i > 1, reads a cache that contains the prompt
    # and the previous i - 1 of these tokens.
    mean_length = settings.context - 1 - NEW_TOKENS // 2
    num_rows = settings.sequences_per_process(1)
    return read + num_rows * model.cache_bytes(mean_length, precision)


# A turn: one competitor in a separate process.


def start_turn(kind: str, name: str, overrides: list[str]) -> Measurements:
    """Run `take_turn` in a new process, which prints its result on standard output."""
    command = [sys.executable, "-m", "tools.bench", kind, *overrides, "--turn", name]
    process = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8")
    if process.returncode != 0:
        errors.exit_with(errors.BUG, f"{name} failed: see the error above")
    return json.loads(process.stdout.splitlines()[-1])


def take_turn(kind: str, name: str, overrides: list[str]) -> Measurements:
    """Return a competitor's medians over TURN_SECONDS, and the peak memory of this process."""
    if kind == "decode":
        hardware.use_huge_pages()  # for all competitors
    settings, device, precision = bench_settings(overrides)
    if kind == "train":
        hardware.prepare_for_training(device)
    else:
        hardware.keep_freed_memory(device)
    compilation.prepare_to_compile()
    step = COMPETITORS[kind][name](settings, device, precision)

    # The first call, which may compile, does not count.
    step()
    measured = []
    start = perf_counter()
    while not measured or perf_counter() - start < TURN_SECONDS:
        measured.append(step())
    return medians(measured) | {"memory_bytes": hardware.peak_memory(device)}


def time_steps(train_step: Callable[[], None], device: torch.device) -> Step:
    """Return a function that runs two training steps and returns their mean time in seconds."""

    def step() -> Measurements:
        start = perf_counter()
        train_step()
        train_step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return {"seconds": (perf_counter() - start) / 2}

    return step


# Training: an optimizer step on random tokens.


def train_ours(settings: Settings, device: torch.device, precision: torch.dtype) -> Step:
    # Training takes the same time on random tokens as on text.
    tokens = random_tokens(settings, 100 * settings.context, torch.device("cpu"))
    shards = [tokens.flatten().numpy().astype(np.uint32)]
    batch_size = settings.sequences_per_process(1)
    loader = Loader(shards, context=settings.context, batch_size=batch_size, seed=0)
    is_compiled = compilation.pick_compile(settings.compile, device, is_long=True)
    ranks = Ranks(0, 1, device)
    env = Environment(settings, None, loader, None, ranks, Signals(), Clock(perf_counter()))
    trainer = Trainer(env, is_compiled)
    micro_batch_size = choose_micro_batch(trainer, settings)
    progress = Progress()

    def train_step() -> None:
        trainer.step(progress, micro_batch_size)
        progress.step += 1

    return time_steps(train_step, device)


def train_transformers(settings: Settings, device: torch.device, precision: torch.dtype) -> Step:
    """Train Llama with fused AdamW, autocast and, if wanted, torch.compile of the whole model."""
    model = transformers_llama(settings).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    forward = model
    if compilation.pick_compile(settings.compile, device, is_long=True):
        forward = torch.compile(model)
    tokens = random_tokens(settings, settings.context, device)

    # One optimizer step over all micro-batches, with the gradient of the mean over the batch.
    def train_step() -> None:
        for part in tokens.split(settings.micro_batch_size(1)):
            with hardware.autocast(device, precision):
                loss = forward(input_ids=part, labels=part, use_cache=False).loss
            (loss * len(part) / len(tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return time_steps(train_step, device)


# Decoding: NEW_TOKENS greedy tokens after random prompts.


def decode_ours(
    settings: Settings, device: torch.device, precision: torch.dtype, *, int8: bool = False
) -> Step:
    # Initialize the weights. Otherwise, all pages of the untouched memory would be one physical
    # page, which fits into the processor's cache.
    model = build_model(settings.model, device, dtype=precision)
    model.eval()
    prompts = random_tokens(settings, settings.context - 1 - NEW_TOKENS, device)

    # As in generate.py, use matrix products that are fast for few tokens.
    quantize.load_matvec(cache_folder(), compilation.cpp_compiler())
    quantize.optimize_for_decoding(model, int8)
    cache = model.new_cache(len(prompts), settings.context - 1, precision, device)
    engine = Engine(model, greedy, cache)
    is_compiled = compilation.pick_compile(settings.compile, device, is_long=True)

    def run() -> Measurements:
        # Compile or capture in the first call, whose time is discarded.
        if is_compiled and engine.compiled_step is None:
            engine.compile()
        elif engine.can_capture:
            engine.capture()
        first, rest = time_generation(engine, prompts.tolist(), NEW_TOKENS)
        return {"seconds": rest, "first_token_seconds": first}

    return run


def decode_transformers(
    settings: Settings, device: torch.device, precision: torch.dtype, *, is_compiled: bool
) -> Step:
    """Run `generate` with its default cache, or with a static cache and a compiled forward."""
    from transformers import DynamicCache, StaticCache

    model = transformers_llama(settings).to(device, precision)
    model.eval()
    prompts = random_tokens(settings, settings.context - 1 - NEW_TOKENS, device)
    if is_compiled:
        model.forward = torch.compile(model.forward, dynamic=False)
    # The time of each token is recorded by a stopping criterion that never stops.
    times = []

    def record_time(ids: Tensor, *_) -> Tensor:
        if not times and device.type == "cuda":
            torch.cuda.synchronize()  # the GPU may still be computing the first token
        times.append(perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=device)

    def run() -> Measurements:
        times.clear()
        start = perf_counter()
        cache = DynamicCache(config=model.config)
        if is_compiled:
            cache = StaticCache(config=model.config, max_cache_len=settings.context - 1)
        tokens = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            past_key_values=cache,
            pad_token_id=0,
            stopping_criteria=[record_time],
        )
        tokens.tolist()  # waits for a GPU to finish
        end = perf_counter()
        # A generation that ended early would look too fast.
        assert tokens.shape == (len(prompts), prompts.shape[1] + NEW_TOKENS)
        assert len(times) == NEW_TOKENS
        return {"seconds": end - times[0], "first_token_seconds": times[0] - start}

    return run


# Shared by all competitors.


def random_tokens(settings: Settings, length: int, device: torch.device) -> Tensor:
    """Return random tokens (B, T): the rows of one batch, each of length T."""
    size = (settings.sequences_per_process(1), length)
    return torch.randint(settings.model["vocab_size"], size, device=device)


def transformers_llama(settings: Settings) -> nn.Module:
    """Return a LlamaForCausalLM of the same shape as our model, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    # Decoding must not end early.
    config = llama_config(settings) | {"bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**config))


def llama_config(settings: Settings) -> dict:
    """Return config.json. Raises ValueError for settings that LlamaForCausalLM cannot express."""
    config = hf_config.to_hf_config(settings.model)
    if config["model_type"] != "llama" or settings.document_mask:
        raise ValueError(
            "LlamaForCausalLM cannot express these settings. fix: attention=llama ffn=swiglu "
            "norm=rmsnorm document_mask=false, without attention.* overrides"
        )
    return config


def bench_settings(overrides: list[str]) -> tuple[Settings, torch.device, torch.dtype]:
    """Return settings, device and dtype of matrix products. Exits if an override is wrong."""
    with errors.exit_on_invalid_input():
        settings = compose(
            ["name=bench", "max_minutes=null", "steps=1000000", "micro_batch=8", *overrides]
        )
        check_buildable(settings)
        llama_config(settings)
        device = hardware.pick_device(settings.device)
        return settings, device, hardware.pick_precision(settings.precision, device)


# The competitors take turns in this order.
OURS_INT8 = "ours, int8"
COMPILED = "transformers, compiled"
COMPETITORS = {
    "train": {"ours": train_ours, "transformers": train_transformers},
    "decode": {
        "ours": decode_ours,
        OURS_INT8: partial(decode_ours, int8=True),
        "transformers": partial(decode_transformers, is_compiled=False),
        COMPILED: partial(decode_transformers, is_compiled=True),
    },
}

if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
