"""A causal depthwise convolution over the last few tokens.

Gated DeltaNet and Canon layers (2512.17351) use it to mix neighboring queries, keys and values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.context import ForwardContext


class ShortConv(nn.Module):
    """Replaces each of W features by a weighted sum of its values at the last `kernel` tokens.

    Tokens of other documents are excluded. It starts as the identity and has no activation.
    """

    def __init__(self, width: int, kernel: int):
        super().__init__()
        self.kernel = kernel
        self.flops = 2 * width * kernel  # per token, forward only
        self.state_shape = (kernel - 1, width)  # past inputs stored per row
        self.taps = nn.Parameter(torch.empty(width, 1, kernel))  # newest token last

    def forward(self, x: Tensor, ctx: ForwardContext, past: Tensor | None = None) -> Tensor:
        """x (B, T, W) -> (B, T, W)

        `past` (B, kernel - 1, W) holds the inputs before x, and is updated in place.
        """
        length = x.shape[1]
        assert x.shape[-1] == len(self.taps), (x.shape, self.taps.shape)
        if past is None:
            inputs = F.pad(x, (0, 0, self.kernel - 1, 0))
        else:
            inputs = torch.cat((past.type_as(x), x), dim=1)
            past.copy_(inputs[:, length:])

        positions = ctx.positions[:, :, None]
        y = 0.0
        for lag in range(self.kernel):
            lagged = inputs.narrow(1, self.kernel - 1 - lag, length)  # (B, T, W), `lag` tokens ago
            term = lagged * self.taps[:, 0, -1 - lag].type_as(x)
            y = y + term.masked_fill(positions < lag, 0.0)
        return y

    def init_param(self, name: str, generator: torch.Generator) -> Tensor:
        """Return taps that pass the newest token through unchanged."""
        return torch.eye(self.kernel)[-1].expand(self.taps.shape)
