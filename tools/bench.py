"""Compare our training and decoding speed with `transformers` on this machine.

    python -m tools.bench train model=15m attention=llama optimizer=adamw
        one optimizer step, with our model and with the Llama model of `transformers`
    python -m tools.bench decode model=15m attention=llama precision=bf16
        greedy decoding of 1 and 8 rows of 256 and 2,048 tokens, in this precision, in fp32 and
        with int8 weights, and `generate` of `transformers` with its default cache and compiled
    python -m tools.bench attention
        attention of a decode step on a CPU, with each kernel; takes a few minutes

It takes the overrides of train.py. For decoding, context and batch_tokens are fixed.
The competitors run in separate processes that take turns, so that a temporary slowdown of the
machine affects all of them. A JSON line with the medians is printed for each competitor, and the
last line has the median of the speed ratios of all turns. The first turn of each competitor
compiles, which may take minutes; compile=false disables compilation, except for the compiled
competitor in decoding.
"""

import argparse
import json
import multiprocessing
import signal
import timeit
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
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
from run.distributed import DistEnv
from run.paths import cache_folder
from run.progress import say
from run.settings import Settings
from run.signals import Signals
from tools.attention_bench import compare_kernels
from tools.formats import hf_config
from tools.latency import greedy, time_generation
from training.budget import planned_steps
from training.clock import Clock
from training.environment import Environment
from training.memory import choose_micro_batch
from training.setup import check_buildable
from training.steps import Progress
from training.trainer import Trainer

NUM_TURNS = 8  # of each competitor, after the turn that compiles
PROBE_SIZE = 2048  # width of the square matrices whose product measures peak FLOP/s
READ_PROBE_SIZE = 2**28  # number of bytes read to measure the memory bandwidth
NUM_PROBES = 4  # measurements of each kind per turn; the best over all turns counts
DECODE_CASES = ((1, 256), (8, 256), (1, 2048), (8, 2048))  # number of rows, their final length
NEW_TOKENS = 255  # generated in each row, after a random prompt

Seconds = dict[str, float]  # by measurement name
Step = Callable[[], Seconds]  # trains for one step, or decodes all tokens


def parse_arguments() -> argparse.Namespace:
    parser = Parser("python -m tools.bench", __doc__)
    add = parser.add_argument
    add("kind", choices=[*COMPETITORS, "attention"], help="what to measure")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of train.py")
    args = parser.parse_args()
    if args.kind == "attention" and args.overrides:
        parser.error(f"attention takes no overrides (got {args.overrides[0]})")
    return args


def main(args: argparse.Namespace) -> None:
    if args.kind == "attention":
        compare_kernels()
        return
    if args.kind == "train":
        compare("train", args.overrides, {})
    else:
        for rows, length in DECODE_CASES:
            context = length + 1
            sizes = [f"context={context}", f"batch_tokens={rows * context}"]
            compare("decode", [*args.overrides, *sizes], {"rows": rows, "length": length})
    say("next: try another size, attention or precision; python -m tools.bench --help")


# The parent process: starts the competitors, gives them turns, and prints their measurements.


def compare(kind: str, overrides: list[str], case: dict[str, int]) -> None:
    """Print a line for each competitor, and our speed divided by the fastest competitor's speed."""
    settings, device, precision = bench_settings(overrides)  # exits if an override is wrong
    # All workers build their models at the same time, then run one at a time for a fair timing.
    names = [*COMPETITORS[kind]]
    if compilation.missing_for_compilation(device) is not None and COMPILED in names:
        names.remove(COMPILED)
    if precision == torch.float32 and OURS_FP32 in names:
        names.remove(OURS_FP32)  # it equals "ours"
    workers = {name: start_worker(kind, name, overrides) for name in names}
    turns = {name: [] for name in workers}
    ceiling = 0.0  # FLOP/s of training, bytes/s of decoding
    advice = f"{kind}: the first turns compile, unless compile=false"
    say(advice)
    for number in range(NUM_TURNS + 1):
        for name, worker in workers.items():
            say(f"turn {number} of {NUM_TURNS}: {name}")
            turn = request_turn(name, worker)
            say(f"    {turn['seconds']:.3f} s")
            turns[name].append(turn)
        if kind == "train":
            ceiling = max(ceiling, measure_ceiling(device, precision))
        else:
            ceiling = max(ceiling, measure_bandwidth(device))
    for worker in workers.values():
        worker.close()

    # The first turn of each worker compiles and does not count.
    measured = {name: each[1:] for name, each in turns.items()}
    # The decoding time covers all tokens but the first.
    num_rows = settings.sequences_per_process(1)
    tokens = settings.batch_tokens
    if kind == "decode":
        tokens = num_rows * (NEW_TOKENS - 1)
    lines = {name: summarize(name, each, tokens) for name, each in measured.items()}
    model = build_model(settings.model, "meta")
    for name, line in lines.items():
        if kind == "decode":
            steps_share = line["tokens_per_second"] / num_rows / ceiling
            dtype = torch.float32 if name == OURS_FP32 else precision
            read = bytes_per_step(settings, dtype, int8=name == OURS_INT8)
            line["share_of_bandwidth"] = steps_share * read
        else:
            tokens_share = line["tokens_per_second"] / ceiling
            line["share_of_ceiling"] = tokens_share * model.training_flops()
            whole_flops = model.training_flops(whole_attention=True)
            line["share_whole_attention"] = tokens_share * whole_flops
        print(json.dumps(case | line))

    # The machine's load changes between turns, so compute ratios within turns, then the median.
    competitors = [name for name in lines if not name.startswith("ours")]
    best = min(competitors, key=lambda name: lines[name]["seconds"])
    ratios = []
    for ours, theirs in zip(measured["ours"], measured[best], strict=True):
        ratios.append(theirs["seconds"] / ours["seconds"])
    print(json.dumps(case | {"speed": median(ratios), "of": best}))


def start_worker(kind: str, name: str, overrides: list[str]) -> Connection:
    """Start a competitor's worker process, which ends no later than this process."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=take_turns, args=(theirs, kind, name, overrides), daemon=True)
    # Workers inherit the setting to ignore Ctrl-C. This process handles Ctrl-C and ends them.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.start()
    signal.signal(signal.SIGINT, handler)
    theirs.close()
    return ours


def request_turn(name: str, worker: Connection) -> dict:
    try:
        worker.send(None)
        return worker.recv()
    except (EOFError, OSError):
        errors.exit_with(errors.BUG, f"{name} failed. fix: see the error above")


def summarize(name: str, turns: list[dict], tokens: int) -> dict:
    """Return the medians over the turns, and the tokens per second computed from them."""
    line = {"name": name}
    for key in turns[0]:
        line[key] = median(turn[key] for turn in turns)
    line["tokens_per_second"] = tokens / line["seconds"]
    return line


def measure_ceiling(device: torch.device, precision: torch.dtype) -> float:
    """Return the FLOP/s of large matrix products, known for some GPUs and otherwise measured."""
    peak_flops = hardware.peak_flops(device)
    if peak_flops is not None:
        return peak_flops
    # If the CPU emulates bf16, a large bf16 product takes minutes, and fp32 is faster.
    if not hardware.multiplies_bf16(device):
        precision = torch.float32
    x = torch.randn(PROBE_SIZE, PROBE_SIZE, device=device).to(precision)
    # item() waits for a GPU to finish.
    seconds = min(timeit.repeat(lambda: (x @ x)[0, 0].item(), number=1, repeat=NUM_PROBES))
    return 2 * PROBE_SIZE**3 / seconds


def measure_bandwidth(device: torch.device) -> float:
    """Return the memory bandwidth in bytes/s, from a GPU's data sheet or measured with a sum."""
    bandwidth = hardware.peak_bandwidth(device)
    if bandwidth is not None:
        return bandwidth
    x = torch.ones(READ_PROBE_SIZE // 4, device=device)  # fp32
    # item() waits for a GPU to finish.
    seconds = min(timeit.repeat(lambda: x.sum().item(), number=1, repeat=NUM_PROBES))
    return x.nbytes / seconds


def bytes_per_step(settings: Settings, precision: torch.dtype, *, int8: bool) -> int:
    """Return the bytes of weights and cache that a decode step must read, averaged over steps."""
    model = build_model(settings.model, "meta", dtype=precision)
    if int8:
        quantize.optimize_for_decoding(model, int8=True)
    read = sum(weight.nbytes for weight in (*model.parameters(), *model.buffers()))
    # If the embedding is not also the head, a step reads only one of its vectors per row.
    if model.head is not None:
        read -= model.embed.weight.nbytes
    # The step that samples token i of NEW_TOKENS, for i > 1, reads a cache that contains the
    # previous i - 1 of these tokens.
    mean_length = settings.context - 1 - NEW_TOKENS // 2
    num_rows = settings.sequences_per_process(1)
    return read + num_rows * model.cache_bytes(mean_length, precision)


# The worker: one competitor in a separate process.


def take_turns(parent: Connection, kind: str, name: str, overrides: list[str]) -> None:
    """For each message from the parent, time some steps and send the measurements."""
    if kind == "decode":
        hardware.use_huge_pages()  # for all competitors
    settings, device, precision = bench_settings(overrides)
    if kind == "train":
        hardware.prepare_for_training(device)
    else:
        hardware.keep_freed_memory(device)
    compilation.prepare_to_compile()
    step = COMPETITORS[kind][name](settings, device, precision)
    with suppress(EOFError):  # the parent closed the connection
        while True:
            parent.recv()
            parent.send(step() | {"memory_bytes": hardware.peak_memory(device)})


def time_steps(train_step: Callable[[], None], device: torch.device) -> Step:
    """Return a function that runs two training steps and returns their mean time in seconds."""

    def step() -> Seconds:
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
    is_long = compilation.is_long_run(planned_steps(settings, loader), settings.max_minutes)
    is_compiled = compilation.pick_compile(settings.compile, device, is_long)
    ranks = DistEnv(0, 1, device)
    env = Environment(settings, None, loader, None, ranks, Signals(), Clock(perf_counter()))
    trainer = Trainer(env, is_compiled)
    micro_batch_size = choose_micro_batch(trainer, settings)
    progress = Progress()

    def train_step() -> None:
        trainer.step(progress, micro_batch_size)
        progress.step += 1

    return time_steps(train_step, device)


def train_transformers(settings: Settings, device: torch.device, precision: torch.dtype) -> Step:
    """Train Llama with torch's fused AdamW, autocast and torch.compile of the whole model."""
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

    # As in generate.py, use matrix products for few rows, and compile or capture the step.
    quantize.load_matvec(cache_folder(), compilation.cpp_compiler())
    quantize.optimize_for_decoding(model, int8)
    cache = model.new_cache(len(prompts), settings.context - 1, precision, device)
    engine = Engine(model, greedy, cache)
    is_compiled = compilation.pick_compile(settings.compile, device, is_long=True)

    def run() -> Seconds:
        # Compile or capture in the first turn, whose time is discarded.
        if is_compiled and engine.compiled_step is None:
            engine.compile()
        elif engine.can_capture:
            engine.capture()
        first, rest = time_generation(engine, prompts.tolist(), NEW_TOKENS)
        return {"seconds": rest, "first_token_seconds": first}

    return run


def decode_ours_in_fp32(settings: Settings, device: torch.device, precision: torch.dtype) -> Step:
    return decode_ours(settings, device, torch.float32)


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
            torch.cuda.synchronize()  # the GPU may still compute the first token
        times.append(perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=device)

    def run() -> Seconds:
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
    """Return the model's config.json. Raises ValueError unless it fits LlamaForCausalLM."""
    config = hf_config.to_hf_config(settings.model)
    if config["model_type"] != "llama" or settings.document_mask:
        raise ValueError(
            "LlamaForCausalLM cannot express this model. fix: attention=llama, without other "
            "overrides"
        )
    return config


def bench_settings(overrides: list[str]) -> tuple[Settings, torch.device, torch.dtype]:
    """Return settings, device and dtype of products. Exits with code 2 for a wrong override."""
    with errors.user_input():
        settings = compose(
            ["name=bench", "max_minutes=null", "steps=1000000", "micro_batch=8", *overrides]
        )
        check_buildable(settings)
        llama_config(settings)
        device = hardware.pick_device(settings.device)
        return settings, device, hardware.pick_precision(settings.precision, device)


# The competitors take turns in this order.
OURS_FP32 = "ours, fp32"
OURS_INT8 = "ours, int8"
COMPILED = "transformers, compiled"
COMPETITORS = {
    "train": {"ours": train_ours, "transformers": train_transformers},
    "decode": {
        "ours": decode_ours,
        OURS_FP32: decode_ours_in_fp32,
        OURS_INT8: partial(decode_ours, int8=True),
        "transformers": partial(decode_transformers, is_compiled=False),
        COMPILED: partial(decode_transformers, is_compiled=True),
    },
}

if __name__ == "__main__":
    with errors.report_errors():
        main(parse_arguments())
