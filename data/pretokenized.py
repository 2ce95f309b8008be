"""Token ids in .bin files of nanoGPT and llm.c, memory-mapped in place."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.corpus import Corpus
from data.files import content_hash, split_files
from data.prepare import Source, text_hash
from data.tokenizer import IdTokenizer, Tokenizer

# A file of llm.c begins with a header of 256 int32, of which three are used.
HEADER_BYTES = 1024
HEADER_FIELDS = ("magic", "version", "num_tokens")
LLMC_DTYPES = {20240520: "<u2", 20240801: "<u4"}  # by magic number: GPT-2's ids and Llama 3's


@dataclass(kw_only=True)
class Pretokenized(Source):
    """Token ids of `tokenizer`, or of an unknown one with `vocab_size` ids and the BOS id `bos`.

    At most `validation_tokens` tokens are held out: the beginning of the first file that
    split_files() holds out. If there is no such file, the end of the last file is held out, at most
    5 % of it. Raises ValueError for a damaged file.
    """

    path: str | None
    validation_tokens: int
    bos: int

    def __post_init__(self):
        self.train_files, self.val_files = split_files(self.path, (".bin",))
        # Without a tokenizer, the ids stand for themselves.
        self.ids_of = IdTokenizer(self.vocab_size, self.bos)
        if self.tokenizer:
            self.ids_of = Tokenizer.load(self.tokenizer)

    def identity(self) -> str:
        train = content_hash(self.train_files)
        return f"{train} {content_hash(self.val_files)} {self.validation_tokens}"

    def corpus(self) -> Corpus:
        """Memory-map the files in place, without a copy in the cache."""
        train = [self.open_bin(file) for file in self.train_files]
        if self.val_files:
            validation = self.open_bin(self.val_files[0])[: self.validation_tokens]
        else:
            # Cut the end off the last file.
            count = min(self.validation_tokens, max(2, len(train[-1]) // 20))
            validation = train[-1][-count:]
            train[-1] = train[-1][:-count]
        return Corpus(
            train=train,
            validation=validation,
            tokenizer=self.ids_of,
            sha256=text_hash(self.identity()),
        )

    def open_bin(self, file: Path) -> np.ndarray:
        """Memory-map the tokens of a file, and check its length and its ids."""
        # A file without llm.c's magic number is nanoGPT's: tokens from the first byte on.
        header = read_header(file)
        is_llmc = header.get("magic") in LLMC_DTYPES
        if is_llmc:
            dtype = np.dtype(LLMC_DTYPES[header["magic"]])
            start = HEADER_BYTES
        else:
            dtype = np.dtype("<u2")
            start = 0
        count, rest = divmod(file.stat().st_size - start, dtype.itemsize)
        is_whole = count >= 2 and rest == 0
        if is_whole and is_llmc:
            is_whole = count == header["num_tokens"]
        if not is_whole:
            raise ValueError(f"an incomplete .bin file ({file}: {count} tokens). fix: get it again")

        # An id outside the vocabulary would index past the end of the embedding.
        tokens = np.memmap(file, dtype, "r", start)
        assert len(tokens) == count
        highest = tokens.max()
        if highest >= self.ids_of.vocab_size:
            raise ValueError(
                f"a token outside the vocabulary ({file} has {highest}, "
                f"of {self.ids_of.vocab_size}). fix: data.vocab_size or data.tokenizer; for "
                "text, data=text"
            )
        return tokens


def read_header(file: Path) -> dict[str, int]:
    """Read the first numbers of a file as HEADER_FIELDS, or fewer if the file is shorter."""
    numbers = np.fromfile(file, "<u4", count=len(HEADER_FIELDS)).tolist()
    return dict(zip(HEADER_FIELDS, numbers, strict=False))
