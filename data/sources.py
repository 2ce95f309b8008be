"""Document sources, and the choice of documents held out for validation."""

import importlib.metadata
import json
import re
import sys
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from data.files import (
    TEXT_SUFFIXES,
    DocumentPart,
    Paths,
    content_hash,
    cut,
    read_parts,
    split_files,
)
from data.prepare import MAX_VALIDATION_BYTES, Source, text_hash
from run.progress import print0
from run.ranges import AtLeastTwo, PositiveInt

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
# Number of characters that identify a document. The first part of a long document has more.
HASHED_CHARS = 100_000


def given_split(
    held_out: Iterable[DocumentPart], train: Iterable[DocumentPart]
) -> Iterator[DocumentPart]:
    """Yield held-out parts, then parts of training documents that are not copies of held-out ones.

    Held-out parts beyond MAX_VALIDATION_BYTES are not used, but their copies are left out too.
    """
    hashes = set()
    num_bytes = 0
    for part in held_out:
        if part.is_first:
            hashes.add((document_hash(part.text), length_of(part)))
        if num_bytes <= MAX_VALIDATION_BYTES:
            yield part._replace(is_held_out=True)
        num_bytes += len(part.text.encode())
    for part in train:
        if part.is_first:
            is_held_out = (document_hash(part.text), length_of(part)) in hashes
        if not is_held_out:
            yield part


def normalized(text: str) -> str:
    """Return a text with uniform line endings, without newlines at its start and end."""
    return text.replace("\r\n", "\n").replace("\r", "\n").strip("\n")


def length_of(part: DocumentPart) -> int | None:
    """Return the length of a document, which tells it from an excerpt; None if it is in parts."""
    return len(normalized(part.text)) if part.is_last else None


def document_hash(text: str) -> int:
    """Hash the beginning of a document."""
    return int(text_hash(normalized(text)[:HASHED_CHARS]), 16)


def is_held_out(text: str, holdout: int) -> bool:
    """Whether a document is held out: about one in `holdout`, by the hash of its text or path."""
    return document_hash(text) % holdout == 0


@dataclass(kw_only=True)
class Stdlib(Source):
    """The Python standard library's source files outside SKIPPED folders; they need no download.

    Each file is a document; about one in 20, chosen by the hash of its path, is held out.
    """

    def __post_init__(self):
        self.root = Path(sysconfig.get_paths()["stdlib"])
        # Skipped folders in the root are not searched: site-packages may be very large.
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

    def parts(self) -> Iterator[DocumentPart]:
        for file in self.files:
            # tokenize.open() decodes with the encoding that a source file declares.
            with tokenize.open(self.root / file) as source:
                yield DocumentPart(source.read(), is_held_out(file, 20))


@dataclass(kw_only=True)
class Packages(Source):
    """Source files of installed Python packages: a large amount of text that needs no download.

    Each file is a document. Tests, generated files and copies are excluded. Files are ordered by
    the hashes of their paths, and about one in 20 is held out. `packages` are names as pip lists
    them. Raises ValueError if a package is not installed.
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

    def parts(self) -> Iterator[DocumentPart]:
        lines = set()  # hashes of long lines in the files yielded so far
        for file in self.files:
            with tokenize.open(file.locate()) as source:
                text = source.read()
            if text.strip() and not is_generated(text) and not is_copy(text, lines):
                yield DocumentPart(text, is_held_out(file.as_posix(), 20))


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

    A text file is split into documents at lines equal to `separator`; .jsonl and .parquet files
    have one document per row, in `text_field`. The files that `validation` names are held out.
    Without it, about one document in `holdout` is held out, chosen by hash. If that is nothing or
    far too much text, the document whose length is closest to 1 / `holdout` of the text is held out
    instead. If there is only one document, its last 5% is held out, but at most about
    MAX_VALIDATION_BYTES. Raises ValueError for a file that cannot be read as text.
    """

    path: Paths
    validation: Paths = None
    text_field: str
    separator: str
    holdout: AtLeastTwo

    def __post_init__(self):
        self.files, self.held_out_files = split_files(self.path, self.validation, TEXT_SUFFIXES)

    def identity(self) -> str:
        files = [content_hash(self.files), content_hash(self.held_out_files)]
        return json.dumps([*files, self.text_field, self.separator, self.holdout])

    def parts(self) -> Iterator[DocumentPart]:
        if self.held_out_files:
            yield from given_split(self.read(self.held_out_files), self.read(self.files))
            return

        # Read everything once to decide which documents to hold out, then again to yield them.
        hashes = []
        lengths = Counter()  # characters by hash
        num_bytes = 0
        num_inside = 0  # occurrences of the separator inside documents
        for part in self.read(self.files):
            if part.is_first:
                hashes.append(document_hash(part.text))
            lengths[hashes[-1]] += len(part.text)
            num_bytes += len(part.text.encode())
            num_inside += part.text.count(self.separator)
        if not hashes:
            raise ValueError(f"the files contain no text ({self.path})")
        if self.separator and num_inside > len(hashes):
            print0(
                f"warning: {self.separator} occurs {num_inside} times inside documents, where it "
                "is ordinary text. In a text file, only a line that contains nothing else "
                "separates documents"
            )

        # A single document: hold out its end.
        num_chars = lengths.total()
        if len(hashes) == 1:
            most = num_chars * MAX_VALIDATION_BYTES // num_bytes
            yield from self.without_end(num_chars - max(1, min(num_chars // 20, most)))
            return

        # Hold out one document in `holdout`. If no document is chosen, or far too much text, hold
        # out the document whose length is closest to 1 / `holdout` of the text.
        held_out = {number for number in hashes if number % self.holdout == 0}
        most = num_chars * (1 + 1 / self.holdout) / 2
        if not 0 < sum(lengths[number] for number in held_out) <= most:
            wanted = num_chars / self.holdout
            held_out = {min(lengths, key=lambda number: abs(lengths[number] - wanted))}
        documents = iter(hashes)
        for part in self.read(self.files):
            if part.is_first:
                is_held_out = next(documents) in held_out
            yield part._replace(is_held_out=is_held_out)

    def without_end(self, num_chars: int) -> Iterator[DocumentPart]:
        """Split the only document in two: the text after `num_chars` characters is held out."""
        num_left = num_chars  # characters to train on
        for part in self.read(self.files):
            train, held_out = part.text[:num_left], part.text[num_left:]
            if train:
                ends_here = num_left <= len(part.text)
                yield part._replace(text=train, is_last=ends_here)
            if held_out:
                begins_here = num_left > 0
                yield part._replace(text=held_out, is_held_out=True, is_first=begins_here)
            num_left = max(0, num_left - len(part.text))

    def read(self, files: list[Path]) -> Iterator[DocumentPart]:
        return read_parts(files, self.text_field, self.separator)


@dataclass(kw_only=True)
class Hub(Source):
    """A public dataset on the Hugging Face Hub, read with `datasets`.

    With `tokens`, the dataset is streamed, not downloaded, until it has yielded that many training
    tokens. `validation` names the dataset's validation split; without it, about one document in
    `holdout` is held out, chosen by hash. If rows are lines, the regular expression `starts`
    matches the lines that begin a document. The cache key contains these settings, not the data, so
    later commits to a branch given as `revision` are not read.
    """

    repo: str
    config: str | None
    revision: str
    train: str
    validation: str | None
    text_field: str
    starts: str | None
    tokens: PositiveInt | None
    holdout: AtLeastTwo

    def parts(self) -> Iterator[DocumentPart]:
        if self.validation is not None:
            held_out = chain.from_iterable(map(cut, self.texts(self.validation)))
            train = chain.from_iterable(map(cut, self.texts(self.train)))
            yield from given_split(held_out, train)
            return
        for text in self.texts(self.train):
            held_out = is_held_out(text, self.holdout)
            for part in cut(text):
                yield part._replace(is_held_out=held_out)

    def texts(self, split: str) -> Iterator[str]:
        """Yield a split's documents: its rows, or with `starts`, all rows up to the next start.

        Raises ValueError, in one line, if they cannot be read.
        """
        from datasets import load_dataset

        lines = []  # rows of the current document
        # The hub's client libraries raise many types of errors, with multi-line messages.
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
                    raise ValueError(
                        f"a row has no text in data.text_field={self.text_field} (fields: "
                        f"{', '.join(row)})"
                    )
                if lines and (self.starts is None or re.match(self.starts, text)):
                    yield "".join(lines)
                    lines = []
                lines.append(text)
        except Exception as error:
            reason, _, _ = str(error).partition("\n")
            raise ValueError(
                f"cannot read the dataset ({self.repo}: {reason or type(error).__name__}). "
                "fix: check the network and the keys of data"
            ) from None
        yield "".join(lines)
