"""What a model remembers between forwards: buffers allocated once, whose rows are independent.

The number of tokens in each row is one tensor for all layers. So a step changes no Python value,
and a decode step compiled once serves every length.
"""

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor
from torch.types import Device

from model.context import ForwardContext, Visibility

Shape = tuple[int, ...]  # without the batch


class LayerCache:
    """The buffers (B, ...) of one layer; a layer that remembers nothing has none."""

    def __init__(self, *buffers: Tensor):
        self.buffers = buffers

    def first(self, count: int) -> "LayerCache":
        """A view for rows of up to `count` tokens: it shares the memory, and less of it is read."""
        return self

    def map(self, change: Callable[[Tensor], Tensor]) -> "LayerCache":
        """A copy of this object with `change(buffer)` in place of each buffer."""
        other = copy(self)
        other.buffers = tuple(map(change, self.buffers))
        return other


class KVCache(LayerCache):
    """Features of the newest tokens: position p is in slot p % size (see ForwardContext).

    `size` is the smallest of capacity, window and chunk. If it is below the capacity, the cache is a
    ring; otherwise every position has its own slot, and a caller that exceeds the capacity, which
    nothing checks, overwrites the oldest. A feature of shape (K, D), such as the keys, has a
    buffer (B, size, K, D). In int8, a second buffer (B, size, K, 1) holds an fp16 scale for each
    vector of D values; a feature with D = 1 stays in fp32. `state` has the shapes of fp32 buffers
    that a row has once, whatever its length.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        window: int | None,
        chunk: int | None,
        features: Sequence[Shape],
        state: Sequence[Shape],
        dtype: torch.dtype,
        device: Device,
    ):
        self.window = window
        self.chunk = chunk
        self.size = min(n for n in (capacity, window, chunk) if n is not None)
        self.is_ring = self.size < capacity

        # Buffers of the features, of their scales and of the state.
        exact = torch.promote_types(dtype, torch.float32)
        buffers = []
        for shape in features:
            stored = exact if shape[-1] == 1 else dtype
            buffers.append(torch.zeros(batch, self.size, *shape, dtype=stored, device=device))
        for buffer in buffers[:]:
            if buffer.dtype == torch.int8:
                buffers.append(torch.zeros_like(buffer[..., :1], dtype=torch.float16))
        self.num_slotted = len(buffers)  # those with a slot for each token; the state is behind
        for shape in state:
            buffers.append(torch.zeros(batch, *shape, dtype=exact, device=device))
        super().__init__(*buffers)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The buffers that have no slots; a layer writes to them in place."""
        return self.buffers[self.num_slotted :]

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
        if num_new == self.size and not ctx.has_padding:
            # As many new tokens as slots: the cache was empty, and they are all there is to see.
            return list(new), ctx.visible(self.window, self.chunk)
        return self._read(new), ctx.visible_in_cache(self.size, self.window, self.chunk)

    def first(self, count: int) -> "KVCache":
        if count >= self.size:
            return self
        view = self.map(lambda buffer: buffer[:, :count])
        view.buffers = view.buffers[: self.num_slotted] + self.state
        view.size = count
        view.is_ring = False
        return view

    def _read(self, new: tuple[Tensor, ...]) -> list[Tensor]:
        """The stored features, in the dtypes of new ones."""
        scales = iter(self.buffers[len(new) :])
        features = []
        for like, x in zip(new, self.buffers, strict=False):
            if x.dtype == torch.int8:
                x = x * next(scales)
            features.append(x.type_as(like))
        return features

    def _write(self, ctx: ForwardContext, new: tuple[Tensor, ...]) -> None:
        """Store new features in the slots of their positions."""
        slots = ctx.cache_slots(self.size)  # (B, T), or fewer where not all tokens fit
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        scales = iter(self.buffers[len(new) :])
        for x, buffer in zip(new, self.buffers, strict=False):
            x = x[:, -self.size :]
            if buffer.dtype == torch.int8:
                x, scale = quantize(x)
                next(scales)[rows, slots] = scale
            buffer[rows, slots] = x.to(buffer.dtype)


def quantize(x: Tensor, scale_dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    """x (..., D) -> its values (..., D) rounded to 255 levels in int8, and their scale (..., 1)."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    scale = scale.clamp(min=1e-7).to(scale_dtype)
    return (x.float() / scale.float()).round().clamp(-127, 127).to(torch.int8), scale


class Cache:
    """The cache of a whole model: a LayerCache for each layer, and the tokens of each row, (B,).

    Each layer makes its own, in `Attention.new_cache`; the caller owns them all.
    """

    def __init__(self, lengths: Tensor, layers: list[LayerCache]):
        self.lengths = lengths
        self.layers = layers

    def buffers(self) -> list[Tensor]:
        """The buffers of all layers."""
        return [buffer for layer in self.layers for buffer in layer.buffers]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    def rows(self, rows: slice) -> "Cache":
        """A view of some rows: what is written to it is written here."""
        layers = [layer.map(lambda buffer: buffer[rows]) for layer in self.layers]
        return Cache(self.lengths[rows], layers)

    def first(self, count: int) -> "Cache":
        """A view for rows of up to `count` tokens: it shares the memory, and less of it is read."""
        return Cache(self.lengths, [layer.first(count) for layer in self.layers])

    def gather_rows(self, sources: Tensor) -> None:
        """Let each row be a copy of the row with its number in `sources` (B,)."""
        for x in (self.lengths, *self.buffers()):
            x.copy_(x[sources])

    def reset(self) -> None:
        """Empty all rows: no token sees a slot without a position, and position 0 no state."""
        self.lengths.zero_()
