"""The cache that a model keeps between forward passes, in tensors that are allocated only once.

Rows are independent. A single tensor holds their lengths for all layers. Storing tokens therefore
changes no Python value, and a compiled decode step is not recompiled when rows grow.
"""

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor
from torch.types import Device

from model.context import AttentionMask, ForwardContext

Shape = tuple[int, ...]  # of one token's feature, or of one row's state


class LayerCache:
    """The cache of one layer; a layer that stores nothing has no tensors.

    features[name] (B, slots, K, E): what is stored for each token, such as its keys. Position p is
        in slot p % size, where size = min(capacity, window, chunk). If size < capacity, the cache
        is a ring; otherwise a row must not outgrow the capacity. The slots from `size` on are never
        used: one slot, or more in the view that `first_slots` returns.
    scales[name] (B, slots, K, 1): in an int8 cache, the fp16 scale of each feature vector. Features
        with E = 1 have none, because they are in fp32 or wider in every cache.
    states[name] (B, ...): tensors without a token axis; the layer writes to them. They are in fp32
        or wider, except that `low_precision_states` are in the cache's dtype (bf16 for int8).
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: Device,
        *,
        features: dict[str, Shape],
        states: dict[str, Shape],
        low_precision_states: tuple[str, ...] = (),
        window: int | None = None,
        chunk: int | None = None,
    ):
        self.window = window
        self.chunk = chunk
        self.size = min(n for n in (capacity, window, chunk) if n is not None)
        self.is_ring = self.size < capacity
        wide_dtype = torch.promote_types(dtype, torch.float32)

        # Token features and their scales.
        self.features: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}

        def new_slots(shape: Shape, dtype: torch.dtype) -> Tensor:
            # With the unused slot, a view of the first n slots is not contiguous if there are
            # several rows, even for n = size. Otherwise, Inductor would specialize a dynamic n to
            # size, and compiling would fail.
            return torch.zeros(batch, self.size + 1, *shape, dtype=dtype, device=device)

        for name, shape in features.items():
            feature_dtype = wide_dtype if shape[-1] == 1 else dtype
            self.features[name] = new_slots(shape, feature_dtype)
            if feature_dtype == torch.int8:
                self.scales[name] = new_slots((*shape[:-1], 1), torch.float16)

        # Row states.
        self.states: dict[str, Tensor] = {}
        narrow_dtype = dtype if dtype.is_floating_point else torch.bfloat16
        for name, shape in states.items():
            state_dtype = narrow_dtype if name in low_precision_states else wide_dtype
            self.states[name] = torch.zeros(batch, *shape, dtype=state_dtype, device=device)

    @property
    def buffers(self) -> list[Tensor]:
        """All of the layer's tensors (B, ...)."""
        return [*self.features.values(), *self.scales.values(), *self.states.values()]

    @property
    def nbytes(self) -> int:
        """The size in bytes of the states and of the first `size` slots, filled or not."""
        slots = [x[:, : self.size] for x in (*self.features.values(), *self.scales.values())]
        return sum(x.nbytes for x in (*slots, *self.states.values()))

    def update(self, ctx: ForwardContext, **new: Tensor) -> tuple[dict[str, Tensor], AttentionMask]:
        """Store the new tokens' features (B, T, ...), passed by name.

        Returns the features (B, S, ...) of the cached and the new tokens, in the dtypes of the new
        features, and which of these tokens each new token attends to.
        """
        assert new.keys() == self.features.keys(), (new.keys(), self.features.keys())
        for name, x in new.items():
            assert x.shape[2:] == self.features[name].shape[2:], (name, x.shape)
        num_new = ctx.positions.shape[1]
        if self.is_ring and num_new > 1:
            # Copy before writing, which may overwrite tokens that the first new tokens attend to.
            cached = self._read(new)
            features = {name: torch.cat((cached[name], x), dim=1) for name, x in new.items()}
            self._write(ctx, new)
            return features, ctx.ring_mask(self.size, self.window, self.chunk)

        assert num_new <= self.size, f"{num_new} tokens exceed the cache's capacity of {self.size}"
        self._write(ctx, new)
        if num_new == self.size and not ctx.has_padding:
            # Either the rows were empty, as when a prompt is prefilled into a view of exactly its
            # size (`first_slots`), or the size is 1 and a token attends only to itself. Attend
            # directly to the new tokens.
            return new, ctx.mask(self.window, self.chunk)
        return self._read(new), ctx.cache_mask(self.size, self.window, self.chunk)

    def last_stored(self, name: str, ctx: ForwardContext) -> Tensor:
        """Return a feature (B, 1, ...) of each row's newest stored token; zeros for an empty row.

        Call it before `update`.
        """
        assert name not in self.scales, f"{name} is stored in int8"
        slots = self.features[name]
        rows = torch.arange(len(slots), device=slots.device)
        feature = slots[rows, (ctx.cached_lengths - 1) % self.size]  # (B, ...)
        is_empty = ctx.cached_lengths == 0  # (B,)
        while is_empty.ndim < feature.ndim:
            is_empty = is_empty[:, None]
        return feature.masked_fill(is_empty, 0.0)[:, None]

    def first_slots(self, count: int) -> "LayerCache":
        """Return a view that uses at most the first `count` slots; it shares the tensors.

        No row may contain more than `count` tokens after the next update. A ring with more than
        `count` slots then does not wrap around, so its view is an ordinary cache.
        """
        # Do not compare with ==, so that compiled code does not specialize on a dynamic count.
        if not self.features or count > self.size or (self.is_ring and count >= self.size):
            return self
        view = copy(self)
        view.size = count
        view.is_ring = False
        return view

    def map(self, change: Callable[[Tensor], Tensor]) -> "LayerCache":
        """Return a copy in which each tensor is replaced by `change(tensor)`."""
        other = copy(self)
        other.features = {name: change(x) for name, x in self.features.items()}
        other.scales = {name: change(x) for name, x in self.scales.items()}
        other.states = {name: change(x) for name, x in self.states.items()}
        return other

    def _read(self, new: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the stored features, in the dtypes of the new features."""
        features = {}
        for name, x in self.features.items():
            x = x[:, : self.size]
            if name in self.scales:
                x = x * self.scales[name][:, : self.size]
            features[name] = x.type_as(new[name])
        return features

    def _write(self, ctx: ForwardContext, new: dict[str, Tensor]) -> None:
        """Store new features in the slots of their positions."""
        slots = ctx.cache_slots(self.size)  # (B, T), or (B, size) if T > size
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        for name, x in new.items():
            x = x[:, -self.size :]
            if name in self.scales:
                x, scale = round_to_int8(x)
                self.scales[name][rows, slots] = scale
            stored = self.features[name]
            stored[rows, slots] = x.to(stored.dtype)


def round_to_int8(x: Tensor, scale_dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    """Round x (..., E) to 255 levels; return int8 values (..., E) and their scale (..., 1)."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    scale = scale.clamp(min=1e-7).to(scale_dtype)
    return (x.float() / scale.float()).round().clamp(-127, 127).to(torch.int8), scale


class Cache:
    """The cache of a whole model: one LayerCache per layer, and the row lengths (B,).

    `Attention.new_cache` allocates the cache of each layer. A row has room for `capacity` tokens.
    Lengths are on the device, so the caller must count the tokens: a row that outgrows the capacity
    is not detected, and its results may be invalid until it is reset.
    """

    def __init__(self, lengths: Tensor, layers: list[LayerCache], capacity: int):
        self.lengths = lengths
        self.layers = layers
        self.capacity = capacity

    def buffers(self) -> list[Tensor]:
        """The tensors of all layers."""
        return [buffer for layer in self.layers for buffer in layer.buffers]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def rows(self, rows: slice) -> "Cache":
        """Return a view of some rows; writes to the view change this cache."""
        layers = [layer.map(lambda buffer: buffer[rows]) for layer in self.layers]
        return Cache(self.lengths[rows], layers, self.capacity)

    def first_slots(self, count: int) -> "Cache":
        """Return a view that uses only the slots that rows of up to `count` tokens need."""
        layers = [layer.first_slots(count) for layer in self.layers]
        return Cache(self.lengths, layers, min(count, self.capacity))

    def gather_rows(self, sources: Tensor) -> None:
        """Replace each row i with a copy of row sources[i]; sources (B,)."""
        for x in (self.lengths, *self.buffers()):
            x.copy_(x[sources])

    def reset(self) -> None:
        """Empty all rows.

        Old features and states stay in memory, but masks hide slots without a position, and the
        token at position 0 ignores the state.
        """
        self.lengths.zero_()
