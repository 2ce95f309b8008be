"""The decoding engine: sequences share a batch, and each finishes and is replaced on its own."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from inference.batch import Batch, DecodeStep, Sampler, SamplerState, Sequence, new_sampler_state
from inference.speculative import speculate
from model.cache import Cache
from model.transformer import Transformer

CACHE_MULTIPLE = 256  # tokens; few capacities, so that what was compiled for one is used again


def decode_step(
    model: Transformer,
    tokens: Tensor,
    cache: Cache,
    valid: Tensor | None = None,
    sampler: Sampler | None = None,
    state: SamplerState | None = None,
) -> Tensor:
    """Decode tokens (B, T), and draw what comes next. One graph serves every length of the cache.

    The tokens are `state.tokens`, followed by drafts (B, T - 1), with -1 for no draft. `valid`
    (B, T) is false for tokens to skip; None means that all are valid. Returns the drawn tokens
    (B, T), with -1 after the first wrong draft, and updates `state` and the cache. Without `state`,
    nothing is drawn, and the logits (B, T, V) are returned.
    """
    logits = model(tokens.clamp(min=0), cache, valid)
    if state is None:
        return logits
    return state.draw(sampler, logits, tokens[:, 1:])


def compile_decode_step(device: torch.device) -> DecodeStep:
    """Return a compiled `decode_step` for one model, one cache and one sampler.

    It compiles at the first call with each shape of tokens and each state, and never again. On CUDA
    each of these is one CUDA graph, from the embedding to the drawn tokens.
    """
    is_cuda = device.type == "cuda"
    # With this tuning, Inductor compiles products of a single token together with what surrounds
    # them; they reach peak bandwidth only then (`mm` in torch/_inductor/decomposition.py).
    options = {"triton.cudagraphs": is_cuda, "coordinate_descent_tuning": is_cuda}
    compiled = torch.compile(decode_step, dynamic=False, fullgraph=True, options=options)
    compiled_cases = set()

    def step(
        model: Transformer,
        tokens: Tensor,
        cache: Cache,
        valid: Tensor | None,
        sampler: Sampler | None = None,
        state: SamplerState | None = None,
    ) -> Tensor:
        # A CUDA graph reads and writes cache and state at the addresses that it was recorded with.
        # Prefill writes there between two steps, in the order of the stream. What a step returns is
        # overwritten by the next one: only `speculate` reads it, before that.
        case = (tokens.shape, state)
        if case not in compiled_cases:
            static = [cache.lengths, *(state or ())]
            for layer in cache.layers:
                static += layer.buffers
            for tensor in static:
                torch._dynamo.mark_static_address(tensor)
        if is_cuda:
            torch.compiler.cudagraph_mark_step_begin()

        # For a case that is compiled nothing can have changed: skip the guards, which take time.
        with torch.compiler.set_stance(skip_guard_eval_unsafe=case in compiled_cases):
            compiled_cases.add(case)
            if is_cuda:
                return compiled(model, tokens, cache, valid, sampler, state)
            logits = compiled(model, tokens, cache, valid)
        # Compiled for a CPU, the search for the largest logit would take as long as half of a step.
        return logits if state is None else state.draw(sampler, logits, tokens[:, 1:])

    return step


@torch.inference_mode()
def warm_up(
    step: DecodeStep,
    model: Transformer,
    cache: Cache,
    sampler: Sampler,
    state: SamplerState,
    num_draft_tokens: int,
) -> None:
    """Call a decode step with the shapes that `generate` will call it with."""
    step(model, state.tokens, cache, None, sampler, state)
    if num_draft_tokens > 0:
        tokens = state.tokens.repeat(1, 1 + num_draft_tokens)
        valid = torch.ones_like(tokens, dtype=torch.bool)
        step(model, tokens, cache, valid, sampler, state)
        if not all(layer.can_rewind for layer in cache.layers):
            step(model, tokens, cache, valid)


@torch.inference_mode()
def generate(
    model: Transformer,
    sequences: list[Sequence],
    sampler: Sampler,
    *,
    cache: Cache | None = None,
    state: SamplerState | None = None,
    step: DecodeStep = decode_step,
    prefill_chunk: int = 2048,
    num_draft_tokens: int = 0,
) -> Iterator[Sequence]:
    """Extend the sequences token by token; yield a sequence each time it has a new token.

    The cache has a row for each sequence decoded at the same time, and room for min(context, all
    tokens of the longest). Without a cache, all tokens are computed anew at each step. With
    `num_draft_tokens`, what follows is drafted from the sequence itself and verified in one step.
    The tokens are the same in all of these ways. A compiled step takes the same `state` each time,
    with a row for each of the cache; by default there is a new one.
    Raises ValueError for a prompt that is empty or longer than the context.
    """
    if state is None:
        state = new_sampler_state(model, 1 if cache is None else len(cache.lengths))
    batch = Batch(model, sequences, sampler, cache, state, prefill_chunk)
    while batch.schedule():
        if cache is not None and num_draft_tokens > 0:
            yield from speculate(batch, step, num_draft_tokens)
            continue

        # Give a GPU its next step before the host waits for the tokens of this one: the event comes
        # before that step. It may run one token past a full cache, and draw for a sequence that the
        # host then finds finished: `schedule` prefills such rows anew, and draws for them again.
        host_tokens = state.tokens.to("cpu", non_blocking=True, copy=True)
        copied = None
        if state.tokens.is_cuda:
            copied = torch.cuda.current_stream().record_event()
        if cache is not None and batch.needs_more():
            step(model, state.tokens, cache, None, sampler, state)
        if copied is not None:
            copied.synchronize()
        yield from batch.append(host_tokens.tolist())


def new_cache(
    model: Transformer, sequences: list[Sequence], batch_size: int, dtype: torch.dtype | None = None
) -> Cache:
    """Allocate a cache for `batch_size` of the sequences at a time, and for the longest of them.

    `dtype` is by default that of the weights. Without sequences, there is one row of a context.
    """
    lengths = [len(sequence.tokens) + sequence.max_new_tokens for sequence in sequences]
    length = max(lengths, default=model.context)
    capacity = min(model.context, math.ceil(length / CACHE_MULTIPLE) * CACHE_MULTIPLE)
    num_rows = min(batch_size, max(1, len(sequences)))
    weight = model.embed.weight
    return model.new_cache(num_rows, capacity, dtype or weight.dtype, weight.device)
