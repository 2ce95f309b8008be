"""Measure how long trained models take to decode with a cache."""

from collections import defaultdict
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from inference.batch import DecodeStep, SamplerState, Sequence, new_sampler_state
from inference.engine import compile_decode_step, decode_step, generate
from inference.load import load
from inference.sampling import sample
from model.cache import Cache
from model.transformer import Transformer
from run import compilation

BATCH_SIZES = (1, 8)
MIN_LENGTH = 8  # tokens of a sequence
NEW_TOKENS = 32  # that each sequence generates
TURNS = 3  # of each model, and runs in each turn
greedy = partial(sample, temperature=0)
# Milliseconds by the name of a model and by case: a batch size, the length at the end of its
# sequences, and which token.
Latencies = dict[str, dict[str, float]]


def latencies(runs: dict[str, Path], context: int, device: torch.device) -> Latencies:
    """Measure medians in ms: to the first token, and from each token to the next.

    On a CPU the models take turns, on a GPU the decode step is compiled.
    """
    # Compiling takes long, so on a GPU each model has a single turn.
    is_compiled = device.type == "cuda" and compilation.missing_for_compilation(device) is None
    num_turns = TURNS
    if is_compiled:
        compilation.use_cache()
        num_turns = 1

    # Models take turns, so that a machine that slows down does so for all of them.
    seconds = defaultdict(list)  # by model, batch size and length
    for _ in range(num_turns):
        for name, run in runs.items():
            model, *_ = load(run, device)
            for batch_size, length in product(BATCH_SIZES, (context // 4, context)):
                if length >= MIN_LENGTH:
                    case = (name, f"{batch_size} x {length}")
                    seconds[case] += times(model, batch_size, length, is_compiled)

    # Take medians over the runs of all turns.
    medians = {name: {} for name in runs}
    for (name, case), pairs in seconds.items():
        first, following = 1e3 * np.median(pairs, axis=0)
        medians[name] |= {f"{case}, first": first, f"{case}, next": following}
    return medians


def times(
    model: Transformer, batch_size: int, length: int, is_compiled: bool
) -> list[tuple[float, float]]:
    """Measure several runs in s: to the first token, and from one to the next; after a warm-up."""
    weight = model.embed.weight
    num_new = min(NEW_TOKENS, length // 2)
    prompts = torch.randint(len(weight), (batch_size, length - num_new)).tolist()
    cache = model.new_cache(batch_size, length, weight.dtype, weight.device)
    state = new_sampler_state(model, batch_size)
    step = decode_step
    if is_compiled:
        torch.compiler.reset()
        step = compile_decode_step(weight.device)

    # The first run warms up and does not count.
    measured = []
    for _ in range(1 + TURNS):
        first, rest, _ = time_generation(model, prompts, num_new, cache, state, step)
        measured.append((first, rest / (num_new - 1)))
    return measured[1:]


def time_generation(
    model: Transformer,
    prompts: list[list[int]],
    num_new: int,
    cache: Cache,
    state: SamplerState,
    step: DecodeStep,
) -> tuple[float, float, list[list[int]]]:
    """Continue all prompts together, greedily.

    Returns the seconds to the first token of all, those of the other tokens, and all tokens.
    """
    sequences = [Sequence(prompt, num_new) for prompt in prompts]
    start = perf_counter()
    generated = generate(model, sequences, greedy, cache=cache, state=state, step=step)
    # All sequences run in the batch, so the first len(sequences) tokens are their first ones.
    for _ in sequences:
        next(generated)
    first = perf_counter()
    for _ in generated:
        pass
    return first - start, perf_counter() - first, [sequence.tokens for sequence in sequences]
