"""Differential attention: subtracts a second softmax from the first, to cancel noise.

Ye et al., 2410.05258.
"""

import math

import torch
from torch import Tensor, nn

from model.attention.base import LayerSpec, Shared
from model.attention.softmax import SoftmaxAttention
from model.cache import LayerCache
from model.context import ForwardContext
from model.layers import fp32, rms


class DifferentialAttention(SoftmaxAttention):
    """Heads h and h + H/2 form a pair, with the output (softmax_1 - lambda x softmax_2) x v.

    Takes SoftmaxAttention's options; dropout applies to both softmaxes. Raises ValueError if
    `kv_heads` is odd.
    """

    def __init__(self, spec: LayerSpec, **options):
        super().__init__(spec, **options)
        if self.kv_heads % 2:
            fix = "attention.kv_heads=2"
            if spec.heads % 2:
                fix = f"model.heads={spec.heads + 1} attention.kv_heads={spec.heads + 1}"
                if self.head_dim == spec.dim // spec.heads:
                    fix += f" model.dim={(spec.heads + 1) * self.head_dim}"
            raise ValueError(
                f"kv_heads must be even, because heads come in pairs (heads={spec.heads} "
                f"kv_heads={self.kv_heads}). fix: {fix}"
            )
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * spec.layer)
        head_dim = self.head_dim
        self.q1 = nn.Parameter(torch.empty(head_dim))
        self.k1 = nn.Parameter(torch.empty(head_dim))
        self.q2 = nn.Parameter(torch.empty(head_dim))
        self.k2 = nn.Parameter(torch.empty(head_dim))

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        q, k, v = self.project_qkv(x, ctx)
        kv, mask = self.extend_cache(cache, ctx, k=k, v=v)

        # Both heads of a pair attend to the values of both heads: first to v1, then to v2.
        v1, v2 = kv["v"].chunk(2, dim=2)
        v1 = v1.repeat(1, 1, 2, 1)  # (B, S, K, E)
        v2 = v2.repeat(1, 1, 2, 1)
        y1 = self.attend(q, kv["k"], v1, mask)  # (B, T, H, E)
        y2 = self.attend(q, kv["k"], v2, mask)
        y = torch.cat((y1, y2), dim=-1)
        signal, noise = y.chunk(2, dim=2)  # (B, T, H/2, 2 E)

        # lambda = exp(q1 . k1) - exp(q2 . k2) + lambda_init
        q1 = fp32(self.q1)
        k1 = fp32(self.k1)
        q2 = fp32(self.q2)
        k2 = fp32(self.k2)
        lambda_ = (q1 * k1).sum().exp() - (q2 * k2).sum().exp()
        lambda_ = (lambda_ + self.lambda_init).type_as(signal)

        # Subtract, normalize, gate and project back.
        y = rms(signal - lambda_ * noise, self.norm_eps)
        y = (1 - self.lambda_init) * y
        return self.project_out(y, x), shared

    def attention_flops(self, context: int) -> float:
        return 1.5 * super().attention_flops(context)  # the values are twice as wide

    def init_param(self, name: str, generator: torch.Generator) -> Tensor:
        if name in ("q1", "k1", "q2", "k2"):
            return 0.1 * torch.randn(self.head_dim, generator=generator)
        return super().init_param(name, generator)
