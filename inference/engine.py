"""The decoding engine: sequences share a batch, and each finishes and is replaced on its own."""

import math
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from inference.batch import Sampler, SamplerState, Sequence
from model.cache import Cache
from model.transformer import Transformer
from run import hardware

CACHE_MULTIPLE = 256  # tokens; few capacities, so that what was compiled for one is used again


class Engine:
    """Extends sequences token by token, several at a time.

    Each row of the cache decodes a sequence at a time; the cache has room for min(context, all
    tokens of the longest sequence). Without a cache, there is one row, and all of its tokens are
    computed anew at each step. The tokens are the same in both ways. A prompt is prefilled
    `prefill_chunk` tokens at a time. A sequence that outgrows the context loses its older half and
    is prefilled again.
    """

    def __init__(
        self,
        model: Transformer,
        sampler: Sampler,
        cache: Cache | None = None,
        prefill_chunk: int = 2048,
    ):
        self.model = model
        self.sampler = sampler
        self.cache = cache
        self.prefill_chunk = prefill_chunk
        self.num_rows = 1 if cache is None else len(cache.lengths)
        # The state of rows that have no sequence yet.
        weight = model.embed.weight
        zeros = torch.zeros(3, self.num_rows, dtype=torch.int64, device=weight.device)
        seen_tokens = zeros.new_zeros(self.num_rows, len(weight), dtype=torch.bool)
        self.state = SamplerState(zeros[0, :, None], zeros[1], zeros[2], seen_tokens)
        self.step = self.decode_step

    @torch.inference_mode()
    def generate(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yield a sequence each time that it has a new token; the caller may then finish it."""
        context = self.model.context
        waiting = deque(sequence for sequence in sequences if sequence.num_left > 0)
        active: dict[int, Sequence] = {}  # by row
        while waiting or active:
            # Prefill sequences that are new, have outgrown the context, or have no cache.
            changed = []
            for row in range(self.num_rows):
                if row not in active and waiting:
                    active[row] = waiting.popleft()
                    changed.append(row)
                elif row in active and (self.cache is None or len(active[row].tokens) > context):
                    changed.append(row)
            if len(changed) == self.num_rows:
                self.prefill(0, [active[row] for row in changed])
            else:
                for row in changed:
                    self.prefill(row, [active[row]])

            # Launch a GPU's next step before the host waits for the tokens of this one, so that the
            # two overlap; the event is that of this step. The next one may run one token past a
            # full cache, and draw for a sequence that the host then finds finished: such rows are
            # prefilled and drawn anew.
            host_tokens = self.state.tokens.to("cpu", non_blocking=True, copy=True)
            copied = None
            if self.state.tokens.is_cuda:
                copied = torch.cuda.current_stream().record_event()
            if self.cache is not None and any(s.num_left > 1 for s in active.values()):
                self.step()
            if copied is not None:
                copied.synchronize()

            for row, sequence in [*active.items()]:
                sequence.append(int(host_tokens[row]))
                yield sequence
                if sequence.finish_reason is not None:
                    del active[row]

    def prefill(self, first_row: int, sequences: list[Sequence]) -> None:
        """Run sequences through the model, and draw the next token of each, from `first_row` on.

        A sequence that has outgrown the context loses its oldest half. Each distinct prompt is
        computed once, in a batch padded on the left, and then copied.
        """
        for sequence in sequences:
            if len(sequence.tokens) > self.model.context:
                del sequence.tokens[: self.model.context // 2]
        prompts = [tuple(sequence.tokens) for sequence in sequences]
        distinct = list(dict.fromkeys(prompts))
        sources = [distinct.index(prompt) for prompt in prompts]
        tokens = pad_sequence(
            [torch.tensor(prompt) for prompt in distinct],
            batch_first=True,
            padding_value=-1,
            padding_side="left",
        )
        is_ragged = bool((tokens < 0).any())
        device = self.state.tokens.device
        tokens, sources = hardware.to_device(device, tokens, torch.tensor(sources))

        rows = slice(first_row, first_row + len(sequences))
        if self.cache is None:
            hidden, _ = self.model.hidden_states(tokens)
        else:
            cache = self.cache.rows(rows)
            cache.reset()
            # Attend to no more slots of the cache than are filled after each part.
            distinct_rows = cache.rows(slice(len(distinct)))
            end = 0
            for part in tokens.split(self.prefill_chunk, dim=1):
                end += part.shape[1]
                padding = (part < 0).sum(dim=1) if is_ragged else None
                filled = distinct_rows.first(end)
                hidden, _ = self.model.hidden_states(part.clamp(min=0), filled, padding)
            if len(distinct) < len(prompts):
                cache.gather_rows(sources)

        state = self.state.rows(rows)
        for row, sequence in enumerate(sequences):
            state.start(row, sequence)
        state.draw(self.sampler, self.model.logits(hidden[:, -1])[sources])

    def decode_step(self) -> Tensor:
        """Decode the newest token of each row and draw the next one; return its logits (B, V)."""
        logits = self.next_logits()
        self.state.draw(self.sampler, logits)
        return logits

    def next_logits(self) -> Tensor:
        """Decode the newest token of each row; return the logits (B, V) of the one after it."""
        return self.model(self.state.tokens, self.cache)[:, -1]

    @torch.inference_mode()
    def compile(self) -> None:
        """Compile the decode step, and empty the cache. One graph serves every length of the cache.

        On CUDA it is one CUDA graph, from the embedding to the drawn tokens. It reads and writes
        cache and state at the addresses that it was recorded with: prefill writes there between two
        steps, in the order of the stream.
        """
        is_cuda = self.state.tokens.is_cuda
        # With this tuning, Inductor compiles products of a single token together with what
        # surrounds them; they reach peak bandwidth only then (`mm` in
        # torch/_inductor/decomposition.py).
        options = {"triton.cudagraphs": is_cuda, "coordinate_descent_tuning": is_cuda}
        # Compiled for a CPU, the search for the largest logit would take half of a step's time.
        function = self.decode_step if is_cuda else self.next_logits
        compiled = torch.compile(function, dynamic=False, fullgraph=True, options=options)

        def step() -> None:
            if is_cuda:
                torch.compiler.cudagraph_mark_step_begin()
                compiled()
            else:
                self.state.draw(self.sampler, compiled())

        def step_without_guards() -> None:
            # Nothing can have changed since the first step, and guards take time.
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                step()

        for tensor in (self.cache.lengths, *self.cache.buffers(), *self.state):
            torch._dynamo.mark_static_address(tensor)
        step()
        self.step = step_without_guards
        self.cache.reset()


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
