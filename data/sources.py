"""Sources of documents, and which of them are held out for validation."""

import importlib.metadata
import json
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from data.files import (
    ROW_SUFFIXES,
    TEXT_SUFFIXES,
    Part,
    Paths,
    content_hash,
    describe_files,
    read_parts,
    split_files,
)
from data.prepare import MAX_VALIDATION_BYTES, Source, text_hash

# Folders of Python code that are not read. Tests and encoding tables are not typical code, and
# site-packages differ between machines.
SKIPPED = {
    "test",
    "tests",
    "testing",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
}
# Of the first HEADER_LINES of a file that a program has written.
GENERATED = re.compile(
    r"auto-?generated|automatically generated|generated (by|from|file|code)"
    r"|do not (edit|modify)",
    re.IGNORECASE,
)
HEADER_LINES = 10
COPIED_LINE = 20  # characters from which on an equal line counts as copied


def is_held_out(identity: str, holdout: int) -> bool:
    """Whether a document is held out: one in `holdout` is, chosen by its hash."""
    return int(text_hash(identity), 16) % holdout == 0


@dataclass(kw_only=True)
class Stdlib(Source):
    """The Python standard library's own sources: real text that needs no download.

    A document is a file; one in 20 is held out.
    """

    def __post_init__(self):
        self.root = Path(sysconfig.get_paths()["stdlib"])
        # Skipped folders are not searched: site-packages may have tens of thousands of files.
        paths = list(self.root.glob("*.py"))
        for folder in self.root.iterdir():
            if folder.is_dir() and folder.name not in SKIPPED:
                paths += folder.rglob("*.py")
        self.files = []
        for path in paths:
            file = path.relative_to(self.root)
            if SKIPPED.isdisjoint(file.parts):
                self.files.append(file.as_posix())
        self.files.sort()

    def identity(self) -> str:
        return f"{sys.version} {self.root}"

    def parts(self) -> Iterator[Part]:
        for file in self.files:
            # tokenize.open() decodes by the encoding that a source file declares.
            with tokenize.open(self.root / file) as source:
                yield Part(source.read(), is_held_out(file, 20))


@dataclass(kw_only=True)
class Packages(Source):
    """The sources of installed Python packages: a large text that needs no download.

    A document is a file. Tests, generated files and copies are left out. Files come in the order of
    the hashes of their paths, and one in 20 is held out. `packages` are the names by which pip
    knows them; raises ValueError for one that is not installed.
    """

    packages: list[str]

    def __post_init__(self):
        files = {}
        for name in self.packages:
            try:
                distribution = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                raise ValueError(
                    f"this package is not installed ({name}). fix: pip install {name}, or leave it "
                    "out of data.packages"
                ) from None
            for file in distribution.files or ():
                if file.suffix == ".py" and SKIPPED.isdisjoint(file.parts):
                    files[file.as_posix()] = file
        # Neighbours in a folder are alike: the order of the hashes mixes them.
        self.files = [files[path] for path in sorted(files, key=text_hash)]

    def identity(self) -> str:
        # pip records the hash of each file that it installs.
        return json.dumps([[str(file), file.hash and file.hash.value] for file in self.files])

    def parts(self) -> Iterator[Part]:
        lines = set()  # of all files so far
        for file in self.files:
            with tokenize.open(file.locate()) as source:
                text = source.read()
            if text.strip() and not is_generated(text) and not is_copy(text, lines):
                yield Part(text, is_held_out(file.as_posix(), 20))


def is_generated(text: str) -> bool:
    """Whether the first lines of a file say that a program has written it."""
    header = "\n".join(text.split("\n", HEADER_LINES)[:HEADER_LINES])
    return GENERATED.search(header) is not None


def is_copy(text: str, known: set[int]) -> bool:
    """Whether most lines of a text are in `known`, hashes of lines; if not, its lines are added.

    Short lines, which many files share, do not count.
    """
    lines = [line.strip() for line in text.splitlines()]
    hashes = [hash(line) for line in lines if len(line) >= COPIED_LINE]
    num_known = sum(line in known for line in hashes)
    if num_known > len(hashes) / 2:
        return True
    known.update(hashes)
    return False


@dataclass(kw_only=True)
class Text(Source):
    """The user's own files: `path` is a file, a glob, a folder of TEXT_SUFFIXES, or a list of them.

    A .txt is cut into documents at lines equal to `separator`; the others have one document per
    row, in `text_field`. The files that split_files() holds out are for validation. If there are
    none, one document in `holdout` is held out, chosen by hash (at least one), or the end of a
    single document: 5 %, and at most MAX_VALIDATION_BYTES. Raises ValueError for a file that cannot
    be read as text.
    """

    path: Paths
    text_field: str
    separator: str
    holdout: int

    def __post_init__(self):
        if self.holdout < 2:
            raise ValueError(f"nothing to train on (data.holdout={self.holdout}). fix: 2 or more")
        if self.separator != self.separator.strip():
            raise ValueError(
                f"no line is equal to this separator (data.separator={self.separator!r}): white "
                f"space around a line does not count. fix: data.separator={self.separator.strip()!r}"
            )
        self.files = split_files(self.path, TEXT_SUFFIXES)

    def note(self) -> str | None:
        return describe_files(self.path, TEXT_SUFFIXES, self.files)

    def unused_keys(self) -> dict[str, str]:
        unused = {}
        suffixes = {file.suffix.lower() for file in (*self.files.train, *self.files.validation)}
        if self.files.validation:
            unused["data.holdout"] = "files are held out by their names"
        if suffixes.isdisjoint(ROW_SUFFIXES):
            unused["data.text_field"] = f"only {', '.join(ROW_SUFFIXES)} have fields"
        if suffixes.issubset(ROW_SUFFIXES):
            unused["data.separator"] = "each row is a document"
        return unused

    def identity(self) -> str:
        return json.dumps(
            [
                content_hash(self.files.train),
                content_hash(self.files.validation),
                self.text_field,
                self.separator,
                self.holdout,
            ]
        )

    def parts(self) -> Iterator[Part]:
        # Files that are held out by their names.
        if self.files.validation:
            for part in self.read(self.files.validation):
                yield part._replace(is_held_out=True)
            yield from self.read(self.files.train)
            return

        # Read everything once to know which documents are held out, then again to yield them.
        digests = []
        num_chars = 0
        num_bytes = 0
        document = sha256()
        for part in self.read(self.files.train):
            content = part.text.encode()
            document.update(content)
            num_chars += len(part.text)
            num_bytes += len(content)
            if part.is_last:
                digests.append(int(document.hexdigest(), 16))
                document = sha256()
        if not digests:
            raise ValueError(f"no documents (in {self.path}). fix: a file that is not empty")

        # A single document: hold out its end.
        if len(digests) == 1:
            most = num_chars * MAX_VALIDATION_BYTES // num_bytes
            yield from self.without_end(num_chars - max(1, min(num_chars // 20, most)))
            return

        # Hold out one document in `holdout`. If no hash qualifies, hold out the closest one.
        closest = min(digests, key=lambda digest: digest % self.holdout)
        number = 0
        for part in self.read(self.files.train):
            digest = digests[number]
            is_held_out = digest % self.holdout == 0 or digest == closest
            yield part._replace(is_held_out=is_held_out)
            number += part.is_last

    def without_end(self, num_chars: int) -> Iterator[Part]:
        """Yield the only document as two: hold out what follows its first `num_chars` characters."""
        num_left = num_chars  # characters to train on
        for part in self.read(self.files.train):
            train, held_out = part.text[:num_left], part.text[num_left:]
            if num_left > 0:
                yield Part(train, is_last=num_left <= len(part.text))
            if held_out:
                yield Part(held_out, is_held_out=True, is_last=part.is_last)
            num_left = max(0, num_left - len(part.text))

    def read(self, files: list[Path]) -> Iterator[Part]:
        return read_parts(files, self.text_field, self.separator)


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

    def unused_keys(self) -> dict[str, str]:
        if self.validation is None:
            return {}
        return {"data.holdout": "the dataset has a split for validation"}

    def parts(self) -> Iterator[Part]:
        if self.validation is not None:
            for text in self.texts(self.validation):
                yield Part(text, is_held_out=True)
        for text in self.texts(self.train):
            yield Part(text, self.validation is None and is_held_out(text, self.holdout))

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
