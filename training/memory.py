"""The memory that training takes on each device, counted on tensors that have shapes alone."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from common.instantiate import instantiate
from training.loss import LanguageModelLoss
from training.optimizers import init_state, named_states


class TrainingMemory:
    """Bytes of the model of a config, its optimizer, and what a forward keeps for its backward.

    Activations are those of bf16 without torch.compile, which keeps less.
    """

    def __init__(self, settings: dict):
        with FakeTensorMode():
            self.model = instantiate(settings["model"])
            optimizers = instantiate(settings["optimizer"], "training")(self.model)
            init_state(optimizers)
            loss = LanguageModelLoss(self.model, z_loss=0.0, bos=None)
            # One sequence could be kept in fewer bytes: more of its layouts are contiguous.
            tokens = torch.zeros(1, settings["context"], dtype=torch.int64)
            two_sequences = saved_bytes(loss, tokens.repeat(2, 1))
            three_sequences = saved_bytes(loss, tokens.repeat(3, 1))

        # What grows with the batch, and what does not: the copies of the weights in bf16.
        self.sequence_bytes = three_sequences - two_sequences
        self.weight_copies = two_sequences - 2 * self.sequence_bytes
        # Checkpointing keeps the fp32 input of every block.
        self.depth = len(self.model.blocks)
        self.block_inputs = 4 * self.depth * tokens.numel() * self.model.embed.embedding_dim

        self.parameters = sum(p.numel() for p in self.model.parameters())
        leaves = tree_leaves(named_states(optimizers, self.model))
        optimizer_state = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        self.state = 8 * self.parameters + optimizer_state  # fp32 weights and gradients

    def activations(self, sequences: int, is_checkpointed: bool = False) -> float:
        """Bytes that grow with the sequences of a forward."""
        if not is_checkpointed:
            return sequences * self.sequence_bytes
        # Besides the inputs, all that one block saves.
        return sequences * (self.block_inputs + self.sequence_bytes / self.depth)

    def sharded_state(self, gpus: int) -> float:
        """Bytes for each GPU of weights, gradients, optimizer state, at the peak of a backward."""
        blocks = sum(p.numel() for p in self.model.blocks.parameters())
        # Whole at a time: two blocks in bf16, the gradient of one in bf16 and in fp32, and the
        # weights and gradients of the ends (embedding, head, norm) in fp32.
        one_block = 10 * blocks / self.depth
        ends = 8 * (self.parameters - blocks)
        # The loss makes the gradient of the head in the forward.
        head_grad = 4 * self.model.unembedding.numel()
        return self.state / gpus + one_block + ends + head_grad


def saved_bytes(loss: LanguageModelLoss, tokens: torch.Tensor) -> int:
    """Bytes that a forward in bf16 keeps for its backward, without the weights themselves."""
    weights = {storage_id(p) for p in loss.parameters()}
    saved = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        # The tensor stays alive in `saved`, so that no storage id is used twice.
        saved[storage_id(x)] = x
        return x

    saved_tensors = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with saved_tensors, torch.autocast("cpu", dtype=torch.bfloat16):
        loss(tokens, tokens)
    return sum(x.untyped_storage().nbytes() for key, x in saved.items() if key not in weights)


def storage_id(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata
