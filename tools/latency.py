"""Measure how long trained models take to decode with a cache."""

from collections import defaultdict
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from inference.batch import Sequence
from inference.engine import Engine
from inference.load import load
from inference.sampling import sample
from model.transformer import Transformer
from run import compilation, hardware

NEW_TOKENS = 32  # that each sequence generates
TURNS = 3  # of each model, and runs in each turn
greedy = partial(sample, temperature=0)


def latencies(runs: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Map names of runs to medians in ms of decoding at full context, by what was measured.

    Models are loaded as generate.py loads them. On a CPU they take turns, so that a machine that
    slows down does so for all of them. On a GPU the decode step is compiled.
    """
    # Compiling takes long, so on a GPU each model has a single turn.
    device = hardware.pick_device("auto")
    is_compiled = device.type == "cuda" and compilation.missing_for_compilation(device) is None
    num_turns = TURNS
    if is_compiled:
        compilation.use_cache()
        num_turns = 1

    measured = defaultdict(list)  # by model and number of rows: (first, next) in s
    for _ in range(num_turns):
        for name, run in runs.items():
            model, *_ = load(run)
            for num_rows in (1, 8):
                measured[name, num_rows] += times(model, num_rows, is_compiled)

    medians = {}
    for name in runs:
        first, following = 1e3 * np.median(measured[name, 1], axis=0)
        _, following_of_8 = 1e3 * np.median(measured[name, 8], axis=0)
        medians[name] = {
            "decoding, ms/token": following,
            "8 rows, ms/token": following_of_8,
            "first token, ms": first,
        }
    return medians


def times(model: Transformer, num_rows: int, is_compiled: bool) -> list[tuple[float, float]]:
    """Measure several runs in s: to the first token, and from one to the next; after a warm-up."""
    weight = model.embed.weight
    num_new = min(NEW_TOKENS, model.context // 2)
    prompts = torch.randint(len(weight), (num_rows, model.context - num_new)).tolist()
    cache = model.new_cache(num_rows, model.context, weight.dtype, weight.device)
    engine = Engine(model, greedy, cache)
    if is_compiled:
        torch.compiler.reset()
        engine.compile()

    # The first run warms up and does not count.
    measured = []
    for _ in range(1 + TURNS):
        first, rest, _ = time_generation(engine, prompts, num_new)
        measured.append((first, rest / (num_new - 1)))
    return measured[1:]


def time_generation(
    engine: Engine, prompts: list[list[int]], num_new: int
) -> tuple[float, float, list[list[int]]]:
    """Continue all prompts together.

    Returns the seconds to the first token of all, those of the other tokens, and all tokens.
    """
    sequences = [Sequence([*prompt], num_new) for prompt in prompts]
    start = perf_counter()
    generated = engine.generate(sequences)
    # All sequences run in the batch, so the first len(sequences) tokens are their first ones.
    for _ in sequences:
        next(generated)
    first = perf_counter()
    for _ in generated:
        pass
    return first - start, perf_counter() - first, [sequence.tokens for sequence in sequences]
