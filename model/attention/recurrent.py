"""Attention without a softmax: each head has a state (D, E) instead of all past keys and values.

    S_t = a_t S_{t-1} + k_t u_t',   output S_t' q_t,   with a decay a_t of each head

What u_t is makes the mechanism: the value (retention.py), or its difference from what the state
already gives for the key (gated_delta.py). In these files D is the width of a head's queries and
keys, E that of its values, C the tokens of a chunk, N the number of chunks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.types import Device

from model.attention.base import Attention
from model.cache import LayerCache
from model.context import ForwardContext

# The log decay at the first token of a row or a document: e^-60 of what came before remains.
FORGET_ALL = -60.0


class RecurrentAttention(Attention):
    """Attention whose cache has the state (B, H, D, E) as its first buffer, whatever the length."""

    def __init__(self, heads: int, head_dim: int, value_dim: int, chunk: int):
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.value_dim = value_dim
        self.chunk = chunk

    def recur(
        self,
        rule: Callable[..., tuple[Tensor, Tensor]],
        inputs: tuple[Tensor, ...],
        g: Tensor,
        ctx: ForwardContext,
        cache: LayerCache | None,
    ) -> Tensor:
        """Run `rule(*inputs, g, state, chunk)` -> output (B, T, H, E), from the cached state on.

        g (B, T, H) are log decays. Stores the next state.
        """
        positions = ctx.positions[:, :, None]
        g = g.masked_fill(positions < 0, 0.0)  # padding
        g = g.masked_fill(positions == 0, FORGET_ALL)
        if cache is None:
            state = g.new_zeros(len(g), self.heads, self.head_dim, self.value_dim)
        else:
            state = cache.buffers[0].type_as(g)
        with no_autocast(g.device):
            y, state = rule(*inputs, g, state, self.chunk)
        if cache is not None:
            cache.buffers[0].copy_(state)
        return y

    def new_state(self, batch: int, dtype: torch.dtype, device: Device) -> Tensor:
        """Allocate a state, in fp32 or more: it accumulates over all tokens."""
        dtype = torch.promote_types(dtype, torch.float32)
        shape = (batch, self.heads, self.head_dim, self.value_dim)
        return torch.zeros(shape, dtype=dtype, device=device)


def no_autocast(device: torch.device) -> AbstractContextManager:
    """Context manager that disables autocast, so that results have the dtype of their inputs."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def split_chunks(x: Tensor, chunk: int) -> Tensor:
    """x (B, T, H, D) -> (B, H, N, C, D), padded with zeros, where C = min(chunk, T)."""
    chunk = min(chunk, x.shape[1])
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    return x.transpose(1, 2).unflatten(2, (-1, chunk))


def sum_decays(g: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Log decays g (B, T, H) -> G (B, H, N, C, 1) and M (B, H, N, C, C).

    G_i = g_1 + ... + g_i, and M_ij = exp(G_i - G_j): what remains at token i of token j <= i.
    """
    g_sum = split_chunks(g[..., None], chunk).cumsum(dim=-2)
    # The first tril keeps exp from overflowing above the diagonal.
    decay_mask = (g_sum - g_sum.mT).tril()
    return g_sum, decay_mask.exp().tril()


def run_chunks(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    w: Tensor | None,
    g_sum: Tensor,
    decay_mask: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence from `state` (B, H, D, E) -> output (B, T, H, E), next state.

    q, k, w (B, H, N, C, D) and u (B, H, N, C, E); tokens of a chunk that begins with the state S
    write u, or u - w S. T includes what fills up the last chunk.
    """
    # o_i = sum_{j<=i} M_ij (q_i . k_j) u_j + exp(G_i) S' q_i
    # S_next = exp(G_last) S + sum_j M_last,j k_j u_j'
    scores = (q @ k.mT) * decay_mask
    k = (k * decay_mask.mT[..., -1:]).mT  # (B, H, N, D, C)
    q = q * g_sum.exp()
    decay = g_sum[..., -1:, :].exp()  # (B, H, N, 1, 1)
    outputs = []
    for n in range(q.shape[2]):
        u_n = u[:, :, n]
        if w is not None:
            u_n = u_n - w[:, :, n] @ state
        outputs.append(scores[:, :, n] @ u_n + q[:, :, n] @ state)
        state = decay[:, :, n] * state + k[:, :, n] @ u_n
    y = torch.cat(outputs, dim=2)  # (B, H, N C, E)
    return y.transpose(1, 2), state
