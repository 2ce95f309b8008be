"""What a model remembers between forwards: buffers allocated once, rows that live independently.

How much of a row is in use is one tensor for all layers, so a step never changes a Python value,
and a decode step compiled once serves every length.
"""

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from model.context import ForwardContext


class LayerCache:
    """The buffers (B, ...) of one layer. With none, a layer that remembers nothing.

    `initial` has, for each of them, what a row holds before its first token: a tensor that
    broadcasts to the buffer, such as a buffer of the module. Without it, zeros.
    """

    can_rewind = True

    def __init__(self, *buffers: Tensor, initial: Sequence[Tensor] = ()):
        self.buffers = buffers
        self.initial = initial
        if len(initial) > 0 and not buffers[0].is_meta:  # without memory, only sizes count
            self.reset()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def used(self) -> list[Tensor]:
        """What may be read."""
        return list(self.buffers)

    def first(self, count: int) -> "LayerCache":
        """The same, in place, for rows that will have up to `count` tokens: no more than these are looked at."""
        return self

    def map(self, change: Callable[[Tensor], Tensor]) -> "LayerCache":
        """The same, of other buffers."""
        other = copy(self)
        other.buffers = tuple(map(change, self.buffers))
        return other

    @torch.no_grad()
    def reset(self) -> None:
        """Make all rows as they were before their first token."""
        if len(self.initial) == 0:
            for buffer in self.buffers:
                buffer.zero_()
            return
        for buffer, initial in zip(self.buffers, self.initial, strict=True):
            buffer.copy_(initial)

    def copy_(self, other: "LayerCache") -> None:
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine.copy_(theirs)


class KVCache(LayerCache):
    """The newest positions of each row: position p is in slot p mod size, so a full cache is a ring that never turns.

    A feature of shape (K, D) takes a buffer (B, size + 1, K, D). The last slot takes what must not be kept. In int8,
    each vector of D has a scale, in a second buffer (B, size + 1, K, 1), fp16.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        window: int | None,
        chunk: int | None,
        *features: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.window, self.chunk = window, chunk
        self.size = min(n for n in (capacity, window, chunk) if n is not None)
        self.is_ring = self.size < capacity
        self.can_rewind = not self.is_ring
        kept = [((*shape,), dtype) for shape in features]
        if dtype == torch.int8:
            kept += [((*shape[:-1], 1), torch.float16) for shape in features]
        super().__init__(
            *(
                torch.zeros(batch, self.size + 1, *shape, dtype=kind, device=device)
                for shape, kind in kept
            )
        )

    def update(self, ctx: ForwardContext, *new: Tensor) -> tuple[list[Tensor], Tensor]:
        """Keep (B, T, ...) tensors; return each with all that may be seen, (B, S, ...), and what sees what."""
        if self.is_ring and new[0].shape[1] > 1:
            # a chunk overwrites what its first tokens still see: read before writing
            seen = [
                torch.cat((held, x), dim=1) for held, x in zip(self._read(new), new, strict=True)
            ]
            self._write(ctx, new)
            return seen, ctx.ring_mask(self.size, self.window, self.chunk)
        self._write(ctx, new)
        if new[0].shape[1] == self.size and ctx.valid is None:  # all that it holds is new
            plain = self.window is None and self.chunk is None
            return list(new), None if plain else ctx.causal_mask(self.window, self.chunk)
        return self._read(new), ctx.cache_mask(self.size, self.window, self.chunk)

    def used(self) -> list[Tensor]:
        return [buffer[:, : self.size] for buffer in self.buffers]

    def first(self, count: int) -> "KVCache":
        if count >= self.size:
            return self
        part = self.map(
            lambda buffer: buffer[:, : count + 1]
        )  # what must not be kept goes where nothing is yet
        part.size, part.is_ring = count, False
        return part

    def _read(self, new: tuple[Tensor, ...]) -> list[Tensor]:
        held, count = self.used(), len(new)
        if len(held) > count:
            held = [x * scale for x, scale in zip(held[:count], held[count:], strict=True)]
        return [x.type_as(like) for x, like in zip(held, new, strict=True)]

    def _write(self, ctx: ForwardContext, new: tuple[Tensor, ...]) -> None:
        if len(self.buffers) > len(new):
            scales = [x.abs().amax(dim=-1, keepdim=True) / 127 for x in new]
            scales = [scale.clamp(min=1e-7).half() for scale in scales]
            new = (
                *(
                    (x / scale).round().clamp(-127, 127)
                    for x, scale in zip(new, scales, strict=True)
                ),
                *scales,
            )
        slots = ctx.cache_slots(self.size)
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        for buffer, x in zip(self.buffers, new, strict=True):
            buffer[rows, slots] = x.to(buffer.dtype)


class Cache:
    """Of a whole model: one LayerCache a layer, and how many tokens each row has seen."""

    def __init__(self, lengths: Tensor, layers: list[LayerCache]):
        self.lengths, self.layers = lengths, layers

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Cache":
        """A cache of other tensors, each made from one of these."""
        return Cache(change(self.lengths), [layer.map(change) for layer in self.layers])

    def row(self, number: int) -> "Cache":
        """One row, in place: what is written there is written here."""
        return self.map(lambda tensor: tensor[number : number + 1])

    def first(self, count: int) -> "Cache":
        """The same, in place, while rows have up to `count` tokens: no more than these are looked at."""
        return Cache(self.lengths, [layer.first(count) for layer in self.layers])

    def copy_(self, other: "Cache") -> None:
        """Go on from where a cache of the same shape is."""
        self.lengths.copy_(other.lengths)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.copy_(theirs)

    def reset(self) -> None:
        """Empty it for new sequences."""
        self.lengths.zero_()
        for layer in self.layers:
            layer.reset()

    def rewind(self, lengths: Tensor) -> None:
        """Forget all but the first `lengths` (B,) tokens of each row."""
        if not all(layer.can_rewind for layer in self.layers):
            raise ValueError("a turned window or a state cannot be rewound. fix: keep a copy")
        self.lengths.copy_(torch.minimum(self.lengths, lengths))
