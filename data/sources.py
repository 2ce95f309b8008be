"""Sources of documents, and which of them are held out for validation."""

import json
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.files import TEXT_SUFFIXES, content_hash, read_documents, split_files
from data.prepare import Source, text_hash

Documents = Iterator[tuple[str, bool]]  # (text, whether it is held out)


def is_held_out(identity: str, holdout: int) -> bool:
    """Whether a document is held out: one in `holdout` is, chosen by its hash."""
    return int(text_hash(identity), 16) % holdout == 0


@dataclass(kw_only=True)
class Stdlib(Source):
    """The Python standard library's own sources: real text that needs no download.

    A document is a file; one in 20 is held out.
    """

    # Tests and encoding tables are not typical code, and site-packages differ between machines.
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
        self.root = Path(sysconfig.get_paths()["stdlib"])
        # Skipped folders are not searched: site-packages may have tens of thousands of files.
        paths = list(self.root.glob("*.py"))
        for folder in self.root.iterdir():
            if folder.is_dir() and folder.name not in self.SKIPPED:
                paths += folder.rglob("*.py")
        self.files = []
        for path in paths:
            file = path.relative_to(self.root)
            if self.SKIPPED.isdisjoint(file.parts):
                self.files.append(file.as_posix())
        self.files.sort()

    def identity(self) -> str:
        return f"{sys.version} {self.root}"

    def documents(self) -> Documents:
        for file in self.files:
            # tokenize.open() decodes by the encoding that a source file declares.
            with tokenize.open(self.root / file) as source:
                yield source.read(), is_held_out(file, 20)


@dataclass(kw_only=True)
class Text(Source):
    """The user's own files: `path` is a file, a glob, or a folder of TEXT_SUFFIXES.

    A .txt is cut into documents at lines equal to `separator`; the others have one document per
    row, in `text_field`. The files that split_files() holds out are for validation. If there are
    none, one document in `holdout` is held out, chosen by hash (at least one), or the last 5 % of
    a single document. Raises ValueError for a file that cannot be read as text.
    """

    path: str | None
    text_field: str
    separator: str
    holdout: int

    def __post_init__(self):
        if self.holdout < 2:
            raise ValueError(f"nothing to train on (data.holdout={self.holdout}). fix: 2 or more")
        self.train_files, self.val_files = split_files(self.path, TEXT_SUFFIXES)

    def identity(self) -> str:
        return json.dumps(
            [
                content_hash(self.train_files),
                content_hash(self.val_files),
                self.text_field,
                self.separator,
                self.holdout,
            ]
        )

    def documents(self) -> Documents:
        # Files that are held out by their names.
        if self.val_files:
            for text in self.texts(self.val_files):
                yield text, True
            for text in self.texts(self.train_files):
                yield text, False
            return

        # Read everything once to know which documents are held out, then again to yield them.
        digests = [int(text_hash(text), 16) for text in self.texts(self.train_files)]
        if not digests:
            raise ValueError(f"no documents (in {self.path}). fix: a file that is not empty")

        # A single document: hold out its end.
        if len(digests) == 1:
            text = next(self.texts(self.train_files))
            cut = len(text) - max(1, len(text) // 20)
            yield text[:cut], False
            yield text[cut:], True
            return

        # Hold out one document in `holdout`. If no hash qualifies, hold out the closest one.
        closest = min(digests, key=lambda digest: digest % self.holdout)
        for text, digest in zip(self.texts(self.train_files), digests, strict=True):
            yield text, digest % self.holdout == 0 or digest == closest

    def texts(self, files: list[Path]) -> Iterator[str]:
        return read_documents(files, self.text_field, self.separator)


@dataclass(kw_only=True)
class Hub(Source):
    """A public dataset of the Hugging Face hub, read with `datasets`.

    With `tokens`, the dataset is not downloaded but streamed, until there are that many tokens.
    `validation` names the dataset's own split; without one, one document in `holdout` is held out,
    chosen by its hash. If rows are lines, the regular expression `starts` matches the lines that
    begin a document. The cache key is these settings: a branch as `revision` is read only once.
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

    def documents(self) -> Documents:
        if self.validation is not None:
            for text in self.texts(self.validation):
                yield text, True
        for text in self.texts(self.train):
            yield text, self.validation is None and is_held_out(text, self.holdout)

    def texts(self, split: str) -> Iterator[str]:
        """Yield the documents of a split: each row, or with `starts`, rows up to the next start."""
        from datasets import load_dataset

        parts = []  # rows of the current document
        try:
            rows = load_dataset(
                self.repo,
                self.config,
                split=split,
                revision=self.revision,
                streaming=self.tokens is not None,
            )
            for row in rows:
                text = row[self.text_field]
                begins_document = self.starts is None or re.match(self.starts, text) is not None
                if parts and begins_document:
                    yield "".join(parts)
                    parts = []
                parts.append(text)
        # The hub's client libraries raise errors of many kinds, whose messages have many lines.
        except Exception as error:
            first_line, _, _ = str(error).partition("\n")
            reason = first_line.rstrip(".") or type(error).__name__
            raise ValueError(
                f"cannot read the dataset ({self.repo}: {reason}). "
                "fix: check the network and data.repo"
            ) from None
        yield "".join(parts)
