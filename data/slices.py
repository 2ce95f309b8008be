"""Slices of an evaluation: groups of targets whose mean loss or accuracy is reported.

Each target is counted in one cell of a table. The row of the cell is the target's class, such as
whether it completes a repeated bigram. The column is the bin of a length, such as the position of
the target. A slice is a row or a column of the table.
"""

import torch
from torch import Tensor

NUM_BINS = 32  # 1, 2, 3-4, 5-8, ...


def cells(classes: Tensor, lengths: Tensor) -> Tensor:
    """Return the cell of each target as an int64 index.

    The index is computed from the target's class and from the bin of its length (1 or more).
    """
    assert classes.dtype == lengths.dtype == torch.int64
    # Bins end at powers of two: the bin of a length is the number of bits of length - 1.
    bins = (lengths - 1).double().frexp().exponent
    return classes * NUM_BINS + bins


def bin_name(index: int) -> str:
    """Name a bin by its range of lengths, such as 5-8."""
    assert 0 <= index < NUM_BINS
    if index < 2:
        return str(index + 1)
    return f"{2 ** (index - 1) + 1}-{2**index}"


def text_cells(inputs: Tensor, targets: Tensor) -> Tensor:
    """Map a text's inputs and targets (B, T) to the targets' cells (B, T).

    The class is 1 if the target completes a bigram that occurred earlier in its row, which a model
    can look up. Targets of class 1 are Zoology's AR hits (Arora et al., 2312.04927), but without
    the condition that the bigram is rare in training. The length is the number of tokens before the
    target. Both are computed over the whole row, even if attention is masked between documents.
    """
    assert inputs.shape == targets.shape
    # A stable sort puts equal bigrams next to each other, in the order of their positions.
    bigrams = inputs * (targets.max() + 1) + targets
    ordered, order = bigrams.sort(dim=1, stable=True)
    follows_equal = torch.zeros_like(ordered)
    follows_equal[:, 1:] = ordered.diff(dim=1) == 0
    is_repeated = torch.zeros_like(ordered).scatter(1, order, follows_equal)

    positions = torch.arange(1, inputs.shape[1] + 1)
    return cells(is_repeated, positions)
