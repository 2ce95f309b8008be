"""The parts every decoder layer is made of: rotary positions, norms, feed-forwards."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fp32(x: Tensor) -> Tensor:
    """x in fp32, or what it is in when that is finer."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def no_autocast(device: torch.device) -> AbstractContextManager:
    """What is computed inside stays as precise as its inputs, also where autocast would round them."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def apply_softcap(x: Tensor, most: float | None) -> Tensor:
    """x bent by a tanh to stay within +-most. Gemma 2, 2408.00118."""
    return x if most is None else (most * (fp32(x) / most).tanh()).type_as(x)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, H, D): of its first R dimensions, each pair (x[i], x[i + R/2]) turned by its angle. Su, 2104.09864.

    R is twice the width of the tables (B, T, 1, R/2); the dimensions after R stay.
    """
    turned = 2 * cos.shape[-1]
    a, b = fp32(x[..., :turned]).chunk(2, dim=-1)
    return torch.cat(
        ((a * cos - b * sin).type_as(x), (b * cos + a * sin).type_as(x), x[..., turned:]), dim=-1
    )


class Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # where nothing is drawn, after an import that takes long
            super().reset_parameters()


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / rms(x) over the last axis, without a weight."""
    return F.rms_norm(fp32(x), x.shape[-1:], eps=eps).type_as(x)


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last axis, (..., D) to (..., D), computed in fp32. Zhang, 1910.07467."""

    def __init__(self, dim: int):
        super().__init__(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(fp32(x), self.normalized_shape, fp32(self.weight), self.eps).type_as(x)


class SwiGLU(nn.Module):
    """silu(gate(x)) * up(x), projected back down, (B, T, D) to (B, T, D). Shazeer, 2002.05202."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj = Linear(dim, hidden)
        self.up_proj = Linear(dim, hidden)
        self.down_proj = Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ReLUSquared(nn.Module):
    """relu(up(x))^2, projected back down, (B, T, D) to (B, T, D). So et al., 2109.08668."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.up_proj = Linear(dim, hidden)
        self.down_proj = Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())
