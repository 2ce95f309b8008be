"""Softmax attention with the kernel that suits each case.

Each kernel is a module with three functions of a Case (definition.py): `supports` tells whether it
can compute the case on this device, `prefers` whether it should then be used instead of the kernels
after it in KERNELS, and `run` computes it.
"""

from types import ModuleType

import torch
from torch import Tensor, nn

from model.attention.kernels import blocks, decode, flex, fused
from model.attention.kernels.definition import Case, ScoreBias, ScoreOptions, TokenBias
from model.context import AttentionMask

KERNELS = (flex, decode, blocks, fused)  # in order of preference


def choose(case: Case) -> ModuleType:
    """Return the first kernel that supports and prefers a case, or else `blocks`.

    The choice depends only on the case, on the features of the processor or GPU, on whether
    gradients are enabled, and on whether the C++ code of decode.py is loaded. It never depends on
    measured times, so identical runs use the same kernels.
    """
    for kernel in KERNELS:
        if kernel.supports(case) and kernel.prefers(case):
            return kernel
    return blocks


class AttentionKernel(nn.Module):
    """Softmax attention with the kernel that `choose` returns, eager or compiled.

    It has no parameters; it is a module so that a forward hook can see its arguments.
    """

    def __init__(self, softcap: float | None = None, dropout: float = 0.0):
        super().__init__()
        self.softcap = softcap
        self.dropout = dropout

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        *,
        sink: Tensor | None = None,
        score_bias: ScoreBias | None = None,
        token_bias: TokenBias | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """q (B, T, H, E), k (B, S, K, E), v (B, S, K, F) -> (B, T, H, F).

        `scale` is 1 / sqrt(E) unless given.
        """
        assert q.shape[2] % k.shape[2] == 0 and q.shape[3] == k.shape[3], (q.shape, k.shape)
        assert k.shape[:3] == v.shape[:3], (k.shape, v.shape)
        dense = mask.dense
        if dense is None:
            assert q.shape[1] == k.shape[1], (q.shape, k.shape)
        else:
            assert dense.shape[2:] == (q.shape[1], k.shape[1]), (dense.shape, q.shape, k.shape)
        if scale is None:
            scale = q.shape[-1] ** -0.5
        # Read `training` only if there is dropout, because reading it makes evaluation recompile.
        dropout = self.dropout if self.dropout > 0 and self.training else 0.0
        options = ScoreOptions(scale, self.softcap, score_bias, token_bias, sink, dropout)

        # In the arguments of a kernel, heads come before tokens.
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        case = Case(q, k, v, dense, options, mask.rule, torch.compiler.is_compiling())
        return choose(case).run(case).transpose(1, 2)
