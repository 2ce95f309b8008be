"""Where documents come from, and which of them are held out for validation.

A source yields (document, held out?) in an order of its own that never changes, and names its content by a fingerprint.
"""

import json
import re
import sysconfig
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np

from data.files import TEXTS, content_hash, read_documents, split_files, text_of_row
from data.tokenizer import Tokenizer

BATCH = 256  # documents tokenised together
Documents = Iterator[tuple[str, bool]]
Tokenised = Iterator[tuple[np.ndarray, int, bool]]  # tokens, UTF-8 bytes, held out?


def is_held_out(identity: str, holdout: int) -> bool:
    """True for one in `holdout`, by the hash of what identifies a document: everywhere the same, in any order."""
    return int(sha256(identity.encode()).hexdigest(), 16) % holdout == 0


@dataclass(kw_only=True)
class Source(ABC):
    """Text, and the tokenizer for it: a file `tokenizer`, or one of `vocab_size` pieces trained on the documents."""

    tokens = None  # to stop at; None: take all
    vocab_size: int
    tokenizer: str | None

    def __post_init__(self):
        if self.vocab_size < 300:
            raise ValueError(
                f"data.vocab_size needs room for 256 bytes and more (got {self.vocab_size}). fix: 4096"
            )

    def pretrained_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, where none is to be trained."""
        return Tokenizer.load(self.tokenizer) if self.tokenizer else None

    def memmapped_shards(self) -> dict[str, list[np.ndarray]] | None:
        """The shards of both splits, where the source has them."""
        return None

    def tokenize(self, tokenizer: Tokenizer) -> Tokenised:
        return tokenize_documents(self.documents(), tokenizer)

    @abstractmethod
    def fingerprint(self) -> str:
        """The same where the documents are, another where they differ."""

    @abstractmethod
    def documents(self) -> Documents:
        """Each with whether it is held out, in an order that never changes."""


@dataclass(kw_only=True)
class Stdlib(Source):
    """The Python standard library's own sources: real text that needs no download. One file in 20 is held out."""

    SKIPPED = {
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "encodings",
        "pydoc_data",
        "site-packages",
        "dist-packages",
    }

    def __post_init__(self):
        super().__post_init__()
        self.root = Path(sysconfig.get_paths()["stdlib"])
        relative = (path.relative_to(self.root) for path in self.root.rglob("*.py"))
        self.files = sorted(
            path.as_posix() for path in relative if not self.SKIPPED & set(path.parts)
        )
        if not self.files:
            raise ValueError(
                f"this Python has no sources (in {self.root}). fix: data=text data.path=FILE"
            )

    def fingerprint(self) -> str:
        return content_hash([self.root / file for file in self.files])

    def documents(self) -> Documents:
        for file in self.files:
            with tokenize.open(self.root / file) as source:  # knows the coding that a file declares
                yield source.read(), is_held_out(file, 20)


@dataclass(kw_only=True)
class Text(Source):
    """The user's own files: `path` is a file, a glob, or a folder of .txt, .jsonl and .parquet.

    A .txt is cut into documents at lines that are just `separator`; others have one a row, in `text_field`.
    Held out are the files that are named so (`files_of`), or else one document in `holdout`, by its hash, at least one;
    or the last 5 % of a lone one. Raises ValueError for what cannot be read as text.
    """

    path: str | None
    text_field: str
    separator: str
    holdout: int

    def __post_init__(self):
        super().__post_init__()
        if self.holdout < 2:
            raise ValueError(f"data.holdout must be from 2 (got {self.holdout}). fix: 20")
        self.files, self.held = split_files(self.path, TEXTS)

    def fingerprint(self) -> str:
        return f"{content_hash(self.files)} {content_hash(self.held)} {self.text_field} {self.separator} {self.holdout}"

    def documents(self) -> Documents:
        if self.held:
            yield from ((text, True) for text in self.texts(*self.held))
            yield from ((text, False) for text in self.texts())
            return
        hashes = [int(sha256(text.encode()).hexdigest(), 16) for text in self.texts()]
        if not hashes:
            raise ValueError(
                f"no documents (in {', '.join(map(str, self.files[:3]))}). fix: a file that is not empty"
            )
        if len(hashes) == 1:
            text = next(self.texts())
            cut = len(text) - max(1, len(text) // 20)
            yield from ((text[:cut], False), (text[cut:], True))
            return
        lowest = min(hashes, key=lambda h: h % self.holdout)
        for text, digest in zip(self.texts(), hashes, strict=True):
            yield text, digest % self.holdout == 0 or digest == lowest

    def texts(self, *files: Path) -> Iterator[str]:
        """Those of these files, or of all that are not held out."""
        return read_documents(files or self.files, self.text_field, self.separator)


@dataclass(kw_only=True)
class Hub(Source):
    """A public dataset of the Hugging Face hub, read with `datasets`.

    `tokens` streams about so many instead of downloading all. `validation` names the dataset's own split; without
    one, a document in `holdout` is held out, by its hash. Where rows are lines, `starts` is a pattern of those that
    begin a document.
    """

    repo: str
    config: str | None
    revision: str
    train: str
    validation: str | None
    text_field: str
    starts: str | None
    tokens: int | None
    holdout: int

    def fingerprint(self) -> str:
        """Asks the hub for the commit that `revision` names; the next calls read that commit."""
        from huggingface_hub import HfApi

        if not re.fullmatch(
            "[0-9a-f]{40}", self.revision
        ):  # a commit is its own answer, without a network
            with self._explained():
                self.revision = HfApi().dataset_info(self.repo, revision=self.revision).sha
        return json.dumps(vars(self))

    def documents(self) -> Documents:
        if self.validation is not None:
            for text in self.texts(self.validation):
                yield text, True
        for text in self.texts(self.train):
            yield text, self.validation is None and is_held_out(text, self.holdout)

    def texts(self, split: str) -> Iterator[str]:
        from datasets import load_dataset

        streamed = self.tokens is not None
        with self._explained():
            rows = load_dataset(
                self.repo, self.config, split=split, revision=self.revision, streaming=streamed
            )
            lines = []
            for number, row in enumerate(rows):
                line = text_of_row(row, self.text_field, f"{self.repo} {split} row {number}")
                if lines and (self.starts is None or re.match(self.starts, line)):
                    yield "".join(lines)
                    lines = []
                lines.append(line)
            yield "".join(lines)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the client's libraries have many kinds
            if "fix: " in str(error):
                raise
            reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
            raise ValueError(
                f"cannot read the dataset ({self.repo}: {reason}). fix: network, or data.repo"
            ) from None


def tokenize_documents(documents: Iterable[tuple[str, bool]], tokenizer: Tokenizer) -> Tokenised:
    documents = iter(documents)
    while batch := list(islice(documents, BATCH)):
        texts = [text for text, _ in batch]
        for tokens, (text, held_out) in zip(tokenizer.encode_documents(texts), batch, strict=True):
            yield tokens, len(text.encode()), held_out
