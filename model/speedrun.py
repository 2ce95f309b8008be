"""A decoder that leaves the shape which others can load, for a lower loss at the same cost.

ReLU^2, and shortcuts of learned strength from the embedding: into every block, and, where the attention takes values of
an earlier layer, into its values. After modded-nanogpt, github.com/KellerJordan/modded-nanogpt.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.attention.base import Attention, Handed
from model.cache import LayerCache
from model.layers import Embedding, ReLUSquared, rms
from model.positions import Positions
from model.transformer import Block, Transformer


class ShortcutBlock(Block):
    feed_forward = ReLUSquared

    def __init__(self, dim: int, hidden: int, attention: Attention):
        super().__init__(dim, 3 * hidden // 2, attention)  # two matrices, as large as the three of SwiGLU
        self.shortcut = nn.Parameter(torch.empty(1))

    def forward(
        self, x: Tensor, positions: Positions, cache: LayerCache | None, handed: Handed
    ) -> tuple[Tensor, Handed]:
        return super().forward(x + self.shortcut.type_as(x) * handed["embedded"][0], positions, cache, handed)

    def initial(self, name: str, generator: torch.Generator) -> Tensor:
        return torch.zeros(1)


class Speedrun(Transformer):
    """Takes the knobs of Transformer."""

    block = ShortcutBlock

    def __init__(self, *, attention: Callable[..., Attention], **knobs):
        def after_embedding(dim: int, heads: int, context: int, layer: int, depth: int) -> Attention:
            return attention(dim, heads, context, layer + 1, depth + 1)  # the embedding is the layer before

        super().__init__(attention=after_embedding, **knobs)
        width = self.blocks[0].attention.value_width
        self.values = None if width is None else Embedding(knobs["vocab_size"], width)

    def enter(self, tokens: Tensor) -> tuple[Tensor, Handed]:
        x = rms(self.embed(tokens))
        return x, {"embedded": (x,)} | ({} if self.values is None else {"values": (self.values(tokens),)})
