"""The decoding engine, with continuous batching: free rows immediately start the next sequences."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from inference.batch import Sampler, SamplerState, Sequence
from model.cache import Cache
from model.transformer import Transformer
from run import compilation, hardware
from run.progress import print0

if TYPE_CHECKING:  # importing Dynamo takes a second
    from torch._dynamo.types import GuardFilterEntry

CACHE_MULTIPLE = 256  # tokens; torch's compile cache is reused if the capacity is the same
READ_SLOTS_MULTIPLE = 256  # `count_slots` rounds the number of filled slots up to a multiple of it
# Eager steps that let libraries allocate their workspaces, before a CUDA graph is recorded.
NUM_WARM_UPS = 3


class Engine:
    """Extends sequences token by token, several at a time.

    Each row of the cache decodes one sequence at a time; the cache must have room for the
    longest sequence, or for a full context. Prompts are prefilled into it in chunks of up to
    `prefill_chunk` tokens. Without a cache, there is one row, and each step recomputes all of its
    tokens; except for rounding, the samples are the same. A sequence that outgrows the context
    loses its older half and is prefilled again.
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
        weight = model.embed.weight
        self.state = SamplerState.empty(self.num_rows, len(weight), weight.device)
        # The view of the cache that decode steps read, limited by `read_slots`.
        self.read_view = cache
        # The result of `compile`: the decode step on CUDA, only the model's forward on a CPU.
        self.compiled_step: Callable[..., Tensor] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None  # the result of `capture`: the decode step

    @torch.inference_mode()
    def generate(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yield a sequence whenever it has a new token; the caller may then call its `finish`."""
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

            # On CUDA, launch the next step before the host waits for the current step's tokens, so
            # that the GPU stays busy; the event marks the end of the current step. A row whose
            # sequence has ended or fills the cache may thus take one step too many. What that step
            # stores and samples is never read: the row stays free or is prefilled. Other devices
            # have no such event, so their copy waits.
            is_cuda = self.state.tokens.is_cuda
            host_tokens = self.state.tokens.to("cpu", non_blocking=is_cuda, copy=True)
            copied = None
            if is_cuda:
                copied = torch.cuda.current_stream().record_event()
            # `num_left` still includes the token being copied; if it is above 1, another follows.
            if self.cache is not None and any(s.num_left > 1 for s in active.values()):
                self.read_slots(1 + max(len(sequence.tokens) for sequence in active.values()))
                self.advance()
            if copied is not None:
                copied.synchronize()

            for row, sequence in list(active.items()):
                sequence.append(int(host_tokens[row]))
                yield sequence
                if sequence.finish_reason is not None:
                    del active[row]

    def prefill(self, first_row: int, sequences: list[Sequence]) -> None:
        """Prefill sequences into the rows starting at `first_row`, and sample the next tokens.

        A sequence that has outgrown the context loses its older half. Each distinct prompt is
        computed once, in a left-padded batch, and then copied.
        """
        assert 0 < len(sequences) <= self.num_rows - first_row
        context = self.model.context
        for sequence in sequences:
            assert len(sequence.tokens) > 0
            while len(sequence.tokens) > context:
                del sequence.tokens[: max(1, context // 2)]
            if self.cache is not None:
                # The last token is sampled but never stored.
                length = len(sequence.tokens) + sequence.num_left - 1
                assert min(length, context) <= self.cache.capacity, (length, self.cache.capacity)

        # Compute each distinct prompt once; sequence i has the prompt distinct[sources[i]].
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
            hidden = self.fill_cache(cache, tokens, is_ragged)
            if len(distinct) < len(prompts):
                cache.gather_rows(sources)
        assert len(hidden) == len(distinct)

        # Sample the first new token of each sequence.
        state = self.state.rows(rows)
        for row, sequence in enumerate(sequences):
            state.start(row, sequence)
        logits = self.model.logits(hidden[:, -1])  # (distinct prompts, V)
        state.draw(self.sampler, logits[sources])

    def fill_cache(self, cache: Cache, tokens: Tensor, is_ragged: bool) -> Tensor:
        """Empty a cache, and run prompts (N, T) through the model into its first N rows.

        Padding is -1, and occurs only if `is_ragged`. Returns the hidden states (N, P, D) of the
        last chunk, which has P <= `prefill_chunk` tokens.
        """
        cache.reset()
        cache = cache.rows(slice(len(tokens)))
        end = 0
        for chunk in tokens.split(self.prefill_chunk, dim=1):
            end += chunk.shape[1]
            padding = (chunk < 0).sum(dim=1) if is_ragged else None
            # Attend only to the cache slots that are filled once this chunk is stored.
            filled = cache.first_slots(end)
            hidden, _ = self.model.hidden_states(chunk.clamp(min=0), filled, padding)
        return hidden

    def read_slots(self, length: int) -> None:
        """Limit decode steps to the cache slots that rows of `length` tokens fill.

        A CUDA graph reads all slots.
        """
        is_recorded = self.graph is not None or self.compiled_step is not None
        if self.state.tokens.is_cuda and is_recorded:
            return
        count = self.count_slots(length)
        if count != self.read_view.capacity:
            self.read_view = self.cache.first_slots(count)

    def count_slots(self, length: int) -> int:
        """Return the number of slots that decode steps read if rows have `length` tokens.

        The number is rounded up, so that it seldom changes, and is at least the size of a ring,
        because a ring is read as a whole.
        """
        rings = [layer.size for layer in self.cache.layers if layer.is_ring]
        length = max(length, *rings, 1)
        count = math.ceil(length / READ_SLOTS_MULTIPLE) * READ_SLOTS_MULTIPLE
        return min(count, self.cache.capacity)

    def advance(self) -> None:
        """Decode each row's newest token and sample the next one.

        The step is compiled or captured if `compile` or `capture` has succeeded.
        """
        if self.graph is not None:
            self.graph.replay()
        elif self.compiled_step is None:
            self.decode_step()
        else:
            self.run_compiled(self.compiled_step)

    def decode_step(self) -> Tensor:
        """Decode each row's newest token and sample the next one; return its logits (B, V)."""
        logits = self.next_logits()
        self.state.draw(self.sampler, logits)
        return logits

    def next_logits(self) -> Tensor:
        """Decode each row's newest token; return the logits (B, V) of the token after it."""
        return self.model(self.state.tokens, self.read_view)[:, -1]

    def next_logits_of(self, slots: Tensor) -> Tensor:
        """Like `next_logits`, but read the first len(slots) cache slots, a number that may vary."""
        return self.model(self.state.tokens, self.cache.first_slots(len(slots)))[:, -1]

    @property
    def can_capture(self) -> bool:
        """Whether `capture` is possible: on CUDA, with a cache, not yet compiled or captured."""
        is_eager = self.compiled_step is None and self.graph is None
        return is_eager and self.cache is not None and self.state.tokens.is_cuda

    @torch.inference_mode()
    def capture(self) -> None:
        """Record the eager decode step, with sampling, as a CUDA graph; empty the cache.

        Launching an eager step's kernels one by one can take longer than running them; a replay
        launches all of them at once. Recording needs no compiler and takes a fraction of a second.
        The graph reads all slots, at the addresses of the cache and the state, as in `compile`. If
        the step cannot be recorded, for example because it synchronizes with the host, it stays
        eager and a note is printed.
        """
        self.read_view = self.cache
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        # If recording fails, `torch.cuda.graph` may leave its stream current; this context restores
        # the previous one.
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                self.decode_step()
            try:
                with torch.cuda.graph(graph, stream=stream):
                    self.decode_step()
            except RuntimeError as error:
                # If the step failed, its error is the context of the error from the recording.
                reason = first_line(error.__context__ or error)
                print0(f"note: decoding without a CUDA graph ({reason})")
            else:
                self.graph = graph
        torch.cuda.current_stream().wait_stream(stream)
        self.cache.reset()

    @torch.inference_mode()
    def compile(self) -> None:
        """Compile the decode step of an engine with a cache, and empty the cache.

        On a CPU, one compiled graph serves all cache lengths, because the number of slots that it
        reads is a dynamic size; sparse layers may need further graphs. On CUDA, one CUDA graph
        covers the step from the embedding to the sampled tokens, and reads all slots. It reads and
        writes the cache and the state at recorded addresses; prefill writes to the same addresses
        between two steps, in stream order.

        Compiled steps may not notice later changes of the model, the cache's memory or the sampler.
        """
        assert self.graph is None
        is_cuda = self.state.tokens.is_cuda
        options = compilation.decode_options(self.state.tokens.device)
        # Do not compile sampling for a CPU: a compiled argmax is not vectorized (docs/dev/log.md).
        function = self.decode_step if is_cuda else self.next_logits_of
        # The guards on the model and the cache, which never change, would take about a tenth of a
        # short step. Without them, the graphs must not be shared with other engines.
        compiled = torch.compile(
            function,
            dynamic=False if is_cuda else None,
            fullgraph=True,
            isolate_recompiles=True,
            options={**options, "guard_filter_fn": keep_changing_guards},
        )

        for tensor in (self.cache.lengths, *self.cache.buffers(), *self.state.tensors()):
            torch._dynamo.mark_static_address(tensor)
        # The first call compiles. On a CPU it reads fewer slots than the capacity if possible,
        # because a size equal to the capacity may be compiled as a constant; a CUDA graph reads all
        # slots. If compiling fails, `advance` keeps using the eager step.
        if is_cuda:
            self.read_view = self.cache
        else:
            self.read_slots(1)
        self.run_compiled(compiled)
        # A sparse layer selects keys only if the step reads more slots than `keys_per_query`.
        # Selecting takes another graph.
        for keys_per_query in sorted(
            {block.attention.keys_per_query for block in self.model.blocks}
        ):
            if not is_cuda and self.read_view.capacity <= keys_per_query < self.cache.capacity:
                self.read_slots(keys_per_query + 1)
                self.run_compiled(compiled)
        self.compiled_step = compiled
        self.cache.reset()

    def run_compiled(self, compiled: Callable[..., Tensor]) -> None:
        """Run a decode step with the function that torch.compile returned."""
        if self.state.tokens.is_cuda:
            torch.compiler.cudagraph_mark_step_begin()
            compiled()
        else:
            # The number of slots is passed as the length of a tensor, because only the size of a
            # tensor can be dynamic from the first call on: an int would first be compiled as a
            # constant. If even one token needs all slots of a small cache, the size never changes.
            slots = torch.empty(self.read_view.capacity)
            if self.count_slots(1) < self.cache.capacity:
                torch._dynamo.mark_dynamic(slots, 0)
            self.state.draw(self.sampler, compiled(slots))


def keep_changing_guards(guards: Iterable["GuardFilterEntry"]) -> list[bool]:
    """Keep only guards on the number of slots, and guards on global state, which have no name."""
    return [guard.name in ("", "slots") for guard in guards]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class."""
    message = str(error) or type(error).__name__
    return message.splitlines()[0]


def new_cache(
    model: Transformer, sequences: list[Sequence], batch_size: int, dtype: torch.dtype | None = None
) -> Cache:
    """Allocate a cache for up to `batch_size` sequences at once.

    Rows have room for the longest sequence, but at most for a full context; without sequences, one
    row has room for a full context. `dtype` defaults to the embedding's dtype.
    """
    lengths = [len(sequence.tokens) + sequence.max_new_tokens for sequence in sequences]
    length = max(lengths, default=model.context)
    capacity = min(model.context, math.ceil(length / CACHE_MULTIPLE) * CACHE_MULTIPLE)
    num_rows = min(batch_size, max(1, len(sequences)))
    weight = model.embed.weight
    return model.new_cache(num_rows, capacity, dtype or weight.dtype, weight.device)
