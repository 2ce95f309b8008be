"""Building blocks of decoder layers: rotary positions, norms, feed-forwards."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fp32(x: Tensor) -> Tensor:
    """Cast x to fp32, or leave it in fp64."""
    return x if x.dtype == torch.float64 else x.float()


def no_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context manager that disables autocast, so that results keep their inputs' dtype."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """x (B, T, H E) -> (B, T, H, E)"""
    return x.unflatten(-1, (heads, -1))


def apply_softcap(x: Tensor, softcap: float | None) -> Tensor:
    """Bound x to [-softcap, softcap] with a tanh in fp32; None: no bound. Gemma 2, 2408.00118."""
    if softcap is None:
        return x
    y = (fp32(x) / softcap).tanh()
    return (softcap * y).type_as(x)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + R/2]) of the first R features by its angle. Su, 2104.09864.

    x (B, T, H, E), cos and sin (B, T, 1, R/2) -> (B, T, H, E). Other features are unchanged.
    """
    rotary_dim = 2 * cos.shape[-1]
    assert rotary_dim <= x.shape[-1], (x.shape, cos.shape)
    a, b = fp32(x[..., :rotary_dim]).chunk(2, dim=-1)
    rotated_a = (a * cos - b * sin).type_as(x)
    rotated_b = (b * cos + a * sin).type_as(x)
    return torch.cat((rotated_a, rotated_b, x[..., rotary_dim:]), dim=-1)


class Linear(nn.Linear):
    """A linear layer, by default without a bias; inference/quantize.py can replace it."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Leave the initialization to model/init.py or to a checkpoint."""


class FusedPart(nn.Module):
    """Outputs `start` to `stop` of a larger linear layer: x (..., N) -> (..., stop - start)."""

    def __init__(self, fused: nn.Module, start: int, stop: int):
        super().__init__()
        self.fused = fused
        self.start = start
        self.stop = stop

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x)[..., self.start : self.stop]


def project(x: Tensor, *linears: nn.Module) -> Iterator[Tensor]:
    """Apply linear layers to the same x (..., N); yield each layer's output.

    For decoding, inference/quantize.py makes the layers named in a module's `fused_projections`
    parts of one larger layer, because one product takes less time than several small ones.
    Separate layers compute an output only when the caller requests it, because compiled training on
    a CPU is faster if each output is processed before the next one is computed (docs/dev/log.md).
    """
    if not isinstance(linears[0], FusedPart):
        for linear in linears:
            yield linear(x)
        return
    fused = linears[0].fused
    assert all(part.fused is fused for part in linears)
    y = fused(x)
    for part in linears:
        yield y[..., part.start : part.stop]


class Embedding(nn.Embedding):
    """A table of token vectors (V, D)."""

    def reset_parameters(self) -> None:
        """Leave the initialization to model/init.py or to a checkpoint."""


def rms(x: Tensor, eps: float) -> Tensor:
    """x (..., D) / rms(x) without a weight, computed over the last axis in fp32."""
    y = F.rms_norm(fp32(x), x.shape[-1:], eps=eps)
    return y.type_as(x)


class RMSNorm(nn.RMSNorm):
    """x (..., D) / rms(x) * weight, computed over the last axis in fp32. Zhang, 1910.07467."""

    def __init__(self, dim: int, eps: float):
        super().__init__(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(fp32(x), self.normalized_shape, fp32(self.weight), self.eps)
        return y.type_as(x)


class LayerNorm(nn.LayerNorm):
    """(x - mean(x)) / std(x) * weight + bias, over the last axis in fp32. Ba, 1607.06450."""

    def __init__(self, dim: int, eps: float):
        super().__init__(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        weight = fp32(self.weight)
        bias = fp32(self.bias)
        y = F.layer_norm(fp32(x), self.normalized_shape, weight, bias, self.eps)
        return y.type_as(x)


def relu2(x: Tensor) -> Tensor:
    """relu(x)^2. Primer, 2109.08668."""
    return F.relu(x).square()


# Named as in `transformers`.
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu2": relu2, "sigmoid": F.sigmoid}
Activation = Literal["silu", "gelu", "relu2"]


class FeedForward(nn.Module):
    """down_proj(activation(up_proj(x))) for x (B, T, D). Vaswani, 1706.03762.

    `hidden` is the inner width. The last projection of every feed-forward is called `down_proj`
    and starts at zero.
    """

    def __init__(self, dim: int, hidden: int, *, activation: Activation):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.up_proj = Linear(dim, hidden)
        self.down_proj = Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


class GatedFeedForward(nn.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x)) for x (B, T, D). Shazeer, 2002.05202.

    With silu, this is SwiGLU; with gelu, it is GEGLU.
    """

    fused_projections = ("gate_proj", "up_proj")

    def __init__(self, dim: int, hidden: int, *, activation: Activation):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate_proj = Linear(dim, hidden)
        self.up_proj = Linear(dim, hidden)
        self.down_proj = Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        projected = project(x, self.gate_proj, self.up_proj)
        gate = self.activation(next(projected))
        return self.down_proj(gate * next(projected))


def no_feed_forward(dim: int, hidden: int) -> None:
    """Omit a layer's feed-forward, as in Zoology's models, 2312.04927."""


def take_along(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Compute x.take_along_dim(index, dim). Other dimensions of `index` match x or have size 1.

    Unlike take_along_dim, it keeps dynamic sizes dynamic in compiled code.
    """
    shape = list(x.shape)
    shape[dim] = index.shape[dim]
    return x.gather(dim, index.expand(shape))
