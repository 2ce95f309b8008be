"""Gated delta rule: a matrix per head that decays and corrects itself. Yang et al., 2412.06464.

    S_t = a_t S_{t-1} + k_t u_t'   with   u_t = b_t (v_t - a_t S_{t-1}' k_t),   output S_t' q_t

As in Qwen3-Next, queries, keys and values pass a short causal convolution first. The cache holds
the state S (D, D) and the convolution's last inputs, whatever the length.
In this file D is the width of a head, C the features of q, k and v together, N the chunks.
"""

from importlib.metadata import PackageNotFoundError, version

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention.base import Attention, CrossLayer, LayerSpec, validate_knobs
from model.cache import LayerCache
from model.context import ForwardContext
from model.layers import Linear, RMSNorm, fp32, no_autocast, on_gpu, project

# The log decay at the first token of a document: e^-60 of the document before remains.
FORGET_ALL = -60.0

# The kernels are internal functions of flash-linear-attention, as they are in 0.6.
try:
    HAS_FLA = version("flash-linear-attention").startswith("0.6.")
except PackageNotFoundError:
    HAS_FLA = False


class StateCache(LayerCache):
    """The state (B, H, D, D) and the convolution's last inputs (B, kernel - 1, C)."""

    @property
    def state(self) -> Tensor:
        return self.buffers[0]

    @property
    def conv_state(self) -> Tensor:
        return self.buffers[1]


class GatedDelta(Attention):
    """`kernel` is the width of the convolution, `chunk` the chunk size of `delta_rule`, in tokens.

    Raises ValueError for sizes below 1.
    """

    def __init__(self, spec: LayerSpec, *, head_dim: int | None, kernel: int, chunk: int):
        super().__init__()
        validate_knobs(head_dim=head_dim, kernel=kernel, chunk=chunk)
        dim = spec.dim
        heads = spec.heads
        if head_dim is None:
            head_dim = dim // heads
        width = heads * head_dim
        self.heads = heads
        self.head_dim = head_dim
        self.kernel = kernel
        self.chunk = chunk

        # Queries, keys, values, and the weights of their convolution, newest token last.
        self.q_proj = Linear(dim, width)
        self.k_proj = Linear(dim, width)
        self.v_proj = Linear(dim, width)
        self.taps = nn.Parameter(torch.empty(3 * width, 1, kernel))

        # b = sigmoid(write_proj(x)), log a = -exp(decay_rate) softplus(decay_proj(x) + decay_bias)
        self.write_proj = Linear(dim, heads)
        self.decay_proj = Linear(dim, heads)
        self.decay_rate = nn.Parameter(torch.empty(heads))
        self.decay_bias = nn.Parameter(torch.empty(heads))

        # The output, normalized and gated.
        self.out_norm = RMSNorm(head_dim, spec.norm_eps)
        self.gate_proj = Linear(dim, width)
        self.o_proj = Linear(width, dim)

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: StateCache | None, carry: CrossLayer
    ) -> tuple[Tensor, CrossLayer]:
        """x (B, T, D) -> (B, T, D)"""
        # Project, convolve, and normalize queries and keys to length 1.
        q, k, v, beta_logit, decay_logit, gate = project(
            x,
            self.q_proj,
            self.k_proj,
            self.v_proj,
            self.write_proj,
            self.decay_proj,
            self.gate_proj,
        )
        qkv = torch.cat((q, k, v), dim=-1)  # (B, T, C)
        qkv = F.silu(self.short_conv(qkv, ctx, cache))
        dtype = qkv.dtype
        qkv = fp32(qkv).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.unbind(dim=2)  # (B, T, H, D)
        q = l2_norm(q) * self.head_dim**-0.5
        k = l2_norm(k)

        # beta and the log decay g, (B, T, H).
        beta = fp32(beta_logit).sigmoid()
        rate = fp32(self.decay_rate).exp()
        decay_logit = fp32(decay_logit) + fp32(self.decay_bias)
        g = -rate * F.softplus(decay_logit)

        # A document starts from an empty state. Padding leaves the state as it is: S_t = S_{t-1}.
        positions = ctx.positions[:, :, None]
        is_padding = positions < 0
        g = g.masked_fill(positions == 0, FORGET_ALL)
        beta = beta.masked_fill(is_padding, 0.0)
        g = g.masked_fill(is_padding, 0.0)

        # Run the recurrence from the cached state.
        if cache is None:
            state = q.new_zeros(len(x), self.heads, self.head_dim, self.head_dim)
        else:
            state = cache.state.type_as(q)
        with no_autocast(x.device):
            # The kernels of flash-linear-attention need half precision and a head_dim up to 256.
            fits_fla = dtype.itemsize == 2 and x.shape[1] > 1 and self.head_dim <= 256
            if HAS_FLA and on_gpu(x) and fits_fla:
                from model.attention.fla_delta_rule import fla_delta_rule

                q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
                y, state, *_ = fla_delta_rule(q, k, v, beta, g, state)
            else:
                y, state = delta_rule(q, k, v, beta, g, state, self.chunk)
        if cache is not None:
            cache.state.copy_(state)

        # Normalize, gate and project back.
        gate = gate.unflatten(-1, y.shape[2:])
        y = self.out_norm(y.type_as(x))
        y = y * F.silu(gate)
        return self.o_proj(y.flatten(-2)), carry

    def short_conv(self, x: Tensor, ctx: ForwardContext, cache: StateCache | None) -> Tensor:
        """Convolve each feature of x (B, T, C) over its `kernel` newest tokens.

        The tokens are those of the same document; padding is skipped.
        """
        batch, length, width = x.shape
        if cache is None:
            past = x.new_zeros(batch, self.kernel - 1, width)
        else:
            past = cache.conv_state.type_as(x)
        packed, indices = ctx.pack(x)  # the tokens without padding, and where in them each is
        packed = torch.cat((past, packed), dim=1)
        if indices is not None:
            indices = indices[:, :, None].expand_as(x)

        positions = ctx.positions[:, :, None]
        y = 0.0
        for lag in range(self.kernel):
            start = self.kernel - 1 - lag
            lagged = packed.narrow(1, start, length)  # (B, T, C), `lag` tokens ago
            if indices is not None:
                lagged = lagged.gather(1, indices)
            weight = self.taps[:, 0, -1 - lag].type_as(x)
            term = lagged * weight
            y = y + term.masked_fill(positions < lag, 0.0)

        # Keep the newest kernel - 1 inputs, which end with the last token of each row.
        if cache is not None:
            num_new = ctx.lengths - ctx.cached_lengths
            offsets = torch.arange(self.kernel - 1, device=x.device)
            newest = num_new[:, None, None] + offsets[:, None]  # (B, kernel - 1, 1)
            conv_state = packed.gather(1, newest.expand_as(past))
            cache.conv_state.copy_(conv_state)
        return y

    def new_cache(
        self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> StateCache:
        if not dtype.is_floating_point:
            dtype = torch.bfloat16
        # The state is at least fp32, because it accumulates over all tokens.
        state_dtype = torch.promote_types(dtype, torch.float32)
        head_dim = self.head_dim
        width = 3 * self.heads * head_dim
        state = torch.zeros(
            (batch, self.heads, head_dim, head_dim), dtype=state_dtype, device=device
        )
        conv_state = torch.zeros((batch, self.kernel - 1, width), dtype=dtype, device=device)
        return StateCache(state, conv_state)

    def attention_flops(self, context: int) -> float:
        # For each feature of each head: within the chunk, with the state, in the convolution.
        flops = 8 * min(self.chunk, context)
        flops += 6 * self.head_dim
        flops += 6 * self.kernel
        return self.heads * self.head_dim * flops

    def init_param(self, name: str, generator: torch.Generator) -> Tensor:
        if name == "taps":  # the newest token passes unchanged
            newest = torch.tensor(self.kernel - 1)
            return F.one_hot(newest, self.kernel).expand(self.taps.shape)
        if name == "decay_bias":  # heads from slow to fast decay
            return torch.linspace(-6.0, 0.0, self.heads)
        return super().init_param(name, generator)


def l2_norm(x: Tensor) -> Tensor:
    """Scale x (..., D) to length 1."""
    square = x.square().sum(dim=-1, keepdim=True)
    return x * (square + 1e-6).rsqrt()


def split_chunks(x: Tensor, chunk: int) -> Tensor:
    """x (B, T, H, D) -> (B, H, N, chunk, D), padded with zeros."""
    pad = -x.shape[1] % chunk
    x = F.pad(x, (0, 0, 0, 0, 0, pad))
    return x.transpose(1, 2).unflatten(2, (-1, chunk))


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over chunks of tokens, from `state` (B, H, D, D).

    q, k, v (B, T, H, D), beta and log decay g (B, T, H) -> output (B, T, H, D), next state.

    Within a chunk that starts from the state S, one triangular system gives all u_t. They are
    linear in S, so the systems of all chunks are solved together. Only a few matrix products per
    chunk have to wait for S.
    """
    length = q.shape[1]
    chunk = min(chunk, length)
    q = split_chunks(q, chunk)  # (B, H, N, chunk, D)
    k = split_chunks(k, chunk)
    v = split_chunks(v, chunk)
    beta = split_chunks(beta[..., None], chunk)  # (B, H, N, chunk, 1)
    g = split_chunks(g[..., None], chunk)

    # G_i = g_1 + ... + g_i, and M_ij = exp(G_i - G_j): what remains at token i of token j <= i.
    # The first tril keeps exp from overflowing above the diagonal.
    g_sum = g.cumsum(dim=-2)
    decay_mask = (g_sum - g_sum.mT).tril()  # (B, H, N, chunk, chunk)
    decay_mask = decay_mask.exp().tril()

    # u_i + b_i sum_{j<i} M_ij (k_i . k_j) u_j = b_i v_i - b_i exp(G_i) S' k_i.
    # With (I + A) u_v = b v and (I + A) w = b exp(G) k, this is u = u_v - w S. `system` is A,
    # strictly lower triangular; the solver adds I.
    system = beta * (k @ k.mT) * decay_mask
    system = system.tril(-1)
    rhs_v = beta * v
    rhs_k = beta * g_sum.exp() * k
    solution = torch.cat((rhs_v, rhs_k), dim=-1)
    if chunk > 1:  # with one token, A = 0
        solution = torch.linalg.solve_triangular(system, solution, upper=False, unitriangular=True)
    u_v, w = solution.chunk(2, dim=-1)  # (B, H, N, chunk, D)

    # o_i = sum_{j<=i} M_ij (q_i . k_j) u_j + exp(G_i) S' q_i
    # S_next = exp(G_last) S + sum_j M_last,j k_j u_j'
    scores = (q @ k.mT) * decay_mask
    k = (k * decay_mask.mT[..., -1:]).mT  # (B, H, N, D, chunk)
    decay = g_sum[..., -1:, :].exp()  # (B, H, N, 1, 1)
    q = q * g_sum.exp()
    if on_gpu(q):
        states = states_by_scan(k, solution, decay, state)  # before each chunk
        u = u_v - w @ states
        y = (scores @ u + q @ states).flatten(2, 3)
        next_states = decay * states + k @ u
        state = next_states[:, :, -1]
    else:
        outputs = []
        inputs = (q, k, u_v, w, scores, decay)
        chunks = zip(*(x.unbind(dim=2) for x in inputs), strict=True)
        for q_n, k_n, u_v_n, w_n, scores_n, decay_n in chunks:
            u = u_v_n - w_n @ state
            output = scores_n @ u + q_n @ state
            state = decay_n * state + k_n @ u
            outputs.append(output)
        y = torch.cat(outputs, dim=2)  # (B, H, N * chunk, D)
    y = y[:, :, :length].transpose(1, 2)
    return y, state


def states_by_scan(k: Tensor, solution: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """The states (B, H, N, D, D) before each chunk, by log2(N) products of all chunks together.

    A chunk maps S to M S + b, with M = decay I - k w and b = k u_v, and two such maps compose to
    one: the scan of Hillis & Steele, 1986. k (B, H, N, D, chunk), solution = (u_v, w)
    (B, H, N, chunk, 2 D), decay (B, H, N, 1, 1), the first state (B, H, D, D).
    """
    dim = state.shape[-1]
    b, k_w = (k @ solution).chunk(2, dim=-1)
    identity = torch.eye(dim, device=k.device)
    maps = torch.cat((decay * identity - k_w, b), dim=-1).movedim(2, 0)  # (N, B, H, D, 2 D)

    # Before the first chunk: M = 0 and b = state, whatever came earlier.
    first = F.pad(state[None], (dim, 0))
    maps = torch.cat((first, maps[:-1]))

    # Compose the map of each chunk with that of the chunk `width` before it.
    width = 1
    while width < len(maps):
        later = maps[width:]
        composed = later[..., :dim] @ maps[:-width]
        composed = composed + F.pad(later[..., dim:], (dim, 0))
        maps = torch.cat((maps[:width], composed))
        width = 2 * width
    return maps[..., dim:].movedim(0, 2)
