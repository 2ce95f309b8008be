"""Softmax attention to a few keys, chosen in blocks (MoBA) or by a learned indexer (DeepSeek).

With several new tokens, all scores are computed, and all keys except the chosen ones are masked. A
decode step reads at most `keys_per_query` keys and values, and all keys of the indexer or sums of
blocks. A cache in a different dtype than the queries, such as int8, is first converted as a whole.
N is the number of blocks, J the number of the indexer's heads, and d their width.
"""

import torch
from torch import Tensor

from model.attention.base import LayerSpec, Shared, add_loss
from model.attention.kernels.definition import ScoreOptions, attention_weights
from model.attention.softmax import SoftmaxAttention
from model.cache import LayerCache, Shape
from model.context import AttentionMask, ForwardContext
from model.layers import LayerNorm, Linear, fp32, no_autocast, split_heads, take_along
from run.ranges import NonNegativeFloat, PositiveInt

TIE_BREAK = 1e-12  # lowers a score by this much per token of distance between query and key


class SparseAttention(SoftmaxAttention):
    """Base class of sparse attention: a query attends to at most `topk` keys or earlier blocks.

    Takes SoftmaxAttention's options. Raises ValueError for a window or a chunk.
    """

    def __init__(self, spec: LayerSpec, *, topk: PositiveInt, **options):
        super().__init__(spec, **options)
        self.topk = topk
        if self.window is not None or self.chunk is not None:
            raise ValueError(
                "sparse attention cannot be combined with a window or chunks "
                f"(window={self.window} chunk={self.chunk}). fix: attention.window=null "
                "attention.chunk=null"
            )

    @property
    def keys_per_query(self) -> int:
        """The largest number of keys that a query attends to, and that a decode step reads."""
        return self.topk

    def choose(self, scores: Tensor, mask: AttentionMask) -> Tensor:
        """Return a mask (B, T, S) of the `topk` visible keys with the highest scores (B, T, S).

        Among keys with a score of 0, the newest are chosen.
        """
        is_visible = dense_mask(mask)[:, 0]  # (B, T, S)
        distance = mask.query_positions[:, :, None] - mask.key_positions[:, None]
        scores = (scores - TIE_BREAK * distance).masked_fill(~is_visible, -torch.inf)
        best = scores.topk(min(self.topk, scores.shape[-1]), dim=-1).indices  # (B, T, topk)
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & is_visible

    @torch.no_grad()
    def mean_weights(self, q: Tensor, k: Tensor, chosen: Tensor) -> Tensor:
        """Return the chosen keys' attention weights (B, T, S), averaged over heads; they sum to 1.

        q (B, T, H, E), k (B, S, K, E), chosen (B, T, S).
        """
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        options = ScoreOptions(self.head_dim**-0.5, self.kernel.softcap, sink=self.sink)
        weights = attention_weights(q, k, chosen[:, None], options).mean(dim=1)
        return weights / weights.sum(dim=-1, keepdim=True)

    def attend_chosen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chosen: Tensor,
        mask: AttentionMask,
        cache: LayerCache | None,
    ) -> Tensor:
        """q (B, T, H, E), k and v (B, S, K, E) -> (B, T, H, E), from the chosen keys only.

        `chosen` (B, T, S), or (B, K, T, S), is true for keys that are visible and chosen.
        """
        if chosen.ndim == 3:
            chosen = chosen[:, None]
        if cache is not None and q.shape[1] == 1 and self.keys_per_query < cache.size:
            # Read L = `keys_per_query` slots, which contain all chosen tokens.
            slots = chosen.int().topk(self.keys_per_query, dim=-1).indices  # (B, 1 or K, 1, L)
            chosen = take_along(chosen, slots, dim=-1)
            index = slots.transpose(1, 3)[:, :, 0, :, None]  # (B, L, 1 or K, 1)
            k = take_along(k, index, dim=1)
            v = take_along(v, index, dim=1)

        # Query heads that share a key head share its mask. Padding attends to everything.
        if chosen.shape[1] > 1:
            chosen = chosen.repeat_interleave(self.heads // self.kv_heads, dim=1)
        chosen = chosen | (mask.query_positions < 0)[:, None, :, None]
        return self.attend(q, k, v, mask.with_dense(chosen))


def dense_mask(mask: AttentionMask) -> Tensor:
    """Return the mask (B, 1, T, S), building it if it is None (plain causal attention)."""
    if mask.dense is not None:
        return mask.dense
    return mask.key_positions[:, None, None, :] <= mask.query_positions[:, None, :, None]


class BlockAttention(SparseAttention):
    """MoBA: a query attends to its own block and to similar earlier blocks. Lu, 2502.13189.

    A block has `block` tokens; a query attends to the `topk` most similar earlier blocks. The
    similarity is the product of the query and the sum of the block's keys, without learned
    parameters. It ranks blocks like the product with the mean key, because earlier blocks are full.
    Query heads that share a key head choose the same blocks, using their mean query. The cache also
    holds the sum of each block's keys. Takes SoftmaxAttention's options except window and chunk.
    """

    def __init__(self, spec: LayerSpec, *, block: PositiveInt, **options):
        super().__init__(spec, **options)
        self.block = block

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        q, k, v = self.project_qkv(x, ctx)
        kv, mask = self.extend_cache(cache, ctx, k=k, v=v)

        # The block numbers of queries (B, T) and keys (B, S), and the sum of each block's keys
        # (B, N, K, E).
        if cache is None:
            # Each packed document has its own blocks.
            is_start = (ctx.positions % self.block == 0) & (ctx.positions >= 0)
            query_block = is_start.cumsum(dim=1) - 1
            key_block = query_block
            length = x.shape[1]
            count = length if ctx.documents is not None else -(-length // self.block)
            sums, _ = sum_blocks(k, key_block, is_start, count)
        else:
            query_block = ctx.positions // self.block
            key_block = mask.key_positions // self.block
            sums = self.extend_sums(cache, ctx, k)

        # The keys of the chosen blocks and of the query's own block.
        is_chosen = self.choose_blocks(q, sums, query_block, ctx.positions // self.block)
        # Slots without a key and rows beyond their capacity (results discarded) have no block.
        key_block = key_block.clamp(min=0, max=sums.shape[1] - 1)
        chosen = take_along(is_chosen, key_block[:, None, None], dim=-1)
        chosen = chosen & dense_mask(mask)
        y = self.attend_chosen(q, kv["k"], kv["v"], chosen, mask, cache)
        return self.project_out(y, x), shared

    def extend_sums(self, cache: LayerCache, ctx: ForwardContext, k: Tensor) -> Tensor:
        """Add new keys (B, T, K, E) to their blocks' cached sums; return all sums (B, N, K, E)."""
        sums = cache.states["block_sums"]
        is_start = ctx.positions % self.block == 0
        new_sums, begins = sum_blocks(k, ctx.positions // self.block, is_start, sums.shape[1])
        # Where a block starts, discard the sum that an earlier sequence has left.
        sums.copy_(sums.masked_fill(begins[..., None, None], 0.0) + new_sums)
        return sums

    def choose_blocks(
        self, q: Tensor, sums: Tensor, query_block: Tensor, num_before: Tensor
    ) -> Tensor:
        """q (B, T, H, E), sums of keys (B, N, K, E) -> a mask of the chosen blocks (B, K, T, N).

        `query_block` (B, T) is the index of each query's block in its row. `num_before` (B, T) is
        the block's index in its document, which is the number of earlier blocks to choose from.
        """
        number = torch.arange(sums.shape[1], device=q.device)
        first_block = query_block - num_before
        is_earlier = (number < query_block[..., None]) & (number >= first_block[..., None])
        is_earlier = is_earlier[:, None]  # (B, 1, T, N)
        grouped = fp32(q).unflatten(2, (self.kv_heads, -1)).mean(dim=3)  # (B, T, K, E)
        with no_autocast(q.device):
            similarity = torch.einsum("btke,bnke->bktn", grouped, sums.type_as(grouped))
        similarity = similarity.masked_fill(~is_earlier, -torch.inf)
        best = similarity.topk(min(self.topk, len(number)), dim=-1).indices  # (B, K, T, topk)
        is_chosen = torch.zeros_like(similarity, dtype=torch.bool).scatter(-1, best, True)
        return is_chosen & is_earlier | (number == query_block[..., None])[:, None]

    @property
    def keys_per_query(self) -> int:
        return (self.topk + 1) * self.block

    def state_shapes(self, capacity: int) -> dict[str, Shape]:
        num_blocks = -(-capacity // self.block)
        return {"block_sums": (num_blocks, self.kv_heads, self.head_dim)}


def sum_blocks(k: Tensor, block: Tensor, is_start: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Keys (B, T, K, E), their blocks (B, T) -> sums (B, N, K, E), which blocks begin (B, N)."""
    belongs = block[..., None] == torch.arange(count, device=k.device)  # (B, T, N)
    belongs = belongs.expand(len(k), -1, -1)
    with no_autocast(k.device):
        sums = torch.einsum("btn,btke->bnke", belongs.type_as(fp32(k)), fp32(k))
    return sums, (belongs & is_start[..., None]).any(dim=1)


class IndexedAttention(SparseAttention):
    """DeepSeek-V3.2, 2512.02556: a lightning indexer chooses `topk` keys.

    The indexer gives key s the score sum_j w_tj relu(q_tj . k_s) for query t, with `index_heads`
    small queries and one small key per token, each `index_dim` wide. The cache also holds this key.
    The indexer learns only from the auxiliary loss `indexer_kl`, times `index_weight`: the KL
    divergence of the attention weights, averaged over heads, from the indexer's softmax over the
    chosen keys. No other parameter learns from this loss. Takes SoftmaxAttention's options except
    window and chunk. Raises ValueError for an odd `index_dim`.
    """

    losses = ("indexer_kl",)

    def __init__(
        self,
        spec: LayerSpec,
        *,
        index_heads: PositiveInt,
        index_dim: PositiveInt | None,
        index_weight: NonNegativeFloat,
        **options,
    ):
        super().__init__(spec, **options)
        if index_dim is None:
            index_dim = 2 * max(1, self.head_dim // 4)
        if index_dim % 2:
            raise ValueError(
                "RoPE rotates pairs, so attention.index_dim must be even "
                f"(got {index_dim}). fix: attention.index_dim={index_dim + 1}"
            )
        self.index_weight = index_weight
        self.index_heads = index_heads
        self.index_dim = index_dim
        self.index_q_proj = Linear(spec.dim, index_heads * index_dim)
        self.index_k_proj = Linear(spec.dim, index_dim)
        self.index_k_norm = LayerNorm(index_dim, spec.norm_eps)
        self.index_weight_proj = Linear(spec.dim, index_heads)

    def forward(
        self, x: Tensor, ctx: ForwardContext, cache: LayerCache | None, shared: Shared
    ) -> tuple[Tensor, Shared]:
        q, k, v = self.project_qkv(x, ctx)
        # Detach x, so that the indexer's loss trains only the indexer.
        index_x = x.detach()
        index_k = self.index_k_norm(self.index_k_proj(index_x))
        index_k = self.rope(split_heads(index_k, 1), ctx, self.index_dim)  # (B, T, 1, d)
        features, mask = self.extend_cache(cache, ctx, k=k, v=v, index_k=index_k)

        # Attend to the keys with the highest scores.
        scores = self.index_scores(index_x, features["index_k"].squeeze(2), ctx)  # (B, T, S)
        chosen = self.choose(scores, mask)
        y = self.attend_chosen(q, features["k"], features["v"], chosen, mask, cache)

        if cache is None and torch.is_grad_enabled():
            loss = divergence(self.mean_weights(q, k, chosen), scores, chosen)
            shared = add_loss(shared, "indexer_kl", loss, self.index_weight)
        return self.project_out(y, x), shared

    def index_scores(self, x: Tensor, index_k: Tensor, ctx: ForwardContext) -> Tensor:
        """x (B, T, D), the indexer's keys (B, S, d) -> the scores of all keys (B, T, S)."""
        index_q = split_heads(self.index_q_proj(x), self.index_heads)
        index_q = self.rope(index_q, ctx, self.index_dim)  # (B, T, J, d)
        scores = fp32(torch.einsum("btjd,bsd->btjs", index_q, index_k)).relu()
        weight = fp32(self.index_weight_proj(x)) * (self.index_heads * self.index_dim) ** -0.5
        return (weight[..., None] * scores).sum(dim=2)

    def cache_shapes(self) -> dict[str, Shape]:
        return super().cache_shapes() | {"index_k": (1, self.index_dim)}

    def attention_flops(self, context: int) -> float:
        return super().attention_flops(context) + self.index_heads * self.index_dim * (context + 1)


def divergence(weights: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """Return KL(weights || softmax(scores)) over the chosen keys: (B, T, S) each -> (B, T)."""
    log_p = scores.masked_fill(~chosen, -torch.inf).log_softmax(dim=-1)
    log_p = log_p.masked_fill(~chosen, 0.0)
    return (torch.xlogy(weights, weights) - weights * log_p).sum(dim=-1)
