"""The decoding engine: sequences share a batch, and each finishes and is replaced on its own."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from inference.batch import Batch, DecodeStep, Sampler, Sequence
from inference.speculative import speculate
from model.cache import Cache
from model.transformer import Transformer

CACHE_MULTIPLE = 256  # tokens; few capacities, so that what was compiled for one is used again


def decode_step(
    model: Transformer, tokens: Tensor, cache: Cache, valid: Tensor | None = None
) -> Tensor:
    """tokens (B, T) -> logits (B, T, V). Compiled once, it serves every length of the cache."""
    return model(tokens, cache, valid)


def compile_decode_step(device: torch.device) -> DecodeStep:
    """Return a compiled `decode_step` for one model and one cache.

    It compiles at the first call with each shape of tokens, and never again.
    """
    is_cuda = device.type == "cuda"
    mode = "reduce-overhead" if is_cuda else None
    compiled = torch.compile(decode_step, dynamic=False, fullgraph=True, mode=mode)
    compiled_shapes = set()

    def step(model: Transformer, tokens: Tensor, cache: Cache, valid: Tensor | None) -> Tensor:
        # A CUDA graph reads and writes the cache at the addresses that it was recorded with.
        if not compiled_shapes:
            torch._dynamo.mark_static_address(cache.lengths)
            for layer in cache.layers:
                for buffer in layer.buffers:
                    torch._dynamo.mark_static_address(buffer)
        if is_cuda:
            torch.compiler.cudagraph_mark_step_begin()

        # For a shape that is compiled nothing can have changed: skip the guards, which take time.
        with torch.compiler.set_stance(skip_guard_eval_unsafe=tokens.shape in compiled_shapes):
            compiled_shapes.add(tokens.shape)
            return compiled(model, tokens, cache, valid)

    return step


@torch.inference_mode()
def warm_up(step: DecodeStep, model: Transformer, cache: Cache, num_draft_tokens: int) -> None:
    """Call a decode step with the shapes that `generate` will call it with."""
    for width in sorted({1, 1 + num_draft_tokens}):
        tokens = torch.zeros_like(cache.lengths)[:, None].repeat(1, width)
        valid = None if width == 1 else torch.ones_like(tokens, dtype=torch.bool)
        step(model, tokens, cache, valid)


@torch.inference_mode()
def generate(
    model: Transformer,
    sequences: list[Sequence],
    sampler: Sampler,
    *,
    cache: Cache | None = None,
    step: DecodeStep = decode_step,
    prefill_chunk: int = 2048,
    num_draft_tokens: int = 0,
) -> Iterator[Sequence]:
    """Extend the sequences token by token; yield a sequence each time it has a new token.

    The cache has a row for each sequence decoded at the same time, and room for min(context, all
    tokens of the longest). Without a cache, all tokens are computed anew at each step. With
    `num_draft_tokens`, what follows is drafted from the sequence itself and verified in one step.
    The tokens are the same in all of these ways.
    Raises ValueError for a prompt that is empty or longer than the context.
    """
    batch = Batch(model, sequences, cache, prefill_chunk)
    while batch.schedule():
        tokens = sampler(batch.logits, batch.seeds, batch.draw_indices, batch.seen_tokens)
        batch.record(tokens)

        if cache is not None and num_draft_tokens > 0:
            yield from batch.append(tokens.tolist())
            yield from speculate(batch, tokens, sampler, step, num_draft_tokens)
            continue

        # Give a GPU its next step before the host waits for the tokens of this one: the event comes
        # before that step. It may run one token past a full cache: `schedule` then prefills anew.
        host_tokens = tokens.to("cpu", non_blocking=True)
        copied = None
        if tokens.is_cuda:
            copied = torch.cuda.current_stream().record_event()
        if cache is not None and batch.needs_more():
            batch.logits = step(model, tokens[:, None], cache, None)[:, -1]
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
