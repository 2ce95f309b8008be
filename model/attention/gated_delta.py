"""Gated delta rule: a matrix per head that forgets, and corrects what it holds. Yang et al., 2412.06464.

    S_t = a_t S_{t-1} + k_t u_t'   with   u_t = b_t (v_t - a_t S_{t-1}' k_t),   and the output S_t' q_t

As in Qwen3-Next, queries, keys and values pass a short causal convolution first. The state and the convolution's last
inputs are all it remembers, whatever the length. Within a chunk of tokens all u_t are solved for at once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention.base import Attention, validate_knobs
from model.cache import LayerCache
from model.context import ForwardContext
from model.layers import Linear, RMSNorm, fp32, no_autocast


class GatedDelta(Attention):
    """Raises ValueError for sizes that are no whole numbers from 1."""

    def __init__(
        self,
        dim: int,
        heads: int,
        context: int,
        layer: int,
        depth: int,
        *,
        head_dim: int | None,
        kernel: int,
        chunk: int,
    ):
        super().__init__()
        validate_knobs(head_dim=head_dim, kernel=kernel, chunk=chunk)
        head_dim = dim // heads if head_dim is None else head_dim
        self.heads, self.head_dim, self.kernel, self.chunk = heads, head_dim, kernel, chunk
        self.q_proj = Linear(dim, heads * head_dim)
        self.k_proj = Linear(dim, heads * head_dim)
        self.v_proj = Linear(dim, heads * head_dim)
        self.taps = nn.Parameter(
            torch.empty(3 * heads * head_dim, 1, kernel)
        )  # of the convolution, newest last
        self.write_proj = Linear(dim, heads)
        self.decay_proj = Linear(dim, heads)
        self.decay_rate = nn.Parameter(torch.empty(heads))  # its logarithm
        self.decay_bias = nn.Parameter(torch.empty(heads))
        self.out_norm = RMSNorm(head_dim)
        self.gate_proj = Linear(dim, heads * head_dim)
        self.o_proj = Linear(heads * head_dim, dim)

    def mix(self, x: Tensor, ctx: ForwardContext, cache: "StateCache | None") -> Tensor:
        mixed = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)
        mixed = F.silu(self.convolve(mixed, ctx, cache))
        q, k, v = (
            fp32(y).unflatten(-1, (self.heads, -1)) for y in mixed.chunk(3, dim=-1)
        )  # (B, T, H, D)
        q, k = (y * (y.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
        write = fp32(self.write_proj(x)).sigmoid()  # b (B, T, H)
        decay = -fp32(self.decay_rate).exp() * F.softplus(
            fp32(self.decay_proj(x)) + fp32(self.decay_bias)
        )  # log a (B, T, H)
        ids = ctx.positions[:, :, None]
        decay = decay.masked_fill(ids == 0, -60.0)  # e^-60 is left of the document before
        write, decay = (
            y.masked_fill(ids < 0, 0.0) for y in (write, decay)
        )  # padding: S_t = S_{t-1}
        empty = (x.shape[0], self.heads, self.head_dim, self.head_dim)
        state = q.new_zeros(empty) if cache is None else cache.state.type_as(q)
        with no_autocast(x.device):
            y, state = delta_rule(q * self.head_dim**-0.5, k, v, write, decay, state, self.chunk)
        if cache is not None:
            cache.state.copy_(state)
        return self.o_proj(
            (
                self.out_norm(y.type_as(x)) * F.silu(self.gate_proj(x).unflatten(-1, y.shape[2:]))
            ).flatten(-2)
        )

    def convolve(self, x: Tensor, ctx: ForwardContext, cache: "StateCache | None") -> Tensor:
        """Each feature of x (B, T, C) with its own `kernel` newest tokens of its document, padding skipped."""
        past = (
            x.new_zeros(x.shape[0], self.kernel - 1, x.shape[2])
            if cache is None
            else cache.inputs.type_as(x)
        )
        line, place = ctx.pack(x)  # the tokens without padding, and where in there each is
        line = torch.cat((past, line), dim=1)
        y = 0.0
        for back in range(self.kernel):
            tap = line[:, self.kernel - 1 - back :][:, : x.shape[1]]
            tap = tap if place is None else tap.gather(1, place[:, :, None].expand_as(x))
            y = y + (tap * self.taps[:, 0, -1 - back].type_as(x)).masked_fill(
                ctx.positions[:, :, None] < back, 0.0
            )
        if cache is not None:
            newest = (
                ctx.lengths[:, None]
                - ctx.cached_lengths[:, None]
                + torch.arange(self.kernel - 1, device=x.device)
            )
            cache.inputs.copy_(line.gather(1, newest[:, :, None].expand_as(past)))
        return y

    def new_cache(
        self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> "StateCache":
        dtype = dtype if dtype.is_floating_point else torch.bfloat16
        state = torch.zeros(
            batch, self.heads, self.head_dim, self.head_dim, dtype=dtype, device=device
        )
        inputs = torch.zeros(
            batch, self.kernel - 1, 3 * self.heads * self.head_dim, dtype=dtype, device=device
        )
        return StateCache(fp32(state), inputs)  # the state accumulates

    def cache_bytes(self, capacity: int, dtype: torch.dtype) -> int:
        itemsize = dtype.itemsize if dtype.is_floating_point else 2
        return (
            self.heads
            * self.head_dim
            * (self.head_dim * max(itemsize, 4) + 3 * (self.kernel - 1) * itemsize)
        )

    def score_flops(self, context: int) -> float:
        return (
            self.heads
            * self.head_dim
            * (8 * min(self.chunk, context) + 6 * self.head_dim + 6 * self.kernel)
        )

    def initial(self, name: str, generator: torch.Generator) -> Tensor:
        if name == "taps":  # at first a token passes as it is
            return F.one_hot(torch.tensor(self.kernel - 1), self.kernel).expand(self.taps.shape)
        return (
            torch.zeros(self.heads)
            if name == "decay_rate"
            else torch.linspace(-6.0, 0.0, self.heads)
        )


class StateCache(LayerCache):
    """The state (B, H, D, D) and the convolution's last inputs (B, kernel - 1, C)."""

    can_rewind = False

    @property
    def state(self) -> Tensor:
        return self.buffers[0]

    @property
    def inputs(self) -> Tensor:
        return self.buffers[1]


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, write: Tensor, decay: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """q, k, v (B, T, H, D), write, decay (B, T, H), state (B, H, D, D) -> output (B, T, H, D), state after.

    A chunk's u solve a triangular system whose right side is linear in the state before it: both parts are solved for
    all chunks together, and only a few products a chunk wait for the state.
    """
    length, chunk = q.shape[1], min(chunk, q.shape[1])
    pad = -length % chunk  # tokens that write and forget nothing
    q, k, v = (
        F.pad(x, (0, 0, 0, 0, 0, pad)).transpose(1, 2).unflatten(2, (-1, chunk)) for x in (q, k, v)
    )
    write, decay = (
        F.pad(x, (0, 0, 0, pad)).transpose(1, 2).unflatten(2, (-1, chunk)) for x in (write, decay)
    )
    write, total = write[..., None], decay.cumsum(dim=-1)[..., None]  # (B, H, N, C, 1)
    fade = (
        (total - total.mT).tril().exp().tril()
    )  # how much of token j is left at token i, (B, H, N, C, C)
    system = (write * (k @ k.mT) * fade).tril(-1)
    right = torch.cat((write * v, write * total.exp() * k), dim=-1)
    fresh, read = torch.linalg.solve_triangular(
        system, right, upper=False, unitriangular=True
    ).chunk(2, dim=-1)
    within, keep, last = (
        (q @ k.mT) * fade,
        (k * fade[..., -1, :, None]).mT,
        total[..., -1:, :].exp(),
    )
    q, outputs = q * total.exp(), []
    for n in range(q.shape[2]):
        u = fresh[:, :, n] - read[:, :, n] @ state
        outputs.append(within[:, :, n] @ u + q[:, :, n] @ state)
        state = last[:, :, n] * state + keep[:, :, n] @ u
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2), state
