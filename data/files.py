"""Find the user's files by path, and read their documents."""

import json
import lzma
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from glob import glob
from hashlib import sha256
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple, TextIO

from run.checkpoint import sha256_of

ROW_SUFFIXES = (".jsonl", ".parquet")  # each row is a document
TEXT_SUFFIXES = (".txt", *ROW_SUFFIXES)
# Formats that are refused, although some of them could be read as text.
OTHER_SUFFIXES = (
    *(".csv", ".tsv", ".json", ".ndjson", ".ipynb", ".pdf", ".docx"),
    *(".bin", ".arrow", ".feather", ".tar", ".zip"),
)
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".xz": "xz"}
ROWS_PER_BATCH = 1024  # rows of a .parquet file decoded at a time
# A document with more characters is encoded and written in parts.
PART_CHARS = 500_000

Paths = str | list[str] | None  # data.path: a file, a glob, a folder, or a list of them


class DocumentPart(NamedTuple):
    """A document, or one of several consecutive parts of a long document."""

    text: str
    is_held_out: bool = False
    is_first: bool = True  # whether the document begins with this part
    is_last: bool = True  # whether the document ends with this part


def find_files(path: Paths, suffixes: tuple[str, ...] = TEXT_SUFFIXES) -> list[Path]:
    """Return the files that `path` names, sorted by path, each file once.

    Folders are searched for `suffixes`; files named directly or by a glob may have any suffix.
    Raises ValueError if an entry of `path` names no file, or names a pipe, a device or a broken
    link, and OSError for an unreadable folder.
    """
    found = []
    entries = path if isinstance(path, list) else [path]
    for entry in entries or [None]:
        files = [] if not entry else expand(entry, suffixes)
        if not files:
            raise ValueError(
                f"no files to read ({entry or 'no path'}{common_suffixes(entry)}). fix: set "
                "data.path, data.validation or --text to a file, a folder of "
                f"{' '.join(suffixes)} files, or a glob"
            )
        found += files

    # Links are resolved, so a file counts only once even if several links lead to it.
    unique = {}
    for file in sorted(found, key=Path.absolute):
        # Reading from a pipe or a device may never end.
        if not file.is_file():
            raise ValueError(
                f"not a regular file but a pipe, device or broken link ({file}). fix: remove it, "
                "or use a different path"
            )
        unique.setdefault(file.resolve(), file)
    return list(unique.values())


def split_files(
    path: Paths, validation: Paths, suffixes: tuple[str, ...]
) -> tuple[list[Path], list[Path]]:
    """Return the training files and the held-out files. A file that both paths name is held out.

    Raises ValueError if no training file is left.
    """
    if validation is None:
        return find_files(path, suffixes), []
    held_out = find_files(validation, suffixes)
    names = {file.resolve() for file in held_out}
    train = [file for file in find_files(path, suffixes) if file.resolve() not in names]
    if not train:
        raise ValueError(
            f"no training files (data.path={path} data.validation={validation}). fix: leave some "
            "files of data.path out of data.validation"
        )
    return train, held_out


def expand(entry: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files that a path names; it may be a file, a folder or a glob."""
    entry = os.path.expanduser(entry)
    paths = [entry] if os.path.exists(entry) else glob(entry, recursive=True)
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            files += [file for file in walk(path) if suffix_of(file) in suffixes]
        else:
            files.append(path)
    return files


def walk(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, following links.

    Hidden files and folders are skipped.
    """
    # Following a link to a folder that contains this link would never end.
    above = above | {folder.resolve()}
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if not path.is_dir():
            yield path
        elif path.resolve() not in above:
            yield from walk(path, above)


def suffix_of(file: Path) -> str:
    """Return a file's suffix in lower case, without a compression's suffix: .txt for A.TXT.gz."""
    name = Path(file.name.lower())
    if name.suffix in COMPRESSIONS:
        name = Path(name.stem)
    return name.suffix


def common_suffixes(entry: str | None) -> str:
    """Describe a folder's files by their three most frequent suffixes, such as " has 12 .md".

    Returns an empty string if `entry` is not a folder.
    """
    folder = Path(os.path.expanduser(entry or ""))
    if not entry or not folder.is_dir():
        return ""
    counts = Counter(file.suffix or "without a suffix" for file in walk(folder)).most_common(3)
    return " has " + (", ".join(f"{count} {name}" for name, count in counts) or "no files")


def read_documents(files: Iterable[Path], field: str, separator: str) -> Iterator[str]:
    """Yield the full text of each document in the files; see read_parts()."""
    texts = []
    for part in read_parts(files, field, separator):
        texts.append(part.text)
        if part.is_last:
            yield "".join(texts)
            texts = []


def read_parts(files: Iterable[Path], field: str, separator: str) -> Iterator[DocumentPart]:
    """Yield the non-blank documents in files. Long documents are yielded in parts.

    Each row of a .jsonl or .parquet file is a document, with its text in `field`. Any other file is
    text, split at lines equal to `separator`, apart from outer whitespace. Raises ValueError, with
    the file's name, for OTHER_SUFFIXES and for files that cannot be read as text.
    """
    import pyarrow

    for file in files:
        suffix = suffix_of(file)
        if suffix in OTHER_SUFFIXES:
            raise ValueError(
                f"unsupported file format ({file}). fix: convert it to "
                f"{' or '.join(TEXT_SUFFIXES)}; for token ids, use data=tokens"
            )
        num_documents = 0
        try:
            parts = read_rows(file, field) if suffix in ROW_SUFFIXES else read_text(file, separator)
            for part in parts:
                # A blank document would add nothing except special tokens.
                if part.text.strip() or not part.is_first or not part.is_last:
                    yield part
                num_documents += part.is_last
        except (ValueError, OSError, EOFError, RecursionError, pyarrow.ArrowException) as error:
            reason, _, _ = str(error).partition("\n")
            raise ValueError(
                f"reading {file} failed after {num_documents} documents ({reason}). fix: use a "
                "readable and complete file, with UTF-8 text or with rows that have text in "
                "data.text_field (with --text: in the field text)"
            ) from None


def open_text(file: Path) -> TextIO:
    """Open a UTF-8 file, which may be compressed. Line ends become newlines; a BOM is removed."""
    import pyarrow

    compression = COMPRESSIONS.get(file.suffix.lower())
    if compression == "xz":
        return lzma.open(file, "rt", encoding="utf-8-sig")
    stream = pyarrow.input_stream(str(file), compression=compression)
    return TextIOWrapper(stream, encoding="utf-8-sig")


def read_text(file: Path, separator: str) -> Iterator[DocumentPart]:
    """Yield the documents between separator lines, without the newline before a separator.

    Parts end at line ends, unless a line is longer than half a part. They have at most PART_CHARS
    characters, and at least half as many except the last.
    """
    lines = []
    num_chars = 0
    is_first = True
    is_line_start = True
    with open_text(file) as opened:
        # A line may be as long as the file, so at most half a part of it is read at once.
        for number, line in enumerate(iter(partial(opened.readline, PART_CHARS // 2), "")):
            # In UTF-16, most characters or the line ends contain a zero byte.
            if number < 2 and "\0" in line:
                raise ValueError("not UTF-8 text, but UTF-16 or a binary format")
            is_separator = is_line_start and line.strip() == separator.strip()
            is_line_start = line.endswith("\n")
            if is_separator:
                yield DocumentPart("".join(lines).removesuffix("\n"), is_first=is_first)
                lines = []
                num_chars = 0
                is_first = True
                continue
            if num_chars + len(line) > PART_CHARS:
                yield DocumentPart("".join(lines), is_first=is_first, is_last=False)
                lines = []
                num_chars = 0
                is_first = False
            lines.append(line)
            num_chars += len(line)
    # The text after the last separator is also a document.
    yield DocumentPart("".join(lines), is_first=is_first)


def read_rows(file: Path, field: str) -> Iterator[DocumentPart]:
    """Yield the text in `field` of each row of a .jsonl or .parquet file, in parts if long."""
    rows = read_parquet(file, field) if suffix_of(file) == ".parquet" else read_jsonl(file)
    for row in rows:
        text = row.get(field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"a row has no text in the field {field!r}")
        text.encode()  # a ValueError if the row contains half of a surrogate pair
        yield from cut(text)


def read_jsonl(file: Path) -> Iterator[object]:
    with open_text(file) as opened:
        for line in opened:
            if line.strip():
                yield json.loads(line)


def read_parquet(file: Path, field: str) -> Iterator[dict]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as opened:
        for batch in opened.iter_batches(ROWS_PER_BATCH, columns=[field]):
            yield from batch.to_pylist()


def cut(text: str) -> Iterator[DocumentPart]:
    """Cut a document into parts, with the same limits as in read_text()."""
    start = 0
    while len(text) - start > PART_CHARS:
        most = start + PART_CHARS
        end = text.rfind("\n", start + PART_CHARS // 2, most) + 1 or most
        yield DocumentPart(text[start:end], is_first=start == 0, is_last=False)
        start = end
    yield DocumentPart(text[start:], is_first=start == 0)


def content_hash(files: list[Path]) -> str:
    """Return a SHA-256 of the contents and suffixes of files, in order, without names and times."""
    total = sha256()
    for file in files:
        total.update((sha256_of(file) + suffix_of(file)).encode())
    return total.hexdigest()
