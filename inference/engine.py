"""The decoding engine: sequences share a batch, and each finishes and is replaced on its own."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from inference.speculative import speculate
from model.cache import Cache
from model.transformer import Transformer

# Takes a model, tokens (B, T), its cache, and which tokens are valid (B, T) or None for all;
# returns logits (B, T, V).
DecodeStep = Callable[..., Tensor]

# Takes logits (B, V), seeds (B,), draw indices (B,) and seen tokens (B, V); returns tokens (B,).
Sampler = Callable[..., Tensor]

MAX_PADDING_FACTOR = 2  # prompts are padded to one batch up to this many times their own tokens


class Sequence:
    """A prompt and what is generated after it, until `finish_reason` is "eos", "stop" or "length".

    `seed` determines what is drawn. `num_cached` tokens are in the cache row before the first
    prefill; a later prefill starts from an empty row. `tokens` loses its older half when it
    outgrows the context.
    """

    def __init__(
        self,
        tokens: list[int],
        max_new_tokens: int,
        *,
        seed: int = 0,
        eos: int | None = None,
        num_cached: int = 0,
    ):
        self.tokens = list(tokens)
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.eos = eos
        self.num_cached = num_cached
        self.num_generated = 0
        self.finish_reason: str | None = None
        if max_new_tokens == 0:
            self.finish_reason = "length"

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_left(self) -> int:
        return self.max_new_tokens - self.num_generated

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.num_generated += 1
        if token == self.eos:
            self.finish_reason = "eos"
        elif self.num_left == 0:
            self.finish_reason = "length"


def is_active(sequence: Sequence | None) -> bool:
    """Whether a row has a sequence, and it wants more tokens."""
    return sequence is not None and not sequence.is_finished


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
    sequences: Iterable[Sequence],
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

        # Give a GPU its next step before the host waits for the tokens of this one. The step may
        # run one token past a full cache: `schedule` then prefills the row anew.
        host_tokens, copied = copy_to_host_async(tokens)
        if cache is not None and batch.needs_more():
            batch.logits = step(model, tokens[:, None], cache, None)[:, -1]
        if copied is not None:
            copied.synchronize()
        yield from batch.append(host_tokens.tolist())


class Batch:
    """The sequences that are decoded together, and the tensors that the sampler draws from.

    logits (B, V), seen_tokens (B, V), seeds (B,) and draw_indices (B,) have a row a sequence.
    """

    def __init__(
        self,
        model: Transformer,
        sequences: Iterable[Sequence],
        cache: Cache | None,
        prefill_chunk: int,
    ):
        self.model = model
        self.cache = cache
        self.prefill_chunk = prefill_chunk
        self.waiting = iter(sequences)

        # A row without a sequence is None. Without a cache there is one row.
        num_rows = 1 if cache is None else len(cache.lengths)
        self.rows: list[Sequence | None] = [None] * num_rows

        # What the sampler draws from.
        weight = model.embed.weight
        self.logits = torch.zeros(num_rows, len(weight), dtype=weight.dtype, device=weight.device)
        self.seen_tokens = torch.zeros_like(self.logits, dtype=torch.bool)
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=weight.device)
        self.draw_indices = torch.zeros_like(self.seeds)

    def schedule(self) -> bool:
        """Give free rows the next sequences and prefill them; return whether any row has one.

        A sequence that has outgrown the context loses its oldest half and is prefilled anew.
        """
        rows = []  # to prefill
        for row, sequence in enumerate(self.rows):
            if not is_active(sequence):
                sequence = self.next_waiting()
                self.rows[row] = sequence
            elif len(sequence.tokens) > self.model.context:
                del sequence.tokens[: self.model.context // 2]
            elif self.cache is not None:
                continue  # its cache row has all of it
            if sequence is not None:
                rows.append(row)

        # Prefill, and set what the sampler draws from to the state of these sequences.
        self.prefill_rows(rows)
        for row in rows:
            sequence = self.rows[row]
            sequence.num_cached = 0
            self.seeds[row] = sequence.seed
            self.draw_indices[row] = sequence.num_generated
            self.seen_tokens[row] = False
            self.seen_tokens[row, sequence.tokens] = True
        return any(sequence is not None for sequence in self.rows)

    def next_waiting(self) -> Sequence | None:
        """Return the next sequence that wants tokens. Raises ValueError for an unfit length."""
        sequence = next(filter(is_active, self.waiting), None)
        context = self.model.context
        if sequence is not None and not 1 <= len(sequence.tokens) <= context:
            problem = f"a prompt must have 1 to {context} tokens (got {len(sequence.tokens)})"
            raise ValueError(f"{problem}. fix: cut it")
        return sequence

    def prefill_rows(self, rows: list[int]) -> None:
        """Compute the logits of these rows from those of their tokens that are not cached."""
        sequences = [self.rows[row] for row in rows]
        if self.can_prefill_together(sequences):
            prompts = [sequence.tokens for sequence in sequences]
            self.cache.reset()
            self.logits = prefill(self.model, prompts, self.cache, self.prefill_chunk)
            return

        previous = None  # the row before, whose tokens may be the same
        for row, sequence in zip(rows, sequences, strict=True):
            cache = None if self.cache is None else self.cache.row(row)
            if previous is not None and sequence.tokens == self.rows[previous].tokens:
                cache.copy_(self.cache.row(previous))
                self.logits[row] = self.logits[previous]
                continue
            # The row may still hold another sequence, or this one before it was cut.
            if cache is not None and sequence.num_cached == 0:
                cache.reset()
            new_tokens = sequence.tokens[sequence.num_cached :]
            self.logits[row] = prefill(self.model, [new_tokens], cache, self.prefill_chunk)[0]
            previous = row

    def can_prefill_together(self, sequences: list[Sequence]) -> bool:
        """Whether these take all rows, no two are the same, and padding them wastes little."""
        if self.cache is None or any(sequence.num_cached > 0 for sequence in sequences):
            return False
        prompts = {tuple(sequence.tokens) for sequence in sequences}
        if len(prompts) < len(self.rows):
            return False
        lengths = [len(prompt) for prompt in prompts]
        return len(lengths) * max(lengths) <= MAX_PADDING_FACTOR * sum(lengths)

    def record(self, tokens: Tensor, mask: Tensor | None = None) -> None:
        """Tell the sampler's tensors what was drawn: tokens (B,), in the rows of `mask` (B,)."""
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        self.draw_indices += mask
        column = tokens[:, None]
        is_seen = self.seen_tokens.gather(1, column) | mask[:, None]
        self.seen_tokens.scatter_(1, column, is_seen)

    def append(self, tokens: list[int], mask: list[bool] | None = None) -> Iterator[Sequence]:
        """Append to each active row of `mask` its token; yield the sequences that have a new one."""
        for row, sequence in enumerate(self.rows):
            if is_active(sequence) and (mask is None or mask[row]):
                sequence.append(tokens[row])
                yield sequence

    def active_mask(self) -> Tensor:
        """Which rows (B,) have a sequence that is not finished."""
        return torch.tensor([is_active(row) for row in self.rows], device=self.logits.device)

    def needs_more(self) -> bool:
        """Whether any sequence may get a token after the one that was recorded last."""
        return any(row is not None and row.num_left > 1 for row in self.rows)


def prefill(
    model: Transformer, prompts: list[list[int]], cache: Cache | None, chunk: int
) -> Tensor:
    """Run prompts through the model, `chunk` tokens at a time; return the last logits (B, V)."""
    # Pad on the left, so that the last column has the last token of each prompt.
    width = max(len(prompt) for prompt in prompts)
    is_ragged = any(len(prompt) < width for prompt in prompts)
    padded = [[-1] * (width - len(prompt)) + prompt for prompt in prompts]
    tokens = torch.tensor(padded, device=model.embed.weight.device)

    if cache is None:
        hidden = model.hidden(tokens)  # of one prompt
        return model.logits(hidden[:, -1])

    # Attend to no more slots of the cache than are filled after each part.
    end = int(cache.lengths.max())
    for part in tokens.split(chunk, dim=1):
        end += part.shape[1]
        valid = part >= 0 if is_ragged else None
        hidden = model.hidden(part.clamp(min=0), cache.first(end), valid)
    return model.logits(hidden[:, -1])


def copy_to_host_async(tokens: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start to copy tokens from a GPU; return the copy and the event after which it is complete.

    Waiting for the event does not wait for what the GPU is given to do after the copy.
    """
    if not tokens.is_cuda:
        return tokens, None
    host_tokens = tokens.to("cpu", non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host_tokens, copied
