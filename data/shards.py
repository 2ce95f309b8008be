"""Token ids on disk: one file of raw integers for each split, memory-mapped when it is read."""

from pathlib import Path

import numpy as np

from common.atomic_dir import StagingDirectory

BUFFERED_TOKENS = 2**20  # written at once


class ShardWriter:
    """Writes the tokens of a split to one file: uint16 if the vocabulary fits, else uint32."""

    def __init__(self, folder: StagingDirectory, split: str, vocab_size: int):
        self.name = shard_name(split)
        self.file = folder.create(self.name)
        self.vocab_size = vocab_size
        self.dtype = np.dtype("uint16" if vocab_size <= 2**16 else "uint32")
        self.num_tokens = 0
        self.buffer = []
        self.buffered = 0

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens; flush() must follow the last ones."""
        # The cast to an unsigned dtype would wrap what is outside without a word.
        lowest = tokens.min()
        highest = tokens.max()
        if lowest < 0 or highest >= self.vocab_size:
            raise OverflowError(
                f"a token outside the vocabulary ({lowest} to {highest}, {self.vocab_size})"
            )
        self.buffer.append(tokens)
        self.buffered += len(tokens)
        self.num_tokens += len(tokens)
        if self.buffered >= BUFFERED_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write the buffered tokens to the file."""
        # Documents are short: many of them are one write.
        if self.buffer:
            self.file.write(np.concatenate(self.buffer).astype(self.dtype).tobytes())
        self.buffer = []
        self.buffered = 0


def shard_name(split: str) -> str:
    return f"{split}-00000.bin"


def open_shard(path: Path, dtype: str) -> np.ndarray:
    """Memory-map the tokens of a file."""
    return np.memmap(path, dtype=np.dtype(dtype), mode="r")
