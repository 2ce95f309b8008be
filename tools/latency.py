"""What cached decoding with trained models takes."""

from argparse import Namespace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from common import compilation
from inference.engine import Sequence, Step, compile_decode_step, decode_step, generate
from inference.load import load
from inference.sampling import sample
from model.cache import Cache
from model.transformer import Transformer

ROWS, NEW, TURNS = (
    (1, 8),
    32,
    3,
)  # rows that are decoded together; tokens that each draws; turns, and runs in a turn
greedy = partial(sample, temperature=0)


def latencies(
    runs: dict[str, Path], context: int, device: torch.device
) -> dict[str, dict[str, tuple[float, float]]]:
    """By name of the model and by case: ms until the first token, and ms from each to the next. Medians.

    A case is so many rows that end at so many tokens. On a CPU models take turns; on a GPU steps are compiled.
    """
    compiles = device.type == "cuda" and compilation.missing_for_compilation(device) is None
    if compiles:
        compilation.use_cache()
    cases = [(rows, length) for rows in ROWS for length in (context // 4, context) if length >= 8]
    taken = {name: {f"{rows} x {length}": [] for rows, length in cases} for name in runs}
    for _ in range(1 if compiles else TURNS):
        for name, run in runs.items():
            model, *_ = load(Namespace(run=run, dtype="auto"), device)
            for rows, length in cases:
                taken[name][f"{rows} x {length}"] += times(model, rows, length, compiles)
    return {
        name: {
            case: tuple(1e3 * median(each) for each in zip(*pairs, strict=True))
            for case, pairs in found.items()
        }
        for name, found in taken.items()
    }


def times(model: Transformer, rows: int, length: int, compiles: bool) -> list[tuple[float, float]]:
    """Seconds until the first token and from one to the next, several times, after one that does not count."""
    weight, new = model.embed.weight, min(NEW, length // 2)
    prompts = torch.randint(
        len(weight), (rows, length - new), generator=torch.Generator().manual_seed(0)
    ).tolist()
    cache = model.new_cache(rows, length, weight.dtype, weight.device)
    if compiles:
        torch.compiler.reset()
    step, pairs = compile_decode_step(weight.device) if compiles else decode_step, []
    for _ in range(1 + TURNS):
        first, rest, _ = timed(model, prompts, new, cache, step)
        pairs.append((first, rest / (new - 1)))
    return pairs[1:]


def timed(model: Transformer, prompts: list[list[int]], new: int, cache: Cache, step: Step):
    """Continues all prompts at once, greedily: seconds to the first token of all and of the rest, and the tokens."""
    texts, began, first = [Sequence(prompt, new) for prompt in prompts], perf_counter(), 0.0
    for number, _ in enumerate(generate(model, texts, greedy, cache=cache, step=step), start=1):
        if number == len(texts):
            first = perf_counter()
    return first - began, perf_counter() - first, [text.tokens for text in texts]
