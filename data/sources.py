"""Where documents come from, and which of them are held out for validation.

A source yields its documents in an order that never changes, and identifies its content by a
fingerprint.
"""

import json
import re
import sysconfig
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from data.corpus import Corpus
from data.files import (
    TEXT_SUFFIXES,
    content_hash,
    read_documents,
    split_files,
    text_hash,
    text_of_row,
)
from data.tokenizer import Tokenizer

Documents = Iterator[tuple[str, bool]]  # (text, whether it is held out)


def is_held_out(identity: str, holdout: int) -> bool:
    """Whether a document is held out: one in `holdout` is, by its hash, in any order."""
    return int(text_hash(identity), 16) % holdout == 0


@dataclass(kw_only=True)
class Source(ABC):
    """Documents and their tokenizer: the file `tokenizer`, or else one of `vocab_size` pieces.

    A tokenizer that is not a file is trained on the training documents.
    """

    tokens = None  # training tokens to stop at; None: take all
    vocab_size: int
    tokenizer: str | None

    def __post_init__(self):
        if self.vocab_size < 300:
            raise ValueError(
                "data.vocab_size needs room for 256 bytes and more "
                f"(got {self.vocab_size}). fix: data.vocab_size=4096"
            )

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def pretrained_tokenizer(self) -> Tokenizer | None:
        """Load the tokenizer; None if it is to be trained."""
        return Tokenizer.load(self.tokenizer) if self.tokenizer else None

    def corpus(self) -> Corpus | None:
        """Return the corpus of a source without text; None if prepare() has to build it."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that is equal for equal documents and differs for others."""

    def documents(self) -> Documents:
        """Yield each document and whether it is held out, in an order that never changes.

        A source that returns a corpus has none.
        """
        return iter(())


@dataclass(kw_only=True)
class Stdlib(Source):
    """The Python standard library's own sources: real text that needs no download.

    A document is a file; one in 20 is held out.
    """

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
        # Tests and tables of encodings are not typical code, site-packages differ by machine.
        self.files = []
        for path in self.root.rglob("*.py"):
            relative = path.relative_to(self.root)
            if not self.SKIPPED & set(relative.parts):
                self.files.append(relative.as_posix())
        self.files.sort()

    def fingerprint(self) -> str:
        return content_hash([self.root / file for file in self.files])

    def documents(self) -> Documents:
        for file in self.files:
            # tokenize.open() decodes by the encoding that a source file declares.
            with tokenize.open(self.root / file) as source:
                yield source.read(), is_held_out(file, 20)


@dataclass(kw_only=True)
class Text(Source):
    """The user's own files: `path` is a file, a glob, or a folder of .txt, .jsonl and .parquet.

    A .txt is cut into documents at lines equal to `separator`; .jsonl and .parquet have one
    document per row, in `text_field`. The files that split_files() holds out are for validation. If
    there are none, one document in `holdout` is held out, chosen by hash (at least one), or the
    last 5 % of a single document. Raises ValueError for what cannot be read as text.
    """

    path: str | None
    text_field: str
    separator: str
    holdout: int

    def __post_init__(self):
        super().__post_init__()
        if self.holdout < 2:
            raise ValueError(
                f"data.holdout must be at least 2 (got {self.holdout}). fix: data.holdout=20"
            )
        self.train_files, self.val_files = split_files(self.path, TEXT_SUFFIXES)

    def fingerprint(self) -> str:
        hashes = f"{content_hash(self.train_files)} {content_hash(self.val_files)}"
        return f"{hashes} {self.text_field} {self.separator} {self.holdout}"

    def documents(self) -> Documents:
        # Files that are held out by their names.
        if self.val_files:
            for text in read_documents(self.val_files, self.text_field, self.separator):
                yield text, True
            for text in self.texts():
                yield text, False
            return

        # Read everything once to know which documents are held out, then again to yield them.
        digests = [int(text_hash(text), 16) for text in self.texts()]
        if not digests:
            files = ", ".join(map(str, self.train_files[:3]))
            raise ValueError(
                f"no documents (in {files}). fix: data.path=PATH of a file that is not empty"
            )

        # A lone document: hold out its end.
        if len(digests) == 1:
            text = next(self.texts())
            cut = len(text) - max(1, len(text) // 20)
            yield text[:cut], False
            yield text[cut:], True
            return

        # Hold out one document in `holdout`. If no hash qualifies, hold out the closest one.
        closest = min(digests, key=lambda digest: digest % self.holdout)
        for text, digest in zip(self.texts(), digests, strict=True):
            yield text, digest % self.holdout == 0 or digest == closest

    def texts(self) -> Iterator[str]:
        """Yield the documents of the files that are not held out."""
        return read_documents(self.train_files, self.text_field, self.separator)


@dataclass(kw_only=True)
class Hub(Source):
    """A public dataset of the Hugging Face hub, read with `datasets`.

    With `tokens`, the dataset is streamed until there are so many, instead of downloaded.
    `validation` names the dataset's own split; without one, a document in `holdout` is held out, by
    its hash. If rows are lines, `starts` is a regular expression of those that begin a document.
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
        """Ask the hub which commit `revision` names; documents() then reads that commit."""
        from huggingface_hub import HfApi

        # A commit hash needs no lookup, so it works offline.
        if not re.fullmatch("[0-9a-f]{40}", self.revision):
            with self._client_errors_as_value_errors():
                self.revision = HfApi().dataset_info(self.repo, revision=self.revision).sha
        return json.dumps(vars(self))

    def documents(self) -> Documents:
        if self.validation is not None:
            for text in self.texts(self.validation):
                yield text, True
        for text in self.texts(self.train):
            yield text, self.validation is None and is_held_out(text, self.holdout)

    def texts(self, split: str) -> Iterator[str]:
        """Yield the documents of a split: one row each, or the rows up to the next beginning."""
        from datasets import load_dataset

        with self._client_errors_as_value_errors():
            rows = load_dataset(
                self.repo,
                self.config,
                split=split,
                revision=self.revision,
                streaming=self.tokens is not None,
            )
            # Join rows until the next one begins a document. Without a pattern, each row does.
            parts = []
            for number, row in enumerate(rows):
                text = text_of_row(row, self.text_field, f"{self.repo} {split} row {number}")
                if parts and re.match(self.starts or "", text):
                    yield "".join(parts)
                    parts = []
                parts.append(text)
            yield "".join(parts)

    @contextmanager
    def _client_errors_as_value_errors(self) -> Iterator[None]:
        """Turn the errors of the hub's client libraries, of many kinds, into one-line errors."""
        try:
            yield
        except Exception as error:
            if "fix: " in str(error):
                raise
            # Their messages run over many lines; the first says what happened.
            reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
            raise ValueError(
                f"cannot read the dataset ({self.repo}: {reason}). "
                "fix: check the network and data.repo"
            ) from None
