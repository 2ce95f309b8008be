"""What a model remembers between forwards: buffers allocated once, whose rows are independent.

The number of tokens in each row is one tensor for all layers. So a step changes no Python value,
and a decode step compiled once serves every length.
"""

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from model.context import ForwardContext, Visibility


class LayerCache:
    """The buffers (B, ...) of one layer; a layer that remembers nothing has none.

    `initial` holds the value of each buffer before the first token of a row: a tensor that
    broadcasts to it, such as a buffer of the module. Without `initial`, they are zeros.
    """

    def __init__(self, *buffers: Tensor, initial: Sequence[Tensor] = ()):
        self.buffers = buffers
        self.initial = initial
        if len(initial) > 0 and not buffers[0].is_meta:  # without memory, only sizes count
            self.reset()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def can_rewind(self) -> bool:
        """Whether reducing the length is enough to remove the newest tokens of a row.

        Not for a recurrent state, which mixes all past tokens; a subclass may say otherwise.
        """
        return len(self.buffers) == 0

    def used(self) -> list[Tensor]:
        """The buffers, without slots that are written to but never read."""
        return list(self.buffers)

    def first(self, count: int) -> "LayerCache":
        """A view for rows of up to `count` tokens: it shares the memory, and less of it is read."""
        return self

    def map(self, change: Callable[[Tensor], Tensor]) -> "LayerCache":
        """A copy of this object with `change(buffer)` in place of each buffer."""
        other = copy(self)
        other.buffers = tuple(map(change, self.buffers))
        return other

    @torch.no_grad()
    def reset(self) -> None:
        """Reset all rows to their state before the first token."""
        if len(self.initial) == 0:
            for buffer in self.buffers:
                buffer.zero_()
            return
        for buffer, initial in zip(self.buffers, self.initial, strict=True):
            buffer.copy_(initial)

    def copy_(self, other: "LayerCache") -> None:
        """Copy the values of a cache of the same shape into this one."""
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine.copy_(theirs)


class KVCache(LayerCache):
    """Keys and values of the newest tokens: position p is in slot p % size (see ForwardContext).

    `size` is the smallest of capacity, window and chunk. Below the capacity, the cache is a ring;
    otherwise every position has its own slot. A feature of shape (K, D), such as the keys, has a
    buffer (B, size + 1, K, D). Its last slot is never read: writes that must be discarded go there.
    In int8, a second buffer (B, size + 1, K, 1) holds an fp16 scale for each vector of D values.
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
        self.window = window
        self.chunk = chunk
        self.size = min(n for n in (capacity, window, chunk) if n is not None)
        self.is_ring = self.size < capacity
        self.is_quantized = dtype == torch.int8

        # A buffer for each feature, and in int8 one for its scales.
        buffers = []
        for feature in features:
            shape = (batch, self.size + 1, *feature)
            buffers.append(torch.zeros(shape, dtype=dtype, device=device))
        if self.is_quantized:
            shapes = [(*x.shape[:-1], 1) for x in buffers]
            buffers += [torch.zeros(s, dtype=torch.float16, device=device) for s in shapes]
        super().__init__(*buffers)

    @property
    def can_rewind(self) -> bool:
        return not self.is_ring

    def update(self, ctx: ForwardContext, *new: Tensor) -> tuple[list[Tensor], Visibility]:
        """Store new features (B, T, ...), and return what the new tokens attend to.

        That is each feature of all S tokens in reach, (B, S, ...), and their Visibility.
        """
        num_new = new[0].shape[1]
        if self.is_ring and num_new > 1:
            # Read before writing: new tokens overwrite what the first of them attend to.
            cached = self._read(new)
            features = [torch.cat(pair, dim=1) for pair in zip(cached, new, strict=True)]
            self._write(ctx, new)
            return features, ctx.visible_in_ring(self.size, self.window, self.chunk)

        self._write(ctx, new)
        if num_new == self.size and ctx.valid is None:
            # The new tokens fill the cache: nothing needs to be read back.
            if self.window is None and self.chunk is None:
                return list(new), Visibility(None, ctx.positions, ctx.positions)
            return list(new), ctx.visible(self.window, self.chunk)
        return self._read(new), ctx.visible_in_cache(self.size, self.window, self.chunk)

    def used(self) -> list[Tensor]:
        return [buffer[:, : self.size] for buffer in self.buffers]

    def first(self, count: int) -> "KVCache":
        if count >= self.size:
            return self
        # Slot `count` is still empty, so the view can use it for discarded writes.
        view = self.map(lambda buffer: buffer[:, : count + 1])
        view.size = count
        view.is_ring = False
        return view

    def _read(self, new: tuple[Tensor, ...]) -> list[Tensor]:
        """The stored features, in the dtypes of new ones."""
        stored = self.used()
        if self.is_quantized:
            count = len(new)
            stored = map(dequantize, stored[:count], stored[count:])
        return [x.type_as(like) for x, like in zip(stored, new, strict=True)]

    def _write(self, ctx: ForwardContext, new: tuple[Tensor, ...]) -> None:
        """Store new features in the slots of their positions."""
        if self.is_quantized:
            values, scales = zip(*map(quantize, new), strict=True)
            new = (*values, *scales)
        # Rows write to different slots, since their lengths differ.
        slots = ctx.cache_slots(self.size)  # (B, T)
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        for buffer, x in zip(self.buffers, new, strict=True):
            buffer[rows, slots] = x.to(buffer.dtype)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) -> its int8 values (..., D), and the scale (..., 1) of each vector in fp16."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    scale = scale.clamp(min=1e-7).half()
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def dequantize(values: Tensor, scale: Tensor) -> Tensor:
    """int8 values (..., D) and their scales (..., 1) -> (..., D) in fp16."""
    return values * scale


class Cache:
    """The cache of a whole model: a LayerCache for each layer, and the tokens of each row, (B,).

    Each layer makes its own, in `Attention.new_cache`; the caller owns them all.
    """

    def __init__(self, lengths: Tensor, layers: list[LayerCache]):
        self.lengths = lengths
        self.layers = layers

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Cache":
        """A cache of changed tensors."""
        return Cache(change(self.lengths), [layer.map(change) for layer in self.layers])

    def row(self, number: int) -> "Cache":
        """A view of one row: what is written to it is written here."""
        return self.map(lambda tensor: tensor[number : number + 1])

    def first(self, count: int) -> "Cache":
        """A view for rows of up to `count` tokens: it shares the memory, and less of it is read."""
        return Cache(self.lengths, [layer.first(count) for layer in self.layers])

    def copy_(self, other: "Cache") -> None:
        """Copy the values of a cache of the same shape into this one."""
        self.lengths.copy_(other.lengths)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.copy_(theirs)

    def reset(self) -> None:
        """Empty all rows for new sequences."""
        self.lengths.zero_()
        for layer in self.layers:
            layer.reset()

    def rewind(self, lengths: Tensor) -> None:
        """Forget all but the first `lengths` (B,) tokens of each row."""
        if not all(layer.can_rewind for layer in self.layers):
            raise ValueError("a ring or a recurrent state cannot be rewound. fix: keep a copy")
        self.lengths.copy_(torch.minimum(self.lengths, lengths))
