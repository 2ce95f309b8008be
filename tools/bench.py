"""How fast this is beside what others have, on this machine:

python -m tools.bench train model=15m attention=llama optimizer=adamw   a step, and one of `transformers`' Llama
python -m tools.bench data data=stdlib                                  tokenising, and SentencePiece alone

The words are those of train.py. Competitors are processes that live side by side and work in turns; what comes out are
JSON lines.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from data.loader import Loader
from data.prepare import Corpus, sample, tokenised
from data.tokenizer import Tokenizer
from model.build import ROOT, build
from train import checked
from training import errors, hardware
from training.distributed import Ranks
from training.signals import Signals
from training.trainer import Trainer

ROUNDS, PRODUCTS = 8, 20  # turns of each competitor; matrix products in all, the best of which is the ceiling
Competitor = tuple[Callable[[], object], dict[str, float], torch.device]  # a step, what it does, where


def main(words: list[str]) -> None:
    match words:
        case [kind, *rest] if kind in KINDS:
            compare(KINDS[kind], rest)
        case ["as", name, *rest] if name in COMPETITORS:
            compete(*COMPETITORS[name](rest))
        case _:
            problem = f"nothing to measure (got {' '.join(words) or 'no words'})"
            errors.fail(errors.INPUT, f"{problem}. fix: python -m tools.bench {' or '.join(KINDS)}")


def compare(names: list[str], words: list[str]) -> None:
    """Prints a line for each competitor, and one of ratios, the first to the second."""
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
            turn = json.loads(process.stdout.readline() or errors.fail(errors.BUG, f"{name} ended. fix: see above"))
            turns[name].append(turn)
            print(f"turn {number} of {ROUNDS}: {name} {turn['seconds']:.3f} s", file=sys.stderr)
    for process in running.values():
        process.communicate()
    lines = [summary(name, each) for name, each in turns.items()]
    pairs = list(zip(*turns.values(), strict=True))[1:]
    speed = statistics.median(theirs["seconds"] / ours["seconds"] for ours, theirs in pairs)
    memory = lines[0]["peak_memory_bytes"] / lines[1]["peak_memory_bytes"]
    for line in (*lines, {"speed": round(speed, 3), "peak_memory": round(memory, 3)}):
        print(json.dumps(line))


def summary(name: str, turns: list[dict]) -> dict:
    seconds = statistics.median(turn["seconds"] for turn in turns[1:])
    done = {f"{what}_per_second": round(much / seconds) for what, much in turns[0]["work"].items()}
    ceiling = max(turn["ceiling"] for turn in turns)
    if ceiling:
        done["mfu"] = round(turns[0]["work"]["flops"] / seconds / ceiling, 3)
    return {"name": name, **done, "peak_memory_bytes": turns[-1]["memory"], "first_seconds": turns[0]["seconds"]}


def compete(step: Callable[[], object], work: dict[str, float], device: torch.device) -> None:
    """Two steps when it is told to, by a line; the first time one, which compiles."""
    hardware.keep_freed_memory(device)
    for number, _ in enumerate(sys.stdin):
        steps, began = min(1 + number, 2), perf_counter()
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        turn = {"seconds": (perf_counter() - began) / steps, "work": work, "memory": hardware.peak_memory(device)}
        products = -(-PRODUCTS // ROUNDS) if "flops" in work else 0
        turn["ceiling"] = hardware.peak_flops(device) or max((product() for _ in range(products)), default=0.0)
        print(json.dumps(turn), flush=True)


def product() -> float:
    """FLOP/s of a product of 4096 x 4096 matrices in bf16, on a CPU."""
    a, b = (torch.randn(4096, 4096, dtype=torch.bfloat16) for _ in range(2))
    began = perf_counter()
    a @ b
    return 2 * 4096**3 / (perf_counter() - began)


def ours(words: list[str]) -> Competitor:
    settings, device = settings_of(words)
    batch, size = settings["batch_tokens"] // settings["context"], settings["model"]["vocab_size"]
    tokens = np.random.default_rng(0).integers(0, size, 100 * settings["batch_tokens"]).astype(np.uint32)
    loader = Loader([tokens], context=settings["context"], batch=batch, seed=0)
    precision = hardware.pick_precision(settings["precision"], device)
    corpus, nowhere = Corpus([tokens], [tokens[:1000]], 1, None, ""), Path(os.devnull)
    trainer = Trainer(settings, corpus, loader, nowhere, Ranks(0, 1, device), precision, Signals(), perf_counter())
    if settings["compile"] is not False:
        trainer.compile()
    return trainer.optimize, done(settings), device


def transformers(words: list[str]) -> Competitor:
    """Torch's fused AdamW, autocast and torch.compile of the whole, as its users have it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings, device = settings_of(words)
    shape, context, batch = settings["model"], settings["context"], settings["batch_tokens"] // settings["context"]
    llama = shape["_target_"] == "model.transformer.Transformer" and shape["softcap"] is None
    if not llama or shape["attention"].get("qk_norm", "") is not None or settings["document_mask"]:
        errors.fail(errors.INPUT, "LlamaForCausalLM has another shape. fix: attention=llama, and nothing else of ours")
    config = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["dim"],
        intermediate_size=shape["hidden"],
        num_hidden_layers=shape["depth"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["attention"]["kv_heads"],
        max_position_embeddings=context,
        tie_word_embeddings=shape["tied"],
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    forward = model if settings["compile"] is False else torch.compile(model)
    precision = hardware.pick_precision(settings["precision"], device)
    tokens = torch.randint(0, shape["vocab_size"], (batch, context), device=device)

    def step() -> None:
        for part in tokens.split(settings["micro_batch"]):
            with hardware.autocast(device, precision):
                loss = forward(input_ids=part, labels=part, use_cache=False).loss
            (loss * len(part) / batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, done(settings), device


def done(settings: dict) -> dict[str, float]:
    with torch.device("meta"):
        flops = build(settings["model"]).training_flops()
    return {"tokens": settings["batch_tokens"], "flops": settings["batch_tokens"] * flops}


def our_tokens(words: list[str]) -> Competitor:
    tokenizer, texts, size = text_of(words)
    documents = [(text, False) for text in texts]
    return lambda: sum(len(tokens) for tokens, *_ in tokenised(documents, tokenizer)), size, torch.device("cpu")


def sentencepiece(words: list[str]) -> Competitor:
    """Its own threads, as many as there are cores, over a list of documents."""
    tokenizer, texts, size = text_of(words)
    threads = torch.get_num_threads()
    return lambda: tokenizer.pieces.encode(texts, num_threads=threads), size, torch.device("cpu")


def text_of(words: list[str]) -> tuple[Tokenizer, list[str], dict[str, int]]:
    settings, _ = settings_of(words)
    source = build(settings["data"], "data")
    tokenizer = Tokenizer.train(sample(source), source.vocab_size)
    texts = [text for text, _ in islice(source.documents(), 20_000)]
    return tokenizer, texts, {"bytes": sum(len(text.encode()) for text in texts)}


def settings_of(words: list[str]) -> tuple[dict, torch.device]:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        settings = checked(compose("train", ["name=bench", "max_minutes=null", "steps=1000000", *words]))
    return settings, hardware.pick_device(settings["device"])


COMPETITORS = {function.__name__: function for function in (ours, transformers, our_tokens, sentencepiece)}
KINDS = {"train": ["ours", "transformers"], "data": ["our_tokens", "sentencepiece"]}

if __name__ == "__main__":
    with errors.one_line(HydraException, OmegaConfBaseException):
        main(sys.argv[1:])
