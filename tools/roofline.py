"""Predicts how long training steps and decoded tokens take, by arithmetic: nothing is run.

A product of matrices takes as long as its FLOPs or its bytes do, whichever is more (Williams et
al., 10.1145/1498765.1498785). Attention is a fused kernel. What is left, once compiled, is a kernel
after each product: it reads what products have written and writes what they read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention.kernels import AttentionKernel
from model.transformer import Transformer
from run.hardware import PEAKS

PARTS = ("products", "attention", "head+loss", "elementwise", "launches", "optimizer")
# Bytes of elementwise kernels, for each byte of the products. A trace of all operations with
# everything between two products fused gave 1.36 to 1.71, depending on model and attention.
ELEMENTWISE_BYTES = 1.5
# The backward has five products where the forward has two: Dao, 2307.08691.
FUSED_ATTENTION = 3.5
# For each weight: clipping and AdamW. Muon's products add a hundredth of a step of 0.5 M tokens.
OPTIMIZER_BYTES = 50


@dataclass
class Machine:
    """The peaks of a processor, and the fractions of them that kernels reach."""

    peak_flops: float  # FLOP/s in bf16
    peak_bandwidth: float  # bytes/s
    processors: int  # each computes a part of a product at a time
    product_share: float  # of peak_flops, in large products
    attention_share: float  # of peak_flops
    bandwidth_share: float = 0.8
    launch: float = 4e-6  # seconds
    graph_launch: float = 1.3e-6  # seconds, in a captured graph
    tile: int = 128  # rows and columns of a part of a product
    tile_terms: int = 1024  # longer sums are divided

    def memory_seconds(self, nbytes: float) -> float:
        return nbytes / (self.peak_bandwidth * self.bandwidth_share)

    def product_seconds(self, m: int, n: int, k: int) -> float:
        """Seconds of a product (M, K) x (K, N) in bf16.

        The processors compute its parts in turns, the last of which is half empty on average. To
        begin and end a sum takes as long as `tile` more terms.
        """
        parts = m * n / self.tile**2 * max(1, k / self.tile_terms)
        flops = 2 * m * n * (k + self.tile) * (1 + self.processors / (2 * parts))
        flop_seconds = flops / (self.peak_flops * self.product_share)
        return max(flop_seconds, self.memory_seconds(product_bytes(m, n, k)))


def product_bytes(m: int, n: int, k: int) -> int:
    """Bytes of the matrices (M, K), (K, N) and (M, N) in bf16."""
    return 2 * (m * k + k * n + m * n)


# Peaks and processors are of NVIDIA's data sheets; docs/gpu.md has the sources of the shares.
MACHINES = {
    "H100": Machine(PEAKS["H100|H200|GH200"], 3.35e12, 132, 0.73, 0.30),
    "A100": Machine(PEAKS["A100|A800"], 2.04e12, 108, 0.84, 0.45),
    "4090": Machine(PEAKS["RTX 4090"], 1.01e12, 128, 0.90, 0.60),
    "L4": Machine(PEAKS["L4"], 0.30e12, 58, 0.50, 0.35),
}


def cpu_machine(flops: float, bandwidth: float) -> Machine:
    """A CPU that reaches so many FLOP/s in a large product, and bytes/s.

    All cores compute a product together. Attention is blocks of scores in memory.
    """
    return Machine(flops, bandwidth, 0, 1.0, 0.25, 1.0, 5e-6, 5e-6, tile=16)


def step_seconds(
    machine: Machine, model: Transformer, sequences: int, batch_tokens: int
) -> dict[str, float]:
    """Seconds of each of PARTS in an optimizer step, of micro-batches of so many `sequences`.

    The model trains in bf16 and compiled, without activation checkpointing. Raises ValueError for
    an attention that is no fused kernel.
    """
    tokens = sequences * model.context  # of a micro-batch
    attention_flops = 0.0
    for block in model.blocks:
        if not any(isinstance(module, AttentionKernel) for module in block.modules()):
            raise ValueError("its attention is no fused kernel")
        attention_flops += block.attention.attention_flops(model.context)
    weights = [p for p in model.blocks.parameters() if p.ndim == 2]
    products, elementwise = linear_seconds(machine, weights, tokens)
    attention_rate = machine.peak_flops * machine.attention_share
    micro_batch = {
        "products": products,
        "attention": tokens * FUSED_ATTENTION * attention_flops / attention_rate,
        "head+loss": sum(linear_seconds(machine, [model.unembedding], tokens)),
        "elementwise": elementwise,
        "launches": 6 * (len(weights) + 1) * machine.launch,
    }
    num_micro_batches = batch_tokens / tokens
    seconds = {part: num_micro_batches * time for part, time in micro_batch.items()}
    optimizer_bytes = OPTIMIZER_BYTES * model.num_parameters()
    return seconds | {"optimizer": machine.memory_seconds(optimizer_bytes)}


def linear_seconds(machine: Machine, weights: list[Tensor], tokens: int) -> tuple[float, float]:
    """Seconds of products with weights (N, K), forward and backward, and of what is between."""
    seconds = 0.0
    nbytes = 0
    for weight in weights:
        n, k = weight.shape
        seconds += machine.product_seconds(tokens, n, k)  # the output
        seconds += machine.product_seconds(tokens, k, n)  # the gradient of the input
        seconds += machine.product_seconds(n, k, tokens)  # the gradient of the weight
        nbytes += 3 * product_bytes(tokens, n, k)
    return seconds, machine.memory_seconds(ELEMENTWISE_BYTES * nbytes)


def token_seconds(machine: Machine, model: Transformer, rows: int) -> float:
    """Seconds of a token of each row in decoding, in bf16, with a full context in the cache.

    All weights and the cache are read; each product is followed by an elementwise kernel.
    """
    launches = 2 * sum(p.ndim == 2 for p in model.parameters())
    return machine.memory_seconds(token_bytes(model, rows)) + launches * machine.graph_launch


def token_bytes(model: Transformer, rows: int) -> int:
    """Bytes of the weights that a decoding step reads, and of a full cache, in bf16."""
    return 2 * decoded_weights(model) + rows * model.cache_bytes(model.context, torch.bfloat16)


def decoded_weights(model: Transformer) -> int:
    """The number of weights that a decoding step reads.

    An embedding that is not the head too does not count: a token reads one of its rows.
    """
    weights = model.num_parameters()
    if model.head is not None:
        weights -= model.embed.weight.numel()
    return weights
