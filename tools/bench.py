"""How fast this is beside what others have, on this machine:

python -m tools.bench train model=15m attention=llama optimizer=adamw   a step, and one of `transformers`' Llama
python -m tools.bench data data=stdlib                                  tokenising, and SentencePiece alone
python -m tools.bench decode model=15m attention=llama precision=bf16   text, and `generate` of `transformers`

The words are those of train.py. Competitors are processes that live side by side and work in turns; what comes out are
JSON lines.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from checkpoints.huggingface import mapping
from checkpoints.weights import weight_map
from common import compilation, errors, hardware
from common.config import compose
from common.instantiate import ROOT, instantiate
from data.loader import Loader
from data.prepare import Corpus, tokenizer_corpus
from data.sources import tokenize_documents
from data.tokenizer import Tokenizer
from inference import quantize
from inference.engine import compile_decode_step, decode_step
from model.materialize import build_model, materialize
from tools.latency import timed
from training.distributed import DistEnv
from training.setup import validate
from training.signals import Signals
from training.trainer import Trainer

ROUNDS, PROBES = (
    8,
    20,
)  # turns of each competitor; probes of the machine in all, the best of which is the ceiling
CASES = (
    (1, 256),
    (8, 256),
    (1, 2048),
    (8, 2048),
)  # rows that are decoded together, tokens of each at its end
NEW = 255  # of them are drawn
Competitor = tuple[
    Callable[[], object], dict[str, float], torch.device
]  # a step, what it does, where


def main(words: list[str]) -> None:
    match words:
        case ["decode", *rest]:
            for rows, length in CASES:
                sizes = [f"context={length + 1}", f"batch_tokens={rows * (length + 1)}"]
                compare(DECODERS, [*sizes, *rest], rows=rows, length=length)
        case [kind, *rest] if kind in KINDS:
            compare(KINDS[kind], rest)
        case ["as", name, *rest] if name in COMPETITORS:
            compete(*COMPETITORS[name](rest))
        case _:
            problem = f"nothing to measure (got {' '.join(words) or 'no words'})"
            errors.exit_with(
                errors.INPUT,
                f"{problem}. fix: python -m tools.bench {' or '.join([*KINDS, 'decode'])}",
            )


def compare(names: list[str], words: list[str], **case: int) -> None:
    """Prints a line for each competitor, and one of ratios, the first to the best of the others."""
    settings_of(words)  # which may end here
    start = [sys.executable, "-m", "tools.bench", "as"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    pipes["env"] = os.environ | {"PYTHONPATH": str(ROOT)}
    running = {name: subprocess.Popen([*start, name, *words], **pipes) for name in names}
    turns = {name: [] for name in names}
    for number in range(ROUNDS + 1):  # the first compiles
        for name, process in running.items():
            process.stdin.write("\n")
            process.stdin.flush()
            turn = json.loads(
                process.stdout.readline()
                or errors.exit_with(errors.BUG, f"{name} ended. fix: see above")
            )
            turns[name].append(turn)
            print(f"turn {number} of {ROUNDS}: {name} {turn['seconds']:.3f} s", file=sys.stderr)
    for process in running.values():
        process.communicate()
    lines = [summary(name, each) for name, each in turns.items()]
    best = min(lines[1:], key=lambda line: line["seconds"])
    pairs = zip(turns[names[0]][1:], turns[best["name"]][1:], strict=True)
    ratios = {
        "speed": statistics.median(theirs["seconds"] / ours["seconds"] for ours, theirs in pairs)
    }
    ratios["peak_memory"] = lines[0]["peak_memory_bytes"] / best["peak_memory_bytes"]
    for line in (*lines, {name: round(ratio, 3) for name, ratio in ratios.items()}):
        print(json.dumps(case | line))


def summary(name: str, turns: list[dict]) -> dict:
    """Medians of all turns but the first, which compiles."""
    work, ceiling = turns[0]["work"], max(turn["ceiling"] or 0.0 for turn in turns)
    middle = {
        key: statistics.median(turn[key] for turn in turns[1:])
        for key in turns[0]
        if key.endswith("seconds")
    }
    rates = {f"{what}_per_second": round(much / middle["seconds"]) for what, much in work.items()}
    if ceiling:
        of_ceiling, what = (
            ("mfu", "flops") if "flops" in work else ("bandwidth_share", "bytes_read")
        )
        rates[of_ceiling] = round(work[what] / middle["seconds"] / ceiling, 3)
    rounded = {key: round(value, 4) for key, value in middle.items()}
    cold = turns[0].get("first_token_seconds", turns[0]["seconds"])
    first = {"cold_seconds": round(cold, 2), "cache_bytes": turns[0].get("cache_bytes")}
    return {"name": name, **rounded, **rates, "peak_memory_bytes": turns[-1]["memory"], **first}


def compete(step: Callable[[], object], work: dict[str, float], device: torch.device) -> None:
    """Two steps when it is told to, by a line; the first time, and where a step times itself, one."""
    hardware.keep_freed_memory(device)
    compilation.use_cache()
    for number, _ in enumerate(sys.stdin):
        steps, began = 1 if number == 0 or "bytes_read" in work else 2, perf_counter()
        for _ in range(steps):
            own = step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        turn = {
            "seconds": (perf_counter() - began) / steps,
            "work": work,
            "memory": hardware.peak_memory(device),
        }
        probe = (
            product
            if "flops" in work
            else partial(bandwidth, device)
            if "bytes_read" in work
            else None
        )
        turn["ceiling"] = hardware.peak_flops(device) if probe is product else None
        if probe is not None and turn["ceiling"] is None:
            turn["ceiling"] = max(probe() for _ in range(-(-PROBES // ROUNDS)))
        print(json.dumps(turn | (own if isinstance(own, dict) else {})), flush=True)


def bandwidth(device: torch.device) -> float:
    """Bytes/s at which numbers are read and summed."""
    x = torch.ones(2**28 if device.type == "cuda" else 2**26, device=device)
    x.sum().item()
    began = perf_counter()
    x.sum().item()
    return x.nbytes / (perf_counter() - began)


def product(size: int = 4096) -> float:
    """FLOP/s of a product of square matrices in bf16, on a CPU."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
    began = perf_counter()
    a @ b
    return 2 * size**3 / (perf_counter() - began)


def ours(words: list[str]) -> Competitor:
    settings, device = settings_of(words)
    batch, size = settings["batch_tokens"] // settings["context"], settings["model"]["vocab_size"]
    tokens = (
        np.random.default_rng(0).integers(0, size, 100 * settings["batch_tokens"]).astype(np.uint32)
    )
    loader = Loader([tokens], context=settings["context"], batch=batch, seed=0)
    precision = hardware.pick_precision(settings["precision"], device)
    corpus, nowhere = Corpus([tokens], [tokens[:1000]], 1, None, ""), Path(os.devnull)
    trainer = Trainer(
        settings,
        corpus,
        loader,
        nowhere,
        DistEnv(0, 1, device),
        precision,
        Signals(),
        perf_counter(),
    )
    if settings["compile"] is not False:
        trainer.compile()
    return trainer.train_step, done(settings), device


def transformers(words: list[str]) -> Competitor:
    """Torch's fused AdamW, autocast and torch.compile of the whole, as its users have it."""
    settings, device = settings_of(words)
    context, batch = settings["context"], settings["batch_tokens"] // settings["context"]
    model = llama(settings).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    forward = model if settings["compile"] is False else torch.compile(model)
    precision = hardware.pick_precision(settings["precision"], device)
    tokens = torch.randint(0, settings["model"]["vocab_size"], (batch, context), device=device)

    def step() -> None:
        for part in tokens.split(settings["micro_batch"]):
            with hardware.autocast(device, precision):
                loss = forward(input_ids=part, labels=part, use_cache=False).loss
            (loss * len(part) / batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, done(settings), device


def llama(settings: dict):
    """The same shape in `transformers`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with errors.user_input():
        config = mapping.to_hf_config(settings["model"])
    if config["model_type"] != "llama" or settings["document_mask"]:
        errors.exit_with(
            errors.INPUT,
            "LlamaForCausalLM has another shape. fix: attention=llama, and nothing else of ours",
        )
    return LlamaForCausalLM(LlamaConfig(**config, bos_token_id=None, eos_token_id=None))


def done(settings: dict) -> dict[str, float]:
    with torch.device("meta"):
        flops = instantiate(settings["model"]).training_flops()
    return {"tokens": settings["batch_tokens"], "flops": settings["batch_tokens"] * flops}


def our_tokens(words: list[str]) -> Competitor:
    tokenizer, texts, size = text_of(words)
    documents = [(text, False) for text in texts]
    return (
        lambda: sum(len(tokens) for tokens, *_ in tokenize_documents(documents, tokenizer)),
        size,
        torch.device("cpu"),
    )


def sentencepiece(words: list[str]) -> Competitor:
    """Its own threads, as many as there are cores, over a list of documents."""
    tokenizer, texts, size = text_of(words)
    threads = torch.get_num_threads()
    return lambda: tokenizer.processor.encode(texts, num_threads=threads), size, torch.device("cpu")


def text_of(words: list[str]) -> tuple[Tokenizer, list[str], dict[str, int]]:
    settings, _ = settings_of(words)
    source = instantiate(settings["data"], "data")
    tokenizer = Tokenizer.train(tokenizer_corpus(source), source.vocab_size)
    texts = [text for text, _ in islice(source.documents(), 20_000)]
    return tokenizer, texts, {"bytes": sum(len(text.encode()) for text in texts)}


def decoded_case(words: list[str]):
    """Settings, device, a model of `transformers`, prompts (B, T), and what drawing NEW tokens takes."""
    settings, device = settings_of(words)
    rows, prompt = settings["batch_tokens"] // settings["context"], settings["context"] - NEW - 1
    torch.manual_seed(0)
    dtype = hardware.pick_precision(settings["precision"], device)
    model = llama(settings).to(device, dtype)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05) if p.ndim > 1 else torch.nn.init.ones_(p)
    model.eval()
    prompts = torch.randint(settings["model"]["vocab_size"], (rows, prompt), device=device)
    shape = settings["model"]
    token = (
        2
        * shape["depth"]
        * shape["attention"]["kv_heads"]
        * shape["dim"]
        // shape["heads"]
        * dtype.itemsize
    )
    weights = sum(p.nbytes for p in model.parameters()) - (
        0 if shape["tied"] else model.lm_head.weight.nbytes
    )
    read = (NEW - 1) * (weights + rows * token * (prompt + NEW / 2))
    return settings, device, model, prompts, {"tokens": rows * (NEW - 1), "bytes_read": read}


def our_text(words: list[str]) -> Competitor:
    settings, device, theirs, prompts, work = decoded_case(words)
    model = materialize(build_model(settings["model"]), device, theirs.dtype)
    weights = theirs.state_dict()
    model.load_state_dict(
        {held.names[0]: weights[name] for name, held in weight_map(model, "Llama").items()}
    )
    quantize.load_matvec(ROOT / ".cache", compilation.cpp_compiler())
    quantize.optimize_for_decoding(model, int8=False)
    step = decode_step if settings["compile"] is False else compile_decode_step(device)
    cache = model.new_cache(len(prompts), settings["context"] - 1, theirs.dtype, device)

    def run() -> dict:
        first, rest, tokens = timed(model, prompts.tolist(), NEW, cache, step)
        return {
            "seconds": rest,
            "first_token_seconds": first,
            "cache_bytes": cache.nbytes,
            "tokens": tokens,
        }

    return run, work, device


def transformers_text(kind: str, words: list[str]) -> Competitor:
    from transformers import DynamicCache, StaticCache

    settings, device, model, prompts, work = decoded_case(words)
    if kind == "compiled":
        model.forward = torch.compile(model.forward, dynamic=False)

    def run() -> dict:
        ticks, kept = [perf_counter()], DynamicCache(config=model.config)
        if kind != "dynamic":
            kept = StaticCache(config=model.config, max_cache_len=settings["context"] - 1)
        tick = [
            lambda ids, *_: (
                ticks.append(perf_counter())
                or torch.zeros(len(ids), dtype=torch.bool, device=device)
            )
        ]
        options = {
            "do_sample": False,
            "max_new_tokens": NEW,
            "past_key_values": kept,
            "pad_token_id": 0,
        }
        drawn = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), **options, stopping_criteria=tick
        )
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers)
        drawn, ended = drawn.tolist(), perf_counter()
        measured = {"seconds": ended - ticks[1], "first_token_seconds": ticks[1] - ticks[0]}
        return measured | {"cache_bytes": held, "tokens": drawn}

    return run, work, device


def settings_of(words: list[str]) -> tuple[dict, torch.device]:
    settings, *_ = validate(compose(["name=bench", "max_minutes=null", "steps=1000000", *words]))
    with errors.user_input():
        return settings, hardware.pick_device(settings["device"])


KINDS = {"train": ["ours", "transformers"], "data": ["our_tokens", "sentencepiece"]}
DECODERS = ["our_text", "dynamic", "static", "compiled"]  # the others: caches of transformers
COMPETITORS = {
    function.__name__: function
    for function in (ours, transformers, our_tokens, sentencepiece, our_text)
}
COMPETITORS |= {kind: partial(transformers_text, kind) for kind in DECODERS[1:]}

if __name__ == "__main__":
    with errors.report_errors(HydraException, OmegaConfBaseException):
        main(sys.argv[1:])
