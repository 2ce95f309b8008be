"""Gated delta rule: a state of each head that decays and corrects itself. Yang et al., 2412.06464.

    S_t = a_t S_{t-1} + k_t u_t'   with   u_t = b_t (v_t - a_t S_{t-1}' k_t),   output S_t' q_t

As in Qwen3-Next, queries, keys and values pass a short causal convolution first. The cache holds
the state S and the convolution's last inputs, whatever the length.
Here keys and values of a head have the same width, D; W are the features of q, k and v together.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from model.attention.base import CrossLayer, LayerSpec
from model.attention.recurrent import RecurrentAttention, run_chunks, split_chunks, sum_decays
from model.attention.short_conv import ShortConv
from model.cache import LayerCache
from model.context import ForwardContext
from model.layers import Linear, RMSNorm, fp32


class GatedDelta(RecurrentAttention):
    """`kernel` is the width of the convolution, `chunk` that of `delta_rule`, both in tokens."""

    def __init__(self, spec: LayerSpec, *, head_dim: int | None, kernel: int, chunk: int):
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
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, carry: CrossLayer
    ) -> tuple[Tensor, CrossLayer]:
        """x (B, T, D) -> (B, T, D)"""
        # Project, convolve, and normalize queries and keys to length 1.
        qkv = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)  # (B, T, W)
        past = None if cache is None else cache.buffers[1]
        qkv = F.silu(self.conv(qkv, ctx, past))
        qkv = fp32(qkv).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.unbind(dim=2)  # (B, T, H, D)
        q = l2_norm(q) * self.head_dim**-0.5
        k = l2_norm(k)

        # beta and the log decay g, (B, T, H).
        beta = fp32(self.write_proj(x)).sigmoid()
        rate = fp32(self.decay_rate).exp()
        g = -rate * F.softplus(fp32(self.decay_proj(x)) + fp32(self.decay_bias))

        # Run the recurrence, normalize, gate and project back.
        y = self.recur(delta_rule, (q, k, v, beta), g, ctx, cache)
        y = self.out_norm(y.type_as(x))
        gate = self.gate_proj(x).unflatten(-1, y.shape[2:])
        y = y * F.silu(gate)
        return self.o_proj(y.flatten(-2)), carry

    def new_cache(
        self, batch: int, capacity: int, dtype: torch.dtype, device: Device
    ) -> LayerCache:
        if not dtype.is_floating_point:
            dtype = torch.bfloat16
        shape = (batch, self.conv.kernel - 1, 3 * self.heads * self.head_dim)
        conv_state = torch.zeros(shape, dtype=dtype, device=device)
        return LayerCache(self.new_state(batch, dtype, device), conv_state)

    def attention_flops(self, context: int) -> float:
        # For each feature of each head: within the chunk, and with the state.
        flops = 8 * min(self.chunk, context) + 6 * self.head_dim
        return self.heads * self.head_dim * flops + self.conv.flops

    def init_param(self, name: str, generator: torch.Generator) -> Tensor:
        if name == "decay_bias":  # heads from slow to fast decay
            return torch.linspace(-6.0, 0.0, self.heads)
        return super().init_param(name, generator)


def l2_norm(x: Tensor) -> Tensor:
    """Scale x (..., D) to length 1."""
    square = x.square().sum(dim=-1, keepdim=True)
    return x * (square + 1e-6).rsqrt()


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
    q = split_chunks(q, chunk)  # (B, H, N, C, D)
    k = split_chunks(k, chunk)
    v = split_chunks(v, chunk)
    beta = split_chunks(beta[..., None], chunk)  # (B, H, N, C, 1)
    g_sum, decay_mask = sum_decays(g, chunk)

    # u_i + b_i sum_{j<i} M_ij (k_i . k_j) u_j = b_i v_i - b_i exp(G_i) S' k_i.
    # With (I + A) u_v = b v and (I + A) w = b exp(G) k, this is u = u_v - w S. `system` is A,
    # strictly lower triangular; the solver adds I.
    system = (beta * (k @ k.mT) * decay_mask).tril(-1)
    solution = torch.cat((beta * v, beta * g_sum.exp() * k), dim=-1)
    if length > 1:  # with one token, A = 0
        solution = torch.linalg.solve_triangular(system, solution, upper=False, unitriangular=True)
    u_v, w = solution.chunk(2, dim=-1)  # (B, H, N, C, D)
    y, state = run_chunks(q, k, u_v, w, g_sum, decay_mask, state)
    return y[:, :length], state
