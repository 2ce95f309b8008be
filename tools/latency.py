"""What cached decoding with trained models takes."""

from argparse import Namespace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from generate import load
from model.cache import Cache
from model.generation import Step, Text, compiled_step, decode_step, generate
from model.sampling import sample
from model.transformer import Transformer
from training import hardware

ROWS, NEW, TURNS = (1, 8), 32, 5  # rows that are decoded together; tokens that each draws; turns of every model
greedy = partial(sample, temperature=0)


def latencies(runs: dict[str, Path], device: torch.device) -> dict[str, dict[str, tuple[float, float]]]:
    """By name of the model and by case: ms until the first token, and ms from each to the next. Medians.

    On a CPU models take turns; on a GPU each has its own, compiled. A case: so many rows that end at so many tokens.
    """
    models = {name: load(Namespace(run=run, dtype="auto"), device)[0] for name, run in runs.items()}
    compiles = device.type == "cuda" and hardware.lacks_for_compilation(device) is None
    rounds, turns = (1, TURNS) if compiles else (TURNS, 1)
    context, found = min(model.context for model in models.values()), {name: {} for name in models}
    for rows in ROWS:
        for length in dict.fromkeys((max(8, context // 4), context)):
            taken = {name: [] for name in models}
            for _ in range(rounds):
                for name, model in models.items():
                    taken[name] += times(model, rows, length, compiles, turns)
            for name, pairs in taken.items():
                found[name][f"{rows} x {length}"] = tuple(1e3 * median(each) for each in zip(*pairs, strict=True))
    return found


def times(model: Transformer, rows: int, length: int, compiles: bool, turns: int) -> list[tuple[float, float]]:
    """Seconds until the first token and from one to the next, `turns` times, after one that does not count."""
    weight, new = model.embed.weight, min(NEW, length // 2)
    prompts = torch.randint(len(weight), (rows, length - new), generator=torch.Generator().manual_seed(0)).tolist()
    cache = model.new_cache(rows, length, weight.dtype, weight.device)
    if compiles:
        torch.compiler.reset()
    step, pairs = compiled_step(weight.device) if compiles else decode_step, []
    for _ in range(1 + turns):
        first, rest, _ = timed(model, prompts, new, cache, step)
        pairs.append((first, rest / (new - 1)))
    return pairs[1:]


def timed(model: Transformer, prompts: list[list[int]], new: int, cache: Cache, step: Step):
    """Continues all prompts at once, greedily: seconds to the first token of all and of the rest, and the tokens."""
    texts, began, first = [Text(prompt, new) for prompt in prompts], perf_counter(), 0.0
    for number, _ in enumerate(generate(model, texts, greedy, cache=cache, step=step), start=1):
        if number == len(texts):
            first = perf_counter()
    return first - began, perf_counter() - first, [text.tokens for text in texts]
