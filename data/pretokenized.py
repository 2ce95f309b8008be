"""Token ids prepared by others: .bin files of nanoGPT and llm.c, memory-mapped where they are."""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.corpus import Corpus
from data.files import content_hash, split_files, text_hash
from data.sources import Source
from data.tokenizer import IdTokenizer

# A file of llm.c begins with magic, version and number of tokens, three int32, padded with zeros.
HEADER_BYTES = 1024
LLMC_FORMATS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: (version, dtype of tokens)


@dataclass(kw_only=True)
class Pretokenized(Source):
    """Ids of `tokenizer`, or of an unknown one with `vocab_size` ids and `bos` between documents.

    At most `validation_tokens` tokens are held out: the first ones of the files that split_files()
    holds out. If there are none, the end of the last file is held out, at most 5 % of it. Raises
    ValueError for a damaged file.
    """

    path: str | None
    validation_tokens: int
    bos: int

    def __post_init__(self):
        if self.validation_tokens < 2:
            raise ValueError(
                "data.validation_tokens must be at least 2 "
                f"(got {self.validation_tokens}). fix: data.validation_tokens=500_000"
            )
        self.train_files, self.val_files = split_files(self.path, (".bin",))
        # Without a tokenizer, the ids stand for themselves.
        self.id_tokenizer = self.pretrained_tokenizer()
        if self.id_tokenizer is None:
            self.id_tokenizer = IdTokenizer(self.vocab_size, self.bos)

    def fingerprint(self) -> str:
        # "input_ids" was an option once; without it, older runs would not find their corpus.
        hashes = f"{content_hash(self.train_files)} {content_hash(self.val_files)}"
        return f"{hashes} input_ids {self.validation_tokens}"

    def corpus(self) -> Corpus:
        """Map the files where they are, without a copy in the cache."""
        train = [self.open_bin(file) for file in self.train_files]
        if self.val_files:
            held_out = [self.open_bin(file)[: self.validation_tokens] for file in self.val_files]
        else:
            # Cut the end off the last file.
            last = train.pop()
            count = min(self.validation_tokens, max(2, len(last) // 20))
            train.append(last[:-count])
            held_out = [last[-count:]]
        validation = np.concatenate(held_out)[: self.validation_tokens]
        return Corpus(
            train,
            [validation],
            validation_bytes=self.id_tokenizer.nbytes(validation),
            tokenizer=self.id_tokenizer,
            sha256=text_hash(self.fingerprint()),
        )

    def open_bin(self, file: Path) -> np.ndarray:
        """Memory-map the tokens of a file, checking its length and its ids."""
        # A file or a glob may name a .parquet, which would be read as raw integers.
        if file.suffix == ".parquet":
            raise ValueError(f"no token ids from parquet (data.path={file}). fix: write a .bin")
        size = file.stat().st_size
        with file.open("rb") as opened:
            header = opened.read(12).ljust(12, b"\0")
        magic, version, num_tokens = struct.unpack("<3I", header)

        # A file without llm.c's magic number is nanoGPT's: tokens from the first byte on.
        start = 0
        dtype = "<u2"
        problem = f"{size} bytes"
        if magic in LLMC_FORMATS:
            start = HEADER_BYTES
            expected_version, dtype = LLMC_FORMATS[magic]
            problem += f", version {version}, {num_tokens} tokens by its header"
        count, rest = divmod(size - start, np.dtype(dtype).itemsize)
        is_whole = start == 0 or (version, num_tokens) == (expected_version, count)
        if count < 2 or rest != 0 or not is_whole:
            raise ValueError(
                f"a .bin file is incomplete or of another version ({file}: {problem}). "
                "fix: get it again"
            )

        # An id outside the vocabulary would index past the end of the embedding.
        ids = np.memmap(file, dtype, "r", start)
        highest = ids.max()
        if highest >= self.id_tokenizer.vocab_size:
            raise ValueError(
                f"a token outside the vocabulary ({file} has {highest}, "
                f"of {self.id_tokenizer.vocab_size}). fix: data.vocab_size or data.tokenizer"
            )
        return ids
