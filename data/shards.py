"""Token ids on disk: files of raw integers in a sealed folder, memory-mapped when read."""

from pathlib import Path

import numpy as np

from common.atomic_dir import StagingDirectory

LARGEST = 2**28  # tokens in a file
TOGETHER = 2**20  # tokens written at once


class ShardWriter:
    """Writes `stem`-00000.bin and so on. uint16 where the vocabulary fits, else uint32."""

    def __init__(self, folder: StagingDirectory, stem: str, vocab_size: int):
        self.folder, self.stem, self.vocab_size = folder, stem, vocab_size
        self.dtype = np.dtype("uint16" if vocab_size <= 2**16 else "uint32")
        self.names, self.total, self.count, self.waiting, self.waits = [], 0, LARGEST, [], 0

    def write(self, tokens: np.ndarray) -> None:
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:  # a cast would wrap silently
            raise OverflowError(
                f"a token outside the vocabulary ({tokens.min()} to {tokens.max()}, {self.vocab_size})"
            )
        self.waiting.append(tokens)
        self.waits += len(tokens)
        self.total += len(tokens)
        if self.waits >= TOGETHER:
            self.flush()

    def flush(self) -> None:
        if self.waits == 0:
            return
        if self.count + self.waits > LARGEST:
            self.names.append(f"{self.stem}-{len(self.names):05d}.bin")
            self.file, self.count = self.folder.create(self.names[-1]), 0
        self.file.write(np.concatenate(self.waiting).astype(self.dtype).tobytes())
        self.count += self.waits
        self.waiting, self.waits = [], 0


def open_shard(path: Path, dtype: str) -> np.ndarray:
    """The tokens of a file, mapped."""
    return np.memmap(path, dtype=np.dtype(dtype), mode="r")
