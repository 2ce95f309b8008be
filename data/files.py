"""Files of the user: which ones a path names, which of them are held out, and their documents."""

import json
import re
from collections.abc import Iterable, Iterator
from glob import glob
from hashlib import file_digest, sha256
from pathlib import Path
from statistics import mode

# Not read by `datasets`: it takes 0.4 to 0.9 s for 50 MB (here 0.2), after 0.6 s for its import,
# turns \r\n into \n and date-like strings into datetimes, and names no line in its errors.
TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
HELD_OUT_WORDS = {"val", "valid", "validation", "test"}


def find_files(path: str | None, suffixes: tuple[str, ...]) -> list[Path]:
    """List the files that `path` names: one file, a glob, or a folder, searched for `suffixes`.

    Raises ValueError if there are none.
    """
    if not path:
        raise ValueError("data.path is needed (got none). fix: data.path=FILE, a glob or a folder")
    root = Path(path).expanduser()
    # The suffix matters only in a folder: a file or glob that the user names is taken as it is.
    if root.is_dir():
        files = [file for file in root.rglob("*") if file.suffix in suffixes]
    elif root.is_file():
        files = [root]
    else:
        files = [Path(name) for name in glob(str(root), recursive=True)]
    if not files:
        fix = describe_paths(suffixes)
        # Files with another suffix, such as source code, can be named by a glob: suggest one.
        others = [file.suffix for file in root.rglob("*.*") if file.is_file()]
        if others and suffixes == TEXT_SUFFIXES:
            # The most frequent one, or of several the shortest.
            fix = f"data.path='{path}/**/*{mode(sorted(others, key=len))}'"
        raise ValueError(f"no {' or '.join(suffixes)} files ({path}). fix: {fix}")
    return sorted(files)


def split_files(path: str | None, suffixes: tuple[str, ...]) -> tuple[list[Path], list[Path]]:
    """List the files to train on and the files held out for validation, of those `path` names.

    Held out are files with val, valid or validation as a word of their name, folders included;
    without any, those with test. A test file beside validation files is not used at all. A lone
    file, and one with train in its name, is always trained on. Raises ValueError if none is left.
    """
    files = find_files(path, suffixes)
    root = Path(path).expanduser()
    train = []
    validation = []
    test = []
    for file in files:
        # Names of folders count below `path` only, not those that lead to it.
        name = file.relative_to(root if root.is_dir() else file.parent)
        words = set(re.split("[^a-z]+", str(name.with_suffix("")).lower()))
        if len(files) == 1 or "train" in words or not words & HELD_OUT_WORDS:
            train.append(file)
        elif "test" in words:
            test.append(file)
        else:
            validation.append(file)
    # Training on what is called validation would make its loss worthless.
    if not train:
        raise ValueError(f"nothing to train on (data.path={path}). fix: {describe_paths(suffixes)}")
    return train, validation or test


def describe_paths(suffixes: tuple[str, ...]) -> str:
    return f"a PATH of a file, a glob, or a folder of {' '.join(suffixes)}"


def read_documents(files: Iterable[Path], field: str, separator: str) -> Iterator[str]:
    """Yield the documents of files, without blank ones.

    Rows of .jsonl and .parquet are documents, with their text in `field`; any other file is text,
    cut at lines that are `separator`. Raises ValueError, with file and line, for what is not text.
    """
    for file in files:
        if file.suffix == ".jsonl":
            documents = read_jsonl(file, field)
        elif file.suffix == ".parquet":
            documents = read_parquet(file, field)
        else:
            documents = read_text(file, separator)
        # A blank document would teach nothing but its end.
        for text in documents:
            if text.strip():
                yield text


def read_text(file: Path, separator: str) -> Iterator[str]:
    """Yield what is between separator lines, without the line end before a separator."""
    lines = []
    for line in utf8_lines(file):
        if line.strip() == separator:
            yield "".join(lines).removesuffix("\n")
            lines = []
        else:
            lines.append(line)
    # What follows the last separator is a document too.
    yield "".join(lines)


def read_jsonl(file: Path, field: str) -> Iterator[str]:
    """Yield the field of each line; blank lines are skipped."""
    for number, line in enumerate(utf8_lines(file), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"not JSON ({file} line {number}: {error.msg}). fix: one JSON object a line"
            ) from None
        yield text_of_row(row, field, f"{file} line {number}")


def read_parquet(file: Path, field: str) -> Iterator[str]:
    """Yield the field of each row, reading no other column."""
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        table = ParquetFile(file)
        # Name the columns there are: the text may be in another one.
        columns = table.schema_arrow.names
        if field not in columns:
            raise ValueError(
                f"no field {field!r} ({file} has {columns}). fix: data.text_field={columns[0]}"
            )
        for batch in table.iter_batches(columns=[field]):
            for value in batch.column(0):
                number += 1
                yield text_of_row({field: value.as_py()}, field, f"{file} row {number}")
    except ArrowInvalid as error:
        raise ValueError(f"not parquet ({file}: {error}). fix: data.path=PATH of another") from None


def utf8_lines(file: Path) -> Iterator[str]:
    """Yield lines with their ends, unchanged but for a byte order mark; only \\n ends a line.

    Raises ValueError, with the offset in bytes, for what is not UTF-8.
    """
    offset = 0
    # Text mode would end lines at \r too, and would not know the offset of an error in the file.
    with file.open("rb") as opened:
        for raw in opened:
            line = decode_utf8(raw, str(file), offset)
            if offset == 0:
                line = line.removeprefix("\ufeff")
            offset += len(raw)
            yield line


def decode_utf8(raw: bytes, source: str, offset: int = 0) -> str:
    """Decode what comes `offset` bytes after the beginning of `source`.

    Raises ValueError, with the offset of what is not UTF-8.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 ({source} at byte {offset + error.start}). fix: iconv -t utf8"
        ) from None


def text_of_row(row: object, field: str, location: str) -> str:
    """Return the string in a field of a row. Raises ValueError if there is none."""
    content = type(row).__name__
    if isinstance(row, dict):
        content = sorted(row)
        if isinstance(row.get(field), str):
            return row[field]
    raise ValueError(
        f"no text in the field {field!r} ({location} has {content}). fix: data.text_field=NAME"
    )


def text_hash(text: str) -> str:
    """SHA-256 in hexadecimal: the same in every process, as Python's own hash is not."""
    return sha256(text.encode()).hexdigest()


def content_hash(files: list[Path]) -> str:
    """SHA-256 over the SHA-256 of each file, whatever its name or time."""
    total = sha256()
    for file in files:
        with file.open("rb") as opened:
            total.update(file_digest(opened, "sha256").digest())
    return total.hexdigest()
