"""Document sources, and the choice of documents held out for validation."""

import importlib.metadata
import json
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
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

# Folders of Python code that are skipped. Tests and encoding tables are not typical code, and
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
# Matches text in the header of a generated file, which is its first HEADER_LINES lines.
GENERATED = re.compile(
    r"auto-?generated|automatically generated|generated (by|from|file|code)"
    r"|do not (edit|modify)",
    re.IGNORECASE,
)
HEADER_LINES = 10
COPIED_LINE = 20  # characters; shorter lines do not count as copied


def enough_held_out(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield held-out parts until they have more than MAX_VALIDATION_BYTES; the rest is not used."""
    num_bytes = 0
    for part in parts:
        num_bytes += len(part.text.encode())
        if num_bytes > MAX_VALIDATION_BYTES:
            # End the document here, because its other parts are not read.
            yield Part(part.text, is_held_out=True, is_last=True)
            return
        yield part._replace(is_held_out=True)


def check_holdout(holdout: int) -> None:
    """Raise ValueError if `holdout` leaves no text for training."""
    if holdout < 2:
        raise ValueError(
            f"no text is left for training (data.holdout={holdout}). fix: set it to 2 or more"
        )


def is_held_out(identity: str, holdout: int) -> bool:
    """Whether a document is held out; the hashes select about one document in `holdout`."""
    return int(text_hash(identity), 16) % holdout == 0


@dataclass(kw_only=True)
class Stdlib(Source):
    """The Python standard library's source files: real text that needs no download.

    Each file is a document; one in 20 is held out.
    """

    def __post_init__(self):
        self.root = Path(sysconfig.get_paths()["stdlib"])
        # Skipped folders are not searched, as site-packages may have tens of thousands of files.
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
            # tokenize.open() decodes with the encoding that a source file declares.
            with tokenize.open(self.root / file) as source:
                yield Part(source.read(), is_held_out(file, 20))


@dataclass(kw_only=True)
class Packages(Source):
    """Source files of installed Python packages: a large amount of text that needs no download.

    Each file is a document. Tests, generated files and copies are excluded. Files are ordered by
    the hashes of their paths, and one in 20 is held out. `packages` are names as pip lists them.
    Raises ValueError if a package is not installed.
    """

    packages: list[str]

    def __post_init__(self):
        files = {}
        for name in self.packages:
            try:
                distribution = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                raise ValueError(
                    f"package not installed ({name}). fix: pip install {name}, or remove it from "
                    "data.packages"
                ) from None
            for file in distribution.files or ():
                if file.suffix == ".py" and SKIPPED.isdisjoint(file.parts):
                    files[file.as_posix()] = file
        # Files in one folder are similar, so mix them with other files by ordering by hash.
        self.files = [files[path] for path in sorted(files, key=text_hash)]

    def identity(self) -> str:
        # pip records the hash of each file that it installs.
        return json.dumps([[str(file), file.hash and file.hash.value] for file in self.files])

    def parts(self) -> Iterator[Part]:
        lines = set()  # hashes of the lines of all files so far
        for file in self.files:
            with tokenize.open(file.locate()) as source:
                text = source.read()
            if text.strip() and not is_generated(text) and not is_copy(text, lines):
                yield Part(text, is_held_out(file.as_posix(), 20))


def is_generated(text: str) -> bool:
    """Whether the first lines of a file mark it as generated by a program."""
    header = "\n".join(text.split("\n", HEADER_LINES)[:HEADER_LINES])
    return GENERATED.search(header) is not None


def is_copy(text: str, known: set[int]) -> bool:
    """Whether most lines in a text are in `known`, a set of line hashes; if not, add its lines.

    Short lines, which many files share, are ignored.
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
    """The user's own files: `path` is a file, a glob, a folder, or a list of these.

    In a folder, only files with TEXT_SUFFIXES are read. A .txt file is split into documents at
    lines equal to `separator`; the other formats have one document per row, in `text_field`. Files
    that split_files() holds out are used for validation. If there are none, about one document in
    `holdout` is chosen by hash, but at least one in total. If there is only one document, its last
    5% is held out, but at most MAX_VALIDATION_BYTES. Raises ValueError for a file that cannot be
    read as text.
    """

    path: Paths
    text_field: str
    separator: str
    holdout: int

    def __post_init__(self):
        check_holdout(self.holdout)
        if self.separator != self.separator.strip():
            raise ValueError(
                "no line can match the separator, because whitespace around lines is ignored "
                f"(data.separator={self.separator!r}). fix: "
                f"data.separator={self.separator.strip()!r}"
            )
        self.files = split_files(self.path, TEXT_SUFFIXES)

    def note(self) -> str | None:
        return describe_files(self.path, TEXT_SUFFIXES, self.files)

    def unused_keys(self) -> dict[str, str]:
        unused = {}
        suffixes = {file.suffix.lower() for file in (*self.files.train, *self.files.validation)}
        if self.files.validation:
            unused["data.holdout"] = "held-out files are chosen by name"
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
        # Hold out files by their names.
        if self.files.validation:
            yield from enough_held_out(self.read(self.files.validation))
            yield from self.read(self.files.train)
            return

        # Read everything once to decide which documents to hold out, then again to yield them.
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
            raise ValueError(f"no documents ({self.path}). fix: use files that contain text")

        # A single document: hold out its end.
        if len(digests) == 1:
            most = num_chars * MAX_VALIDATION_BYTES // num_bytes
            yield from self.without_end(num_chars - max(1, min(num_chars // 20, most)))
            return

        # Hold out one document in `holdout`. If no hash qualifies, or all do, hold out the closest.
        held_out = {digest for digest in digests if digest % self.holdout == 0}
        if not held_out or held_out.issuperset(digests):
            held_out = {min(digests, key=lambda digest: digest % self.holdout)}
        number = 0
        for part in self.read(self.files.train):
            yield part._replace(is_held_out=digests[number] in held_out)
            number += part.is_last

    def without_end(self, num_chars: int) -> Iterator[Part]:
        """Split the only document in two: the text after `num_chars` characters is held out."""
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


class NoText(ValueError):
    """A row of a dataset has no text."""


@dataclass(kw_only=True)
class Hub(Source):
    """A public dataset on the Hugging Face Hub, read with `datasets`.

    With `tokens`, the dataset is streamed instead of downloaded, up to that many tokens.
    `validation` names the dataset's validation split; without it, about one document in `holdout`
    is held out, chosen by hash. If rows are lines, the regular expression `starts` matches the
    lines that begin a document. The cache key consists of these settings, so a branch given as
    `revision` is read only once.
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

    def __post_init__(self):
        check_holdout(self.holdout)

    def unused_keys(self) -> dict[str, str]:
        if self.validation is None:
            return {}
        return {"data.holdout": "the dataset has a validation split"}

    def parts(self) -> Iterator[Part]:
        if self.validation is not None:
            yield from enough_held_out(map(Part, self.texts(self.validation)))
        for text in self.texts(self.train):
            yield Part(text, self.validation is None and is_held_out(text, self.holdout))

    def texts(self, split: str) -> Iterator[str]:
        """Yield a split's documents: its rows, or with `starts`, all rows up to the next start."""
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
                text = row.get(self.text_field)
                if not isinstance(text, str):
                    raise NoText(self.describe_row(row))
                begins_document = self.starts is None or re.match(self.starts, text) is not None
                if parts and begins_document:
                    yield "".join(parts)
                    parts = []
                parts.append(text)
        except NoText:
            raise
        # The hub's client libraries raise many types of errors, with multi-line messages.
        except Exception as error:
            first_line, _, _ = str(error).partition("\n")
            reason = first_line.rstrip(".") or type(error).__name__
            raise ValueError(
                f"cannot read the dataset ({self.repo}: {reason}). "
                "fix: check the network and data.repo"
            ) from None
        yield "".join(parts)

    def describe_row(self, row: dict) -> str:
        """Return the error for a row without text in `text_field`."""
        if self.text_field in row:
            problem = f"a row has no text in the field {self.text_field!r} ({self.repo})"
            return f"{problem}. fix: choose a different data.text_field or data.repo"
        fields = [name for name, value in row.items() if isinstance(value, str)]
        return (
            f"no field {self.text_field!r} ({self.repo}; fields with text: "
            f"{', '.join(fields) or 'none'}). fix: set data.text_field"
        )
