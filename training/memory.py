"""The memory that training takes on each device, and the micro-batch that fills it.

Everything is counted on tensors that have shapes but no memory.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from run import compilation, config, hardware
from run.distributed import DistEnv
from run.instantiate import instantiate
from training.compile_choice import is_long_run
from training.distillation import teacher_bytes
from training.loss import MAX_LOGITS, LanguageModelLoss
from training.optimizers import init_state, named_states

# What a compiled forward keeps, of what an eager one does. torch.compile's partitioner keeps 0.56
# to 0.68 of it for gqa, mha, llama, gated, delta, mla, value_residual and differential at dim 768.
COMPILED_FRACTION = 0.7
# Of the free memory, for fragmentation, workspaces of libraries and communication.
MARGIN = 0.1


class TrainingMemory:
    """Bytes of the model of a config, its optimizer, and what a forward keeps for its backward.

    Activations are those of matrix products in `precision`, without torch.compile.
    """

    def __init__(self, settings: dict, precision: torch.dtype = torch.bfloat16):
        self.precision = precision
        with FakeTensorMode():
            self.model = instantiate(settings["model"])
            optimizers = instantiate(settings["optimizer"], "training")(self.model)
            init_state(optimizers)
            bos = 0 if settings["document_mask"] else None
            loss = LanguageModelLoss(self.model, z_loss=0.0, bos=bos)
            # One sequence could be kept in fewer bytes: more of its layouts are contiguous.
            tokens = torch.zeros(1, settings["context"], dtype=torch.int64)
            two_sequences = saved_bytes(loss, tokens.repeat(2, 1), precision)
            three_sequences = saved_bytes(loss, tokens.repeat(3, 1), precision)

        # What grows with the batch, and what does not: the copies of the weights in `precision`.
        self.sequence_bytes = three_sequences - two_sequences
        self.weight_copies = two_sequences - 2 * self.sequence_bytes
        # Checkpointing keeps the fp32 input of every block.
        self.depth = len(self.model.blocks)
        self.block_inputs = 4 * self.depth * tokens.numel() * self.model.embed.embedding_dim
        self.logits = tokens.numel() * self.model.embed.num_embeddings  # of a sequence

        # Numbers of weights, and bytes of all that belongs to them.
        self.head_weights = self.model.unembedding.numel()
        self.block_weights = sum(p.numel() for p in self.model.blocks.parameters())
        self.parameters = self.model.num_parameters()
        leaves = tree_leaves(named_states(optimizers, self.model))
        optimizer_state = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        self.state = 8 * self.parameters + optimizer_state  # fp32 weights and gradients

    def peak(
        self,
        sequences: int,
        *,
        shards: int = 1,
        is_checkpointed: bool = False,
        is_compiled: bool = False,
    ) -> float:
        """Bytes at the peak of a training step on a GPU that holds one of `shards` shards.

        The peak comes while the loss has its logits, or in the backward of the last block. The
        terms are those that a count of all tensors of such steps shows (tests/gpu/fake_ranks_cases.py).
        """
        # The forward keeps what its backward reads. With checkpointing these are the fp32 inputs of
        # the blocks and, in the loss, three tensors like them: the input of the final norm, its
        # output, and the gradient of that.
        saved = sequences * self.sequence_bytes
        if is_compiled:
            saved *= COMPILED_FRACTION
        block_saved = saved / self.depth
        block_inputs = sequences * self.block_inputs
        in_loss = saved
        in_backward = saved
        if is_checkpointed:
            in_loss = block_inputs * (1 + 3 / self.depth)
            in_backward = block_inputs + block_saved

        # The gradient of the head waits in fp32. Those of activations replace what is freed.
        in_backward += 4 * self.head_weights
        in_loss += self.loss_bytes(sequences)
        if shards == 1:
            return self.state + self.weight_copies + max(in_loss, in_backward)

        # Embedding, head and final norm are unsharded in fp32 until the end of the backward. In the
        # backward of a block these are unsharded: its weights, its gradients and the prefetched
        # weights of the next block, in bf16, and the gradients of the block before, being reduced
        # in fp32.
        block_weights = self.block_weights / self.depth
        outer_weights = self.parameters - self.block_weights
        in_backward += (2 + 2 + 2 + 4) * block_weights
        return self.state / shards + 4 * outer_weights + max(in_loss, in_backward)

    def loss_bytes(self, sequences: int) -> int:
        """Bytes that the loss takes at its peak, besides what the model has kept."""
        logits = min(sequences * self.logits, MAX_LOGITS["cuda"])
        # All the time, the weight of the head in bf16 and its gradient in fp32. Most tensors of
        # logits are there when the softmax of a chunk begins; fewer when a product in bf16 is
        # added to the gradient of the head.
        softmax = 25 * logits
        product = 17 * logits + 2 * self.head_weights
        return (2 + 4) * self.head_weights + max(softmax, product)


def saved_bytes(
    loss: LanguageModelLoss, tokens: torch.Tensor, precision: torch.dtype = torch.bfloat16
) -> int:
    """Bytes that a forward keeps for its backward, without the weights themselves."""
    weights = {storage_id(p) for p in loss.parameters()}
    saved = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        # The tensor stays alive in `saved`, so that no storage id is used twice.
        saved[storage_id(x)] = x
        return x

    saved_tensors = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with saved_tensors, hardware.autocast(tokens.device, precision):
        loss(tokens, tokens)
    return sum(x.untyped_storage().nbytes() for key, x in saved.items() if key not in weights)


def storage_id(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def measure_memory(
    settings: dict, device: torch.device, precision: torch.dtype
) -> TrainingMemory | None:
    """The memory by which `choose_micro_batch` chooses, or None where nothing is to be chosen.

    It is called before the processes join: a step of an optimizer may exchange tensors.
    """
    if settings["micro_batch"] is not None or device.type != "cuda":
        return None
    return TrainingMemory(settings, precision)


def choose_micro_batch(memory: TrainingMemory | None, settings: dict, ranks: DistEnv) -> int:
    """Sequences in a forward on one device, equal on all ranks.

    With micro_batch=null a GPU takes as many as its free memory holds, and a CPU a few.
    """
    if memory is None:
        return config.micro_batch_size(settings, ranks.world_size)
    is_compiled, _ = compilation.pick_compile(
        settings["compile"], ranks.device, is_long_run(settings)
    )
    free_bytes = -ranks.all_reduce_max(-free_memory(ranks.device))
    free_bytes -= teacher_bytes(settings, memory.precision)
    return fit_micro_batch(memory, settings, ranks.world_size, is_compiled, free_bytes)


def free_memory(device: torch.device) -> int:
    """Bytes that tensors can take on a GPU: what is free there, and free in torch's own pools."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    pooled = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_bytes + pooled


def fit_micro_batch(
    memory: TrainingMemory, settings: dict, world_size: int, is_compiled: bool, free_bytes: int
) -> int:
    """The most sequences, at least 1, that fit into `free_bytes` and fill a batch evenly."""
    batch = config.sequences_per_process(settings, world_size)
    for sequences in range(batch, 1, -1):
        if batch % sequences == 0:
            peak = memory.peak(
                sequences,
                shards=world_size if settings["sharded"] else 1,
                is_checkpointed=settings["activation_checkpointing"],
                is_compiled=is_compiled,
            )
            if peak <= (1 - MARGIN) * free_bytes:
                return sequences
    return 1
