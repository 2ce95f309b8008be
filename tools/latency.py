"""Measure the time that trained models need to decode with a cache."""

from collections import defaultdict
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from inference.batch import Sequence
from inference.engine import Engine
from inference.load import load
from inference.sampling import sample
from model.transformer import Transformer
from run.progress import print0

NEW_TOKENS = 32  # maximum number of tokens generated for each sequence
MIN_CONTEXT = 4  # room for two new tokens, so that there is a time between tokens
TURNS = 3  # number of turns per model, and of timed generations per turn
# Number of sequences that are decoded together, by column title.
ROWS = {"decoding, ms/token": 1, "8 rows, ms/token": 8}
greedy = partial(sample, temperature=0)


def latencies(runs: dict[Hashable, Path]) -> dict[Hashable, dict[str, float]]:
    """Map each run's key to its median ms per token at full context, by column title.

    Contexts must be at least MIN_CONTEXT. Models are loaded as in generate.py. They are not
    compiled, but their decode steps are captured as CUDA graphs on an NVIDIA GPU. They take turns,
    so that a slowdown of the machine affects all of them.
    """
    print0(f"measuring how fast {len(runs)} models decode")
    measured = {key: defaultdict(list) for key in runs}  # seconds by column title
    for _ in range(TURNS):
        for key, run in runs.items():
            model, _, _ = load(run)
            for title, num_rows in ROWS.items():
                measured[key][title] += seconds_per_token(model, num_rows)
    return {
        key: {title: 1e3 * median(seconds) for title, seconds in columns.items()}
        for key, columns in measured.items()
    }


def seconds_per_token(model: Transformer, num_rows: int) -> list[float]:
    """Return the mean seconds between consecutive tokens in each generation, after a warm-up."""
    weight = model.embed.weight
    num_new = min(NEW_TOKENS, model.context // 2)
    prompts = torch.randint(len(weight), (num_rows, model.context - num_new)).tolist()
    cache = model.new_cache(num_rows, model.context, weight.dtype, weight.device)
    engine = Engine(model, greedy, cache)
    if engine.can_capture:
        engine.capture()

    # The first generation warms up and does not count.
    measured = []
    for _ in range(1 + TURNS):
        _, rest = time_generation(engine, prompts, num_new)
        measured.append(rest / (num_new - 1))
    return measured[1:]


def time_generation(engine: Engine, prompts: list[list[int]], num_new: int) -> tuple[float, float]:
    """Continue all prompts together; return the seconds for the first and for all later tokens."""
    sequences = [Sequence([*prompt], num_new) for prompt in prompts]
    start = perf_counter()
    generated = engine.generate(sequences)
    # All sequences run in one batch, so the first len(sequences) tokens are their first tokens.
    assert len(sequences) <= engine.num_rows
    for _ in sequences:
        next(generated)
    first = perf_counter()
    for _ in generated:
        pass
    end = perf_counter()
    assert all(sequence.num_left == 0 for sequence in sequences)
    return first - start, end - first
