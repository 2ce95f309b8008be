"""Which files there are, and what is in them."""

import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from glob import glob
from hashlib import file_digest, sha256
from pathlib import Path

TEXTS = (".txt", ".jsonl", ".parquet")


def find_files(path: str | None, suffixes: tuple[str, ...]) -> list[Path]:
    if not path:
        raise ValueError("data.path is needed (got none). fix: data.path=FILE, a glob or a folder")
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.suffix in suffixes)
    else:
        files = [place] if place.is_file() else sorted(map(Path, glob(str(place), recursive=True)))
    if not files:
        raise ValueError(f"no files there ({path}). fix: a file, a glob, a folder of {suffixes}")
    return files


def split_files(path: str | None, suffixes: tuple[str, ...]) -> tuple[list[Path], list[Path]]:
    """Files to train on and files held out: `path` is one, a glob, or a folder of those with a suffix.

    Of several, those with the word val, valid or validation in their path there are held out, or else those with test,
    but none with train; beside validation, a test split is left alone. Raises ValueError where none is to train on.
    """
    files, train, held, test = find_files(path, suffixes), [], [], []
    place = Path(path).expanduser()
    for file in files:
        name = file.relative_to(place) if place.is_dir() else Path(file.name)
        words = set(re.split("[^a-z]+", str(name.with_suffix("")).lower()))
        if (
            len(files) == 1
            or "train" in words
            or not words & {"val", "valid", "validation", "test"}
        ):
            train.append(file)
        else:
            (test if "test" in words else held).append(file)
    if not train:
        raise ValueError(
            f"nothing to train on (data.path={path}). fix: a file, a glob, a folder of {suffixes}"
        )
    return train, held or test


def read_documents(files: Iterable[Path], field: str, separator: str) -> Iterator[str]:
    """The documents of .txt, between lines that are `separator`, and of .jsonl and .parquet, in `field`; none empty."""
    for file in files:
        read = {
            ".jsonl": partial(jsonl, field=field),
            ".parquet": partial(parquet, field=field),
        }.get(file.suffix)
        yield from (
            text
            for text in (read or partial(plain_text, separator=separator))(file)
            if text.strip()
        )


def plain_text(file: Path, separator: str) -> Iterator[str]:
    lines = []
    for line in utf8_lines(file):
        if line.strip() == separator:
            yield "".join(lines).removesuffix("\n")
            lines = []
        else:
            lines.append(line)
    yield "".join(lines)


def jsonl(file: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(utf8_lines(file), start=1):
        try:
            row = json.loads(line) if line.strip() else {field: ""}
        except json.JSONDecodeError as error:
            raise ValueError(
                f"not JSON ({file} line {number}: {error.msg}). fix: one JSON object a line"
            ) from None
        yield text_of_row(row, field, f"{file} line {number}")


def parquet(file: Path, field: str) -> Iterator[str]:
    for number, value in enumerate(parquet_column(file, field), start=1):
        yield text_of_row({field: value.as_py()}, field, f"{file} row {number}")


def utf8_lines(file: Path) -> Iterator[str]:
    """Lines as they are, which end in \\n and nothing else; a byte order mark is dropped.

    Raises ValueError, with the offset, for what is not UTF-8.
    """
    offset = 0
    with file.open("rb") as opened:
        for line in opened:
            try:
                yield line.decode().removeprefix("\ufeff" if offset == 0 else "")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"not UTF-8 ({file} at byte {offset + error.start}). fix: convert it"
                ) from None
            offset += len(line)


def parquet_column(file: Path, field: str) -> Iterator:
    """What each row of a .parquet has in this field, as an Arrow scalar."""
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        names = (table := ParquetFile(file)).schema_arrow.names
        if field not in names:
            raise ValueError(f"no field {field!r} ({file} has {names}). fix: one of them")
        for batch in table.iter_batches(columns=[field]):
            yield from batch.column(0)
    except ArrowInvalid as error:
        raise ValueError(f"not parquet ({file}: {error}). fix: another file") from None


def text_of_row(row: object, field: str, where: str) -> str:
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        keys = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(
            f"no text in the field {field!r} ({where} has {keys}). fix: data.text_field=..."
        )
    return text


def content_hash(files: list[Path]) -> str:
    whole = sha256()
    for file in files:
        with file.open("rb") as opened:
            whole.update(file_digest(opened, "sha256").digest())
    return whole.hexdigest()
