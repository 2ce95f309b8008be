"""Text that others have tokenised: .bin files, mapped where they lie, or rows of .parquet."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.files import content_hash, parquet_column, split_files
from data.sources import Source, Tokenised
from data.tokenizer import IdTokenizer, Tokenizer

HEAD = 1024  # bytes before llm.c's tokens: int32 magic, version, number of tokens, zeros
FORMATS = {
    20240520: (1, "<u2"),
    20240801: (7, "<u4"),
}  # version and tokens by the magic; all else is nanoGPT's


@dataclass(kw_only=True)
class Pretokenized(Source):
    """Ids of `tokenizer`, or of one that is not here: then of `vocab_size`, with `bos` between documents.

    Held out are at most `validation_tokens`: the first of the files that are named so (`files_of`), or else the end of
    the last .bin, 5 % of it at most, or one .parquet row in 20. Raises ValueError for a file that is not whole.
    """

    path: str | None
    tokens_field: str
    validation_tokens: int
    bos: int

    def __post_init__(self):
        if self.validation_tokens < 2:
            raise ValueError(
                f"data.validation_tokens must be from 2 (got {self.validation_tokens}). fix: 500_000"
            )
        self.files, self.held = split_files(self.path, (".bin", ".parquet"))
        self.known = super().pretrained_tokenizer() or IdTokenizer(
            IdTokenizer.MAGIC + f"{self.vocab_size} {self.bos}\n".encode()
        )

    def pretrained_tokenizer(self) -> Tokenizer:
        return self.known

    def fingerprint(self) -> str:
        return f"{content_hash(self.files)} {content_hash(self.held)} {self.tokens_field} {self.validation_tokens}"

    def memmapped_shards(self) -> dict[str, list[np.ndarray]] | None:
        if any(file.suffix == ".parquet" for file in (*self.files, *self.held)):
            return None
        train, held = ([self.shard(file) for file in files] for files in (self.files, self.held))
        if not held:
            cut = len(train[-1]) - min(self.validation_tokens, max(2, len(train[-1]) // 20))
            train[-1], held = train[-1][:cut], [train[-1][cut:]]
        held = np.concatenate([shard[: self.validation_tokens] for shard in held])[
            : self.validation_tokens
        ]
        return {"train": train, "validation": [held]}

    def shard(self, file: Path) -> np.ndarray:
        with file.open("rb") as opened:
            magic, *said = (int.from_bytes(opened.read(4), "little") for _ in range(3))
        version, dtype = FORMATS.get(magic, (None, "<u2"))
        start, size = 0 if version is None else HEAD, file.stat().st_size
        count, rest = divmod(size - start, np.dtype(dtype).itemsize)
        if count < 2 or rest or (start and said != [version, count]):
            head = f", version {said[0]}, said to have {said[1]} tokens" if start else ""
            raise ValueError(
                f"not whole, or of another version ({file}: {size} bytes{head}). fix: get it again"
            )
        return self.checked(np.memmap(file, dtype, "r", start), str(file))

    def checked(self, ids: np.ndarray, where: str) -> np.ndarray:
        low, high = 0 if ids.dtype.kind == "u" else ids.min(), ids.max()
        if low < 0 or high >= self.known.vocab_size:
            bad = f"{where} has {low if low < 0 else high}, of {self.known.vocab_size}"
            raise ValueError(
                f"a token outside the vocabulary ({bad}). fix: data.vocab_size or data.tokenizer"
            )
        return ids

    def tokenize(self, tokenizer: Tokenizer) -> Tokenised:
        return (
            (ids, 0, held_out) for ids, held_out in self.documents()
        )  # how many bytes, the tokenizer may know

    def documents(self) -> Iterator[tuple[np.ndarray, bool]]:
        left = self.validation_tokens
        rows = (
            (file in self.held, ids)
            for file in (*self.held, *self.files)
            for ids in self.rows(file)
        )
        for number, (named, ids) in enumerate(rows):
            if left > 0 and (named or (not self.held and number % 20 == 0)):
                yield ids[:left], True
                left -= len(ids)
            elif not named:
                yield ids, False

    def rows(self, file: Path) -> Iterator[np.ndarray]:
        """Each with BOS before it, if it is not there."""
        for number, row in enumerate(parquet_column(file, self.tokens_field), start=1):
            ids, where = np.array(row.as_py()), f"{file} row {number}"
            if ids.ndim != 1 or (len(ids) and ids.dtype.kind != "i"):
                raise ValueError(
                    f"no ids in the field {self.tokens_field!r} ({where}). fix: data.tokens_field=..."
                )
            if len(ids):
                ids = self.checked(ids, where)
                yield ids if ids[0] == self.known.bos else np.insert(ids, 0, self.known.bos)
