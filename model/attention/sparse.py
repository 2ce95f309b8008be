"""Softmax attention to a few chosen keys: MoBA by blocks, DeepSeek's by a learned indexer.

With more than one new token, all scores are computed and those of other keys are masked. A decode
step gathers the keys and values that it has chosen, and reads no others, except that a cache in
another dtype, such as int8, is first converted as a whole. N is a number of blocks.
"""

import torch
from torch import Tensor

from model.attention.base import CrossLayer, LayerSpec, add_loss
from model.attention.kernels import ScoreOptions, attention_weights
from model.attention.recurrent import no_autocast
from model.attention.softmax import Features, Inputs, Seen, SoftmaxAttention
from model.cache import Shape
from model.context import Visibility
from model.layers import LayerNorm, Linear, apply_rope, fp32


class SparseAttention(SoftmaxAttention):
    """What sparse attentions share. Raises ValueError for a window or a chunk.

    `num_chosen` is how many keys and values a decode step attends to at most.
    """

    num_chosen: int

    def __init__(self, spec: LayerSpec, **knobs):
        super().__init__(spec, **knobs)
        if self.window is not None or self.chunk is not None:
            raise ValueError(
                f"keys are chosen among all tokens (window={self.window} chunk={self.chunk}). "
                "fix: attention.window=null attention.chunk=null"
            )

    def attend_to(self, inputs: Inputs, q: Tensor, seen: Seen, mask: Tensor) -> Tensor:
        """q (B, T, H, E) -> (B, T, H, E), to the keys that a mask (B, 1 or K, T, S) has chosen.

        It includes the mask of `seen`.
        """
        features = seen.features[:2]
        cache = inputs.cache
        if cache is not None and len(q[0]) == 1 and self.num_chosen < cache.size:
            # Read the slots of the chosen tokens, L of them.
            slots = mask.int().topk(self.num_chosen, dim=-1).indices  # (B, 1 or K, 1, L)
            mask = mask.take_along_dim(slots, dim=-1)
            index = slots.transpose(1, 3)[:, :, 0, :, None]  # (B, L, 1 or K, 1)
            features = [x.take_along_dim(index, dim=1) for x in features]

        # Queries that share a key head share its mask. Padding attends to everything.
        if mask.shape[1] > 1:
            mask = mask.repeat_interleave(self.heads // self.kv_heads, dim=1)
        mask = mask | (seen.visible.query_positions < 0)[:, None, :, None]
        visible = seen.visible._replace(mask=mask)
        return super().attend(inputs, q, Seen(seen.new, features, visible))[0]


def visible_mask(visible: Visibility) -> Tensor:
    """The mask (B, 1, T, S), also where plain causal attention has none."""
    if visible.mask is not None:
        return visible.mask
    return visible.key_positions[:, None, None, :] <= visible.query_positions[:, None, :, None]


class BlockAttention(SparseAttention):
    """MoBA: a query sees its own block of keys and the most similar earlier ones. Lu, 2502.13189.

    A block has `block` tokens, and `topk` earlier ones are seen. A block is as similar as the
    product of the query and the mean of its keys; no parameters choose. Queries that share a key
    head choose together, by their mean. The cache also holds the sum of the keys of each block.
    Takes the knobs of SoftmaxAttention but window and chunk.
    """

    def __init__(self, spec: LayerSpec, *, block: int, topk: int, **knobs):
        super().__init__(spec, **knobs)
        self.block = block
        self.topk = topk

    def features(self, inputs: Inputs, k: Tensor, v: Tensor) -> tuple[Features, CrossLayer]:
        (k, v), carry = super().features(inputs, k, v)
        if inputs.cache is not None:
            # Add the new keys to the sums. A block that begins anew forgets those of another text.
            (sums,) = inputs.cache.state
            positions = inputs.ctx.positions
            is_start = positions % self.block == 0
            new_sums, begins = sum_blocks(k, positions // self.block, is_start, sums.shape[1])
            sums.copy_(sums.masked_fill(begins[..., None, None], 0.0) + new_sums)
        return (k, v), carry

    def attend(self, inputs: Inputs, q: Tensor, seen: Seen) -> tuple[Tensor, CrossLayer]:
        """q (B, T, H, E) -> (B, T, H, E), carry"""
        # The numbers of the blocks of queries and keys, and the sums of keys (B, N, K, E).
        ctx = inputs.ctx
        if inputs.cache is not None:
            (sums,) = inputs.cache.state
            query_block = ctx.positions // self.block  # (B, T)
            key_block = seen.visible.key_positions // self.block  # (B, S)
        else:
            # Packed documents have blocks of their own.
            is_start = (ctx.positions % self.block == 0) & (ctx.positions >= 0)
            query_block = is_start.cumsum(dim=1) - 1
            key_block = query_block
            length = inputs.x.shape[1]
            count = length if ctx.documents is not None else -(-length // self.block)
            sums, _ = sum_blocks(seen.features[0], key_block, is_start, count)

        # The earlier blocks of the same text that are most similar.
        first_block = query_block - ctx.positions // self.block
        number = torch.arange(sums.shape[1], device=q.device)
        is_earlier = (number < query_block[..., None]) & (number >= first_block[..., None])
        is_earlier = is_earlier[:, None]  # (B, 1, T, N)
        grouped = fp32(q).unflatten(2, (self.kv_heads, -1)).mean(dim=3)  # (B, T, K, E)
        with no_autocast(q.device):
            similarity = torch.einsum("btke,bnke->bktn", grouped, sums.type_as(grouped))
        similarity = similarity.masked_fill(~is_earlier, -torch.inf)
        best = similarity.topk(min(self.topk, len(number)), dim=-1).indices  # (B, K, T, topk)

        # The keys of these blocks and of its own.
        is_chosen = torch.zeros_like(similarity, dtype=torch.bool).scatter(-1, best, True)
        is_chosen = is_chosen & is_earlier | (number == query_block[..., None])[:, None]
        mask = is_chosen.take_along_dim(key_block.clamp(min=0)[:, None, None], dim=-1)
        mask = mask & visible_mask(seen.visible)
        return self.attend_to(inputs, q, seen, mask), inputs.carry

    @property
    def num_chosen(self) -> int:
        return (self.topk + 1) * self.block

    def cached_state(self, capacity: int) -> list[Shape]:
        """The sum of the keys of each block."""
        return [(-(-capacity // self.block), self.kv_heads, self.head_dim)]


def sum_blocks(k: Tensor, block: Tensor, is_start: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Keys (B, T, K, E), their blocks (B, T) -> sums (B, N, K, E), which blocks begin (B, N)."""
    belongs = block[..., None] == torch.arange(count, device=k.device)  # (B, T, N)
    belongs = belongs.expand(len(k), -1, -1)
    with no_autocast(k.device):
        sums = torch.einsum("btn,btke->bnke", belongs.type_as(fp32(k)), fp32(k))
    return sums, (belongs & is_start[..., None]).any(dim=1)


class IndexedAttention(SparseAttention):
    """DeepSeek-V3.2, 2512.02556: a lightning indexer chooses `topk` keys.

    The indexer scores key s for query t by sum_j w_tj relu(q_tj . k_s), with `index_heads` small
    queries and one small key a token, `index_dim` wide; the cache holds these keys. It learns
    from the auxiliary loss `indexer_kl`, times `index_weight`, alone: the divergence of its
    softmax from the weights of attention, the mean of all heads. Nothing else learns from that.
    Takes the knobs of SoftmaxAttention but window and chunk. Raises ValueError for an odd
    `index_dim`.
    """

    losses = ("indexer_kl",)

    def __init__(
        self,
        spec: LayerSpec,
        *,
        topk: int,
        index_heads: int,
        index_dim: int | None,
        index_weight: float,
        **knobs,
    ):
        super().__init__(spec, **knobs)
        if index_dim is None:
            index_dim = 2 * max(1, self.head_dim // 4)
        if index_dim % 2:
            raise ValueError(
                "RoPE rotates pairs, so attention.index_dim must be even "
                f"(got {index_dim}). fix: attention.index_dim={index_dim + 1}"
            )
        self.topk = topk
        self.index_weight = index_weight
        self.index_heads = index_heads
        self.index_dim = index_dim
        self.index_rotary = (index_dim, *self.rotary[1:])
        self.index_q_proj = Linear(spec.dim, index_heads * index_dim)
        self.index_k_proj = Linear(spec.dim, index_dim)
        self.index_k_norm = LayerNorm(index_dim, spec.norm_eps)
        self.index_weight_proj = Linear(spec.dim, index_heads)

    def features(self, inputs: Inputs, k: Tensor, v: Tensor) -> tuple[Features, CrossLayer]:
        kv, carry = super().features(inputs, k, v)
        index_k = self.index_k_norm(self.index_k_proj(inputs.x.detach()))
        return (*kv, self.index_rope(index_k[:, :, None], inputs)), carry

    def attend(self, inputs: Inputs, q: Tensor, seen: Seen) -> tuple[Tensor, CrossLayer]:
        """q (B, T, H, E) -> (B, T, H, E), carry"""
        mask = visible_mask(seen.visible)[:, 0]  # (B, T, S)
        index = self.index(inputs, seen.features[2].squeeze(2))  # (B, T, S)
        # Of keys that match no query, all of which score 0, the newest is taken.
        query, key = seen.visible.query_positions, seen.visible.key_positions
        index = index - 1e-12 * (query[:, :, None] - key[:, None])
        index = index.masked_fill(~mask, -torch.inf)
        best = index.topk(min(self.topk, index.shape[-1]), dim=-1).indices  # (B, T, topk)
        is_chosen = torch.zeros_like(index, dtype=torch.bool).scatter(-1, best, True) & mask
        y = self.attend_to(inputs, q, seen, is_chosen[:, None])
        if inputs.cache is not None or not torch.is_grad_enabled():
            return y, inputs.carry
        loss = self.divergence(q, seen, index, is_chosen)
        return y, add_loss(inputs.carry, "indexer_kl", loss, self.index_weight)

    @property
    def num_chosen(self) -> int:
        return self.topk

    def index(self, inputs: Inputs, index_k: Tensor) -> Tensor:
        """index_k (B, S, d) -> the indexer's scores of all keys (B, T, S)"""
        x = inputs.x.detach()
        index_q = self.index_q_proj(x).unflatten(-1, (self.index_heads, -1))
        index_q = self.index_rope(index_q, inputs)  # (B, T, J, d)
        scores = fp32(torch.einsum("btjd,bsd->btjs", index_q, index_k)).relu()
        weight = fp32(self.index_weight_proj(x)) * (self.index_heads * self.index_dim) ** -0.5
        return (weight[..., None] * scores).sum(dim=2)

    def index_rope(self, x: Tensor, inputs: Inputs) -> Tensor:
        """Rotate queries or keys of the indexer (B, T, J, d), where attention has positions."""
        if self.rope_base is None:
            return x
        return apply_rope(x, *inputs.ctx.rotary(*self.index_rotary))

    def divergence(self, q: Tensor, seen: Seen, index: Tensor, is_chosen: Tensor) -> Tensor:
        """KL(weights of attention || softmax of the index) over the chosen keys, (B, T)."""
        with torch.no_grad():
            k = seen.features[0].transpose(1, 2)
            options = ScoreOptions(
                self.head_dim**-0.5, self.kernel.softcap, self.score_bias(seen), self.sink
            )
            weights = attention_weights(q.transpose(1, 2), k, is_chosen[:, None], options)
            weights = weights.mean(dim=1)  # (B, T, S)
            weights = weights / weights.sum(dim=-1, keepdim=True)
        index = index.masked_fill(~is_chosen, -torch.inf).log_softmax(dim=-1)
        index = index.masked_fill(~is_chosen, 0.0)
        return (torch.xlogy(weights, weights) - weights * index).sum(dim=-1)

    def cached_features(self) -> list[Shape]:
        return [*super().cached_features(), (1, self.index_dim)]

    def attention_flops(self, context: int) -> float:
        return super().attention_flops(context) + self.index_heads * self.index_dim * (context + 1)
