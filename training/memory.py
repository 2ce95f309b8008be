"""The largest micro-batch that fits into a GPU's memory, computed from the peaks of two passes."""

import torch

from run.settings import Settings
from training.trainer import Trainer

MARGIN = 0.1  # fraction of free memory kept for fragmentation, library workspaces, communication
STATE_PER_WEIGHT = 2  # maximum number of optimizer values per weight


def choose_micro_batch(trainer: Trainer, settings: Settings) -> int:
    """Return the number of sequences per forward pass on each device, equal on all ranks.

    With micro_batch=null, it divides each rank's share of the batch, and is limited by the memory
    of the GPUs, or by a small constant on other devices.
    """
    ranks = trainer.ranks
    rows = settings.sequences_per_process(ranks.world_size)
    if settings.micro_batch is not None or ranks.device.type != "cuda" or rows == 1:
        return settings.micro_batch_size(ranks.world_size)

    # Measured, because the peak depends on the attention, precision and kernels.
    fitting = ranks.all_reduce_min(count_fitting_sequences(trainer, settings))
    return settings.micro_batch_size(ranks.world_size, min(rows, fitting))


def count_fitting_sequences(trainer: Trainer, settings: Settings) -> int:
    """Return how many sequences fit into the memory of this rank's GPU, at least 1.

    Passes are measured without torch.compile, which would keep fewer activations for the backward.
    Raises torch.OutOfMemoryError if one sequence does not fit.
    """
    # The first pass allocates the gradients. The next two, of 1 and 2 sequences, are compared.
    ranks = trainer.ranks
    measure_peak(trainer, 1)
    before = torch.cuda.memory_allocated(ranks.device)
    with_one = measure_peak(trainer, 1)
    # If a rank ran out of memory in a sharded forward pass, the others would hang in a collective.
    # Therefore two sequences, which need at most twice the memory, run only if all ranks have room.
    free_bytes = count_free_bytes(ranks.device)
    has_room = free_bytes >= before + 2 * (with_one - before)
    if not ranks.all_reduce_min(int(has_room)):
        trainer.model.zero_grad()
        torch.cuda.empty_cache()
        return 1
    with_two = measure_peak(trainer, 2)
    trainer.model.zero_grad()
    torch.cuda.empty_cache()  # cached memory of uncompiled passes would cause fragmentation

    weight_bytes = sum(weight.nbytes for weight in trainer.model.parameters())
    if settings.sharded:
        weight_bytes /= ranks.world_size
    needed_bytes = with_one + STATE_PER_WEIGHT * weight_bytes
    room = (1 - MARGIN) * free_bytes - needed_bytes
    return 1 + max(0, int(room // max(1, with_two - with_one)))


def measure_peak(trainer: Trainer, sequences: int) -> int:
    """Return the peak GPU memory in bytes of a forward and backward pass over `sequences` rows."""
    device = trainer.ranks.device
    torch.cuda.reset_peak_memory_stats(device)
    trainer.accumulate(0, slice(sequences), is_last=False)
    return torch.cuda.max_memory_allocated(device)


def count_free_bytes(device: torch.device) -> int:
    """Return the number of bytes that torch has allocated or can still allocate."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device)
