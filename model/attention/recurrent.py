"""Gated linear recurrences: each head keeps a state (E, F) instead of all past keys and values.

    S_t = Diag(a_t) S_{t-1} + k_t u_t'   with   u_t = v_t - b_t (Diag(a_t) S_{t-1})' k_t

The output is S_t' q_t. The decay a_t is one number per head, or one per channel (the E axis of S).
With b_t > 0, u_t corrects the value that the state already returns for the key: the delta rule.
With b_t = 0, values are only added (Mamba-2, retention.py).
"""

from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention.base import Attention, LayerSpec, Shared
from model.attention.short_conv import ShortConv
from model.cache import LayerCache, Shape
from model.context import ForwardContext
from model.layers import ACTIVATIONS, Linear, RMSNorm, fp32, no_autocast, project, split_heads
from run.ranges import PositiveInt

# The log decay at the first token of a row or document, where e^-60 of the earlier state remains.
FORGET_ALL = -60.0

# `block_product` computes products of smaller matrices as sums, because a GPU multiplies tiles of
# 16 rows or more, and each product would be a separate library kernel.
MIN_PRODUCT_SIZE = 16


class RecurrentAttention(Attention):
    """Attention that caches a state (B, H, E, F), whose size does not depend on the length.

    Tokens are processed in chunks of `chunk` tokens (or T, if smaller), rounded up to a power of
    two. Except for rounding errors, the chunk size does not affect the result. (`Attention.chunk`
    is something else: a limit on the tokens that a token attends to.)
    """

    def __init__(self, heads: int, head_dim: int, value_dim: int, chunk: int):
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.value_dim = value_dim
        self.chunk_size = chunk

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        g: Tensor,
        ctx: ForwardContext,
        cache: LayerCache | None,
    ) -> Tensor:
        """Run `recurrence` from the cached state, and store the new one. Returns (B, T, H, F)."""
        positions = ctx.positions[:, :, None, None]
        g = g.masked_fill(positions < 0, 0.0)  # padding
        g = g.masked_fill(positions == 0, FORGET_ALL)
        if cache is None:
            state = g.new_zeros(len(g), self.heads, self.head_dim, self.value_dim)
        else:
            state = cache.states["state"].type_as(g)
        with no_autocast(g.device):
            y, state = recurrence(q, k, v, beta, g, state, self.chunk_size)
        if cache is not None:
            cache.states["state"].copy_(state)
        return y

    def state_shapes(self, capacity: int) -> dict[str, Shape]:
        return {"state": (self.heads, self.head_dim, self.value_dim)}

    def attention_flops(self, context: int) -> float:
        # Per head: scores and their product with values in a chunk; writing and reading the state.
        in_chunk = 2 * (self.head_dim + self.value_dim) * min(self.chunk_size, context)
        return self.heads * (in_chunk + 4 * self.head_dim * self.value_dim)


class GatedRecurrence(RecurrentAttention):
    """A recurrence with gated outputs; q, k and v pass through a convolution over `kernel` tokens.

    With `erase`, it is the delta rule, and keys have unit length. Without it, the more a token
    decays the state, the more it writes. With `low_rank`, decays and gates are projected from
    latents of `head_dim` features. Published combinations:

        Gated DeltaNet        erase     one decay per head                   2412.06464
        Kimi Delta Attention  erase     one decay per channel, low_rank      2510.26692
        Mamba-2               no erase  one decay per head                   2405.21060
    """

    low_precision_states = ("conv",)  # the convolution's past inputs, which accumulate no errors

    def __init__(
        self,
        spec: LayerSpec,
        *,
        head_dim: PositiveInt | None,
        kernel: PositiveInt,
        chunk: PositiveInt,
        decay: Literal["head", "channel"],
        erase: bool,
        gate: Literal["silu", "sigmoid"],
        low_rank: bool,
    ):
        dim = spec.dim
        heads = spec.heads
        if head_dim is None:
            head_dim = dim // heads
        width = heads * head_dim
        super().__init__(heads, head_dim, head_dim, chunk)

        # Queries, keys, values, and their convolution.
        self.q_proj = Linear(dim, width)
        self.k_proj = Linear(dim, width)
        self.v_proj = Linear(dim, width)
        self.conv = ShortConv(3 * width, kernel)

        # The latents from which decays and gates are projected.
        self.decay_latent = nn.Identity()
        self.gate_latent = nn.Identity()
        rank = dim
        if low_rank:
            rank = head_dim
            self.decay_latent = Linear(dim, rank)
            self.gate_latent = Linear(dim, rank)

        # b = sigmoid(write_proj(x)), log a = -exp(decay_rate) softplus(decay_proj(.) + decay_bias)
        num_decays = {"head": heads, "channel": width}[decay]
        self.write_proj = Linear(dim, heads) if erase else None
        self.decay_proj = Linear(rank, num_decays)
        self.decay_rate = nn.Parameter(torch.empty(heads))
        self.decay_bias = nn.Parameter(torch.empty(num_decays))

        # The output, normalized and gated.
        self.out_norm = RMSNorm(head_dim, spec.norm_eps)
        self.gate_proj = Linear(rank, width)
        self.gate_activation = ACTIVATIONS[gate]
        self.o_proj = Linear(width, dim)

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        # Project and convolve.
        qkv = torch.cat([*project(x, self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        past = None if cache is None else cache.states["conv"]
        qkv = F.silu(self.conv(qkv, ctx, past))  # (B, T, 3 H E)
        qkv = to_product_dtype(qkv).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.unbind(dim=2)  # (B, T, H, E)

        # The log decay g, (B, T, H, 1) or (B, T, H, E).
        dt = fp32(self.decay_proj(self.decay_latent(x))) + fp32(self.decay_bias)
        dt = split_heads(F.softplus(dt), self.heads)
        g = -fp32(self.decay_rate).exp()[:, None] * dt

        # How much of the value is written, and how much of the state is erased.
        if self.write_proj is None:
            k = (dt * k).type_as(k)
            beta = None
        else:
            q = l2_norm(q)
            k = l2_norm(k)
            beta = fp32(self.write_proj(x)).sigmoid()[..., None]  # (B, T, H, 1)
            v = (beta * v).type_as(v)

        # Run the recurrence, normalize, gate and project back.
        y = self.recur(q * self.head_dim**-0.5, k, v, beta, g, ctx, cache)
        y = self.out_norm(y.type_as(x))
        gate = self.gate_proj(self.gate_latent(x)).unflatten(-1, y.shape[2:])
        y = y * self.gate_activation(gate)
        return self.o_proj(y.flatten(-2)), shared

    def state_shapes(self, capacity: int) -> dict[str, Shape]:
        return super().state_shapes(capacity) | {"conv": self.conv.state_shape}

    def attention_flops(self, context: int) -> float:
        flops = super().attention_flops(context) + self.conv.flops
        if self.write_proj is not None:
            # Per feature of each head: the chunk's triangular system, and the state's prediction.
            per_feature = 4 * min(self.chunk_size, context) + 2 * self.head_dim
            flops += self.heads * self.head_dim * per_feature
        return flops

    def init_param(self, name: str, generator: torch.Generator) -> Tensor:
        if name == "decay_bias":  # ranges from slow to fast decay
            return torch.linspace(-6.0, 0.0, len(self.decay_bias))
        return super().init_param(name, generator)


def l2_norm(x: Tensor) -> Tensor:
    """Scale x (..., E) to unit length."""
    square = fp32(x).square().sum(dim=-1, keepdim=True)
    return (x * (square + 1e-6).rsqrt()).type_as(x)


def to_product_dtype(x: Tensor) -> Tensor:
    """Cast x to the dtype of a recurrence's products, as `fp32` does, but keep bf16 on a GPU."""
    # A GPU then moves half as many bytes between its kernels. fp16 might overflow.
    if x.is_cuda and x.dtype == torch.bfloat16:
        return x
    return fp32(x)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over chunks of tokens, starting from `state` (B, H, E, F).

    q, k (B, T, H, E), v (B, T, H, F), b in `beta` (B, T, H, 1), or None for b = 0, and log decays
    g (B, T, H, 1) or (B, T, H, E) -> output (B, T, H, F), next state.

    `beta`, g, the state and the inversion of the triangular system are in fp32. Other products are
    in the dtype of q, k and v; decays are applied in fp32 before a factor is rounded to that dtype.

    In a chunk that starts from state S, one triangular system gives all u_t. They are linear in S,
    so the systems of all chunks are solved together. Only two matrix products per chunk have to
    wait for S, or none without `beta`. Chunked delta rule: 2406.06484; with a decay per head:
    2412.06464; with a decay per channel: 2510.26692.
    """
    length = q.shape[1]
    assert k.shape == q.shape, (k.shape, q.shape)
    assert v.shape[:3] == g.shape[:3] == q.shape[:3], (v.shape, g.shape, q.shape)
    assert g.shape[3] in (1, q.shape[3]), (g.shape, q.shape)
    assert state.shape[2:] == (q.shape[3], v.shape[3]), (state.shape, q.shape, v.shape)
    chunk = 1 << (min(chunk, length) - 1).bit_length()
    q = split_chunks(q, chunk)  # (B, H, N, C, E)
    k = split_chunks(k, chunk)
    u = split_chunks(v, chunk)  # (B, H, N, C, F)
    # G_i = g_1 + ... + g_i, so a fraction exp(G_i - G_j) of token j remains at token i.
    g_sum = split_chunks(g, chunk).cumsum(dim=-2)  # (B, H, N, C, 1 or E)
    decay = g_sum.exp()

    if beta is None:
        w = None
        (scores,) = decayed_products((q,), k, g_sum)
    else:
        # u_i + b_i sum_{j<i} (k_i . exp(G_i - G_j) k_j) u_j = v_i - b_i S' (exp(G_i) k_i).
        # With (I + A) u_v = v and (I + A) w = b exp(G) k, the solution is u = u_v - w S. A is the
        # part of `system` below the diagonal; the solver adds I.
        erased = (split_chunks(beta, chunk) * k).type_as(k)
        scores, system = decayed_products((q, erased), k, g_sum)
        solution = torch.cat((u, (decay * erased).type_as(u)), dim=-1)
        if length > 1:  # with one token, A = 0
            solution = UnitTriangularSolve.apply(fp32(system), solution)
        u, w = solution.tensor_split([u.shape[-1]], dim=-1)

    # o_i = sum_{j<=i} (q_i . exp(G_i - G_j) k_j) u_j + S' (exp(G_i) q_i)
    # S_next = Diag(exp(G_last)) S + sum_j (exp(G_last - G_j) k_j) u_j'
    g_last = g_sum[..., -1:, :]
    k = ((g_last - g_sum).exp() * k).type_as(u).mT  # (B, H, N, E, C)
    q = (decay * q).type_as(u)
    chunk_decay = g_last.exp().mT  # (B, H, N, 1 or E, 1)

    # Compute the states one chunk after another, then the outputs of all chunks at once.
    decays = chunk_decay.unbind(dim=2)
    states = []
    if w is None:
        for decay_n, update in zip(decays, (k @ u).unbind(dim=2), strict=True):
            states.append(state)
            state = decay_n * state + update
    else:
        corrected = []
        chunks = zip(decays, k.unbind(dim=2), u.unbind(dim=2), w.unbind(dim=2), strict=True)
        for decay_n, k_n, u_n, w_n in chunks:
            states.append(state)
            corrected.append(u_n - w_n @ state.type_as(u))
            state = decay_n * state + k_n @ corrected[-1]
        u = torch.stack(corrected, dim=2)
    y = scores.type_as(u) @ u + q @ torch.stack(states, dim=2).type_as(u)
    y = y.flatten(2, 3).transpose(1, 2)  # (B, N C, H, F)
    return y[:, :length], state


def split_chunks(x: Tensor, chunk: int) -> Tensor:
    """x (B, T, H, E) -> (B, H, N, C, E), padded with zeros, where C = chunk."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    return x.transpose(1, 2).unflatten(2, (-1, chunk))


def decayed_products(xs: tuple[Tensor, ...], k: Tensor, g_sum: Tensor) -> Iterable[Tensor]:
    """x_i . exp(G_i - G_j) k_j for j <= i, and 0 elsewhere: (..., C, C) for each x in `xs`.

    x, k (..., C, E), G (..., C, 1) or (..., C, E).
    """
    if g_sum.shape[-1] == 1:
        # The first tril prevents exp from overflowing above the diagonal.
        decay_mask = (g_sum - g_sum.mT).tril().exp().tril()
        return [(x @ k.mT) * decay_mask for x in xs]

    # With a decay per channel, exp(G_i - G_j) is inside the product, and C x C x E numbers are too
    # many to store. Splitting this factor into exp(G_i) and exp(-G_j) could overflow, because G
    # falls by 60 or more per document. But for a token m between j and i, exp(G_i - G_m) and
    # exp(G_m - G_j) are at most 1. So i and j are taken from two adjacent blocks of 1, 2, 4 ...
    # C / 2 tokens, and m is the last token of the first block.
    x = torch.stack(xs, dim=-3)  # (..., X, C, E), X = len(xs)
    products = (x * k[..., None, :, :]).sum(dim=-1)[..., None, None]  # blocks (..., X, C, 1, 1)
    chunk = k.shape[-2]
    sizes = [1 << level for level in range(chunk.bit_length() - 1)]
    if not sizes:
        return products[..., 0].unbind(dim=-3)

    # For each size, C / 2 tokens are in first blocks and C / 2 in second blocks. The product of all
    # of them contains the products of block pairs on its diagonal. The other elements are not used,
    # but all sizes then share one batched product, of matrices that are large enough to be fast.
    rows = []
    columns = []
    for size in sizes:
        pairs = (-1, 2, size)  # (..., C, E) -> (..., C / (2 size), 2, size, E)
        g_first, g_second = g_sum.unflatten(-2, pairs).unbind(dim=-3)
        g_middle = g_first[..., -1:, :]
        x_second = x.unflatten(-2, pairs)[..., 1, :, :]
        k_first = k.unflatten(-2, pairs)[..., 0, :, :]
        x_second = x_second * (g_second - g_middle).exp().unsqueeze(-4)
        k_first = k_first * (g_middle - g_first).exp()
        rows.append(x_second.type_as(k).flatten(-4, -2))  # (..., X C / 2, E)
        columns.append(k_first.type_as(k).flatten(-3, -2))  # (..., C / 2, E)
    below = torch.stack(rows) @ torch.stack(columns).mT
    below = below.unflatten(-2, (len(xs), -1))  # (sizes, ..., X, C / 2, C / 2)
    for size, product in zip(sizes, below.unbind(dim=0), strict=True):
        products = merge_blocks(products, diagonal_blocks(product, size))
    return products.squeeze(-3).unbind(dim=-3)


class UnitTriangularSolve(torch.autograd.Function):
    """Solve (I + A) X = Y for X, where A is the part of `system` below the diagonal.

    system (..., C, C) in fp32, Y (..., C, F) -> X (..., C, F) in the dtype of Y
    """

    @staticmethod
    def forward(ctx, system: Tensor, y: Tensor) -> Tensor:
        inverse = unit_triangular_inverse(system).type_as(y)
        x = inverse @ y
        ctx.save_for_backward(inverse, x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        inverse, x = ctx.saved_tensors
        grad_y = inverse.mT @ grad
        return -fp32(grad_y @ x.mT).tril(-1), grad_y


def unit_triangular_inverse(system: Tensor) -> Tensor:
    """Invert I + A (..., C, C), where A is the part of `system` below the diagonal.

    The inverses of diagonal blocks, initially of one token each, are merged in pairs:

        [P 0]^-1   [     P^-1       0  ]
        [Q R]    = [-R^-1 Q P^-1   R^-1]

    With unit-length keys and b <= 1, all elements of these inverses are between -1 and 1: below the
    diagonal, they are -b_i k_i' M k_j, where M only decays and erases. The series I - A + A^2 - ...
    also gives the inverse, but with 64 equal keys, its terms can reach almost 5e17 and cancel out.
    """
    chunk = system.shape[-1]
    inverse = system.new_ones(*system.shape[:-2], chunk, 1, 1)
    while inverse.shape[-3] > 1:
        size = inverse.shape[-1]
        first, second = inverse.unflatten(-3, (-1, 2)).unbind(dim=-3)
        below = diagonal_blocks(system, 2 * size)[..., size:, :size]
        below = block_product(second, block_product(below, first))
        inverse = merge_blocks(inverse, -below)
    return inverse.squeeze(-3)


def diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """x (..., C, C) -> (..., C / size, size, size)"""
    blocks = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def merge_blocks(blocks: Tensor, below: Tensor) -> Tensor:
    """Merge diagonal blocks (..., 2 N, L, L) and the N blocks `below` into (..., N, 2 L, 2 L)."""
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(dim=-3)
    first = F.pad(first, (0, first.shape[-1]))
    second = torch.cat((below, second), dim=-1)
    return torch.cat((first, second), dim=-2)


def block_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b for square matrices; for small ones, as a sum, which the compiler can fuse."""
    if a.shape[-1] < MIN_PRODUCT_SIZE:
        return (a[..., None] * b[..., None, :, :]).sum(dim=-2)
    return a @ b
