"""Token ids on disk: files of one header line and raw integers, memory-mapped when read."""

import json
import os
from hashlib import file_digest, sha256
from pathlib import Path

import numpy as np

from data import IntegrityError

HEADER = 256  # bytes: JSON, padded with spaces
LARGEST = 2**28  # tokens in a file


class ShardWriter:
    """Writes `stem`-00000.bin and so on. uint16 where the vocabulary fits, else uint32."""

    def __init__(self, stem: Path, vocab_size: int):
        self.stem, self.vocab_size, self.dtype = (
            stem,
            vocab_size,
            np.dtype("uint16" if vocab_size <= 2**16 else "uint32"),
        )
        self.names, self.total, self.file = [], 0, None

    def write(self, tokens: np.ndarray) -> None:
        assert tokens.min() >= 0 and tokens.max() < self.vocab_size  # a cast would wrap silently
        if self.file is None or self.count + len(tokens) > LARGEST:
            self.close()
            self.names.append(f"{self.stem.name}-{len(self.names):05d}.bin")
            self.file, self.count, self.hash = ((self.stem.parent / self.names[-1]).open("wb"), 0, sha256())
            self.file.write(b" " * HEADER)
        raw = tokens.astype(self.dtype).tobytes()
        self.file.write(raw)
        self.hash.update(raw)
        self.count += len(tokens)
        self.total += len(tokens)

    def close(self) -> None:
        if self.file is None:
            return
        header = {"format": 1, "dtype": self.dtype.name, "count": self.count, "sha256": self.hash.hexdigest()}
        self.file.seek(0)
        self.file.write(json.dumps(header).encode().ljust(HEADER - 1) + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.file = None


def open_shard(path: Path) -> np.ndarray:
    """The tokens of a file, mapped. Raises IntegrityError where size or hash are not the header's."""
    with path.open("rb") as file:
        try:
            header = json.loads(file.read(HEADER))
            if header["format"] != 1:
                raise ValueError(f"made by a later version, format {header['format']}")
            dtype, count, digest = np.dtype(header["dtype"]), header["count"], header["sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                f"no token shard ({path}: {error}). fix: delete its folder, it is made again"
            ) from None
        size = path.stat().st_size
        if size != HEADER + count * dtype.itemsize or file_digest(file, "sha256").hexdigest() != digest:
            raise IntegrityError(
                f"damaged token shard ({path}, {size} bytes for {count} tokens). fix: delete its folder"
            )
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER, shape=(count,))
