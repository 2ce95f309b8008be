"""Token ids in nanoGPT's and llm.c's .bin files, memory-mapped in place."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from data.corpus import Corpus
from data.files import Paths, content_hash, split_files
from data.prepare import Source, dtype_of, text_hash
from data.tokenizer import IdTokenizer, Tokenizer, tokenizer_file
from run.ranges import AtLeastTwo, NonNegativeInt

# An llm.c file begins with a header of 256 int32 values, three of which are used.
HEADER_BYTES = 1024
MIN_PROBED_TOKENS = 100  # fewer tokens do not reveal the width of the ids
PROBED_TOKENS = 1_000_000
HEADER_FIELDS = ("magic", "version", "num_tokens")
LLMC_DTYPES = {20240520: "<u2", 20240801: "<u4"}  # by magic number, for GPT-2 and Llama 3 ids


@dataclass(kw_only=True)
class Pretokenized(Source):
    """Token ids of `tokenizer`, or of an unknown tokenizer with `vocab_size` ids and BOS id `bos`.

    At most `validation_tokens` tokens are held out: the beginning of the files that `validation`
    names or, if it is null, the last 5% of the last file, but at least two tokens. Files without a
    header contain ids of `dtype`; null means the dtype of our own shards, which is uint16 if the
    vocabulary fits, and otherwise uint32. Raises ValueError for a damaged file, and for ids that do
    not fit the dtype, the tokenizer or the vocabulary.
    """

    path: Paths
    validation: Paths = None
    validation_tokens: AtLeastTwo
    bos: NonNegativeInt
    dtype: Literal["uint16", "uint32"] | None = None

    def __post_init__(self):
        self.files, self.held_out_files = split_files(self.path, self.validation, (".bin",))
        for file in (*self.files, *self.held_out_files):
            if file.suffix.lower() != ".bin":
                raise ValueError(
                    f"not a .bin file of token ids ({file}). fix: for text, use data=text; if the "
                    "file contains ids, rename it to end in .bin"
                )
        # Without a tokenizer, ids serve as their own text.
        if self.tokenizer:
            self.ids_of = Tokenizer.load(self.tokenizer)
        elif self.bos < self.vocab_size:
            self.ids_of = IdTokenizer(self.vocab_size, self.bos)
        else:
            raise ValueError(
                f"BOS is not in the vocabulary (data.bos={self.bos} "
                f"data.vocab_size={self.vocab_size}). fix: data.bos=ID, the id that separates "
                f"documents; without such an id, data.vocab_size={self.vocab_size + 1} "
                f"data.bos={self.vocab_size}"
            )

    def identity(self) -> str:
        train = content_hash(self.files)
        identity = f"{train} {content_hash(self.held_out_files)} {self.validation_tokens}"
        if self.dtype is not None:
            identity += f" {self.dtype}"
        return identity

    def corpus(self) -> Corpus:
        """Memory-map the files in place, without a copy in the cache."""
        train = [self.open_bin(file) for file in self.files]
        if self.held_out_files:
            shards = [self.open_bin(file) for file in self.held_out_files]
            beginnings = [shard[: self.validation_tokens] for shard in shards]
            validation = np.concatenate(beginnings)[: self.validation_tokens]
        else:
            # Cut the end off the last file.
            count = min(self.validation_tokens, max(2, len(train[-1]) // 20))
            validation = train[-1][-count:]
            train[-1] = train[-1][:-count]
            if len(train[-1]) == 0 and len(train) > 1:
                train.pop()
        identity = self.identity()
        return Corpus(
            train=train, validation=validation, tokenizer=self.ids_of, sha256=text_hash(identity)
        )

    def open_bin(self, file: Path) -> np.ndarray:
        """Memory-map a file's tokens, and check its tokenizer, its length and its ids."""
        # Our own shards are in the folder of their tokenizer. If `file` is a link, look in its own
        # folder first, then in the folder of its target.
        own = tokenizer_file(file.parent)
        if not own.exists():
            own = tokenizer_file(file.resolve().parent)
        if own.exists() and encoding(Tokenizer.load(own)) != encoding(self.ids_of):
            raise ValueError(
                f"the ids are not from the tokenizer of this run ({file}). fix: "
                f"data.tokenizer={own}, without init_from"
            )

        # A file without llm.c's magic number has no header, as in nanoGPT and our shards.
        header = read_header(file)
        is_llmc = header.get("magic") in LLMC_DTYPES
        if is_llmc:
            dtype = np.dtype(LLMC_DTYPES[header["magic"]])
            start = HEADER_BYTES
        else:
            dtype = np.dtype(self.dtype or dtype_of(self.ids_of)).newbyteorder("<")
            start = 0
        count, rest = divmod(file.stat().st_size - start, dtype.itemsize)
        is_whole = count >= 2 and rest == 0
        if is_whole and is_llmc:
            is_whole = count == header["num_tokens"]
        if not is_whole:
            raise ValueError(
                f"the file is incomplete, or its ids are not {dtype.name} ({file}: {count} ids). "
                "fix: copy it again, or set data.dtype"
            )

        # If ids are stored at twice this width, every other number read here is close to 0. Valid
        # uint16 ids may look the same, so data.dtype turns their check off. The upper halves of
        # 64-bit ids are exactly 0.
        tokens = np.memmap(file, dtype, "r", start)
        assert len(tokens) == count
        highest = tokens.max()
        probe = tokens[:PROBED_TOKENS]
        halves = sorted([probe[::2].mean(), probe[1::2].mean()])
        is_halved = halves[0] * 64 < halves[1] and len(probe) >= MIN_PROBED_TOKENS
        if is_halved and halves[0] == 0 and dtype.name == "uint32":
            raise ValueError(f"64-bit ids are not supported ({file}). fix: store them as uint32")
        if is_halved and dtype.name == "uint16" and self.dtype is None and not is_llmc:
            raise ValueError(
                "every other id is close to 0 when read as uint16, so the dtype may be wrong "
                f"({file}). fix: data.dtype=uint32, or, if the dtype is right, data.dtype=uint16"
            )
        # An id outside the vocabulary would index past the end of the embedding.
        if highest >= self.ids_of.vocab_size:
            raise ValueError(
                f"a token id is outside the vocabulary ({file} contains {highest} when read as "
                f"{dtype.name}, data.vocab_size={self.ids_of.vocab_size}). fix: correct "
                "data.vocab_size, data.tokenizer or data.dtype; for text, use data=text"
            )
        return tokens


def encoding(tokenizer: Tokenizer) -> tuple:
    """Return what determines the ids of a document."""
    return tokenizer.files[tokenizer.FILE], tokenizer.bos, tokenizer.document_ends


def read_header(file: Path) -> dict[str, int]:
    """Return a file's header fields by name, without fields that lie beyond the file's end."""
    numbers = np.fromfile(file, "<u4", count=len(HEADER_FIELDS)).tolist()
    return dict(zip(HEADER_FIELDS, numbers, strict=False))
