"""The user's files: which ones a path names, which of them are held out, and their documents."""

import os
import re
from collections.abc import Iterable, Iterator
from glob import glob
from hashlib import sha256
from pathlib import Path

from run.errors import naming
from run.sealed import sha256_of

ROW_SUFFIXES = (".jsonl", ".parquet", ".csv")  # each row is a document
TEXT_SUFFIXES = (".txt", *ROW_SUFFIXES)
SPLIT_WORDS = re.compile("(?<![a-z])(train|test|val|valid|validation)(?![a-z])")
OTHER_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zip", ".pdf", ".docx", ".json", ".tsv")
BLOCK_BYTES = 2**26  # bytes of a .jsonl that are read at a time; no row may have more


def find_files(path: str | None, suffixes: tuple[str, ...]) -> list[Path]:
    """List the files that `path` names: one file, a glob, or a folder, searched for `suffixes`.

    Raises ValueError if there are none.
    """
    files = []
    if path is not None:
        root = Path(os.path.expanduser(path))
        # The suffix matters only in a folder: a file or glob that the user names is taken as it is.
        if root.is_dir():
            files = [file for file in root.rglob("*") if file.suffix in suffixes]
        elif root.is_file():
            files = [root]
        else:
            files = [Path(name) for name in glob(str(root), recursive=True)]
    # A pipe or a device may have no end.
    files = sorted(file for file in files if file.is_file())
    if not files:
        raise ValueError(
            f"no files ({path=}). fix: a file, a glob, or a folder of {' '.join(suffixes)}; "
            "train.py takes it as data.path=my/texts"
        )
    return files


def split_files(path: str | None, suffixes: tuple[str, ...]) -> tuple[list[Path], list[Path]]:
    """Split the files that `path` names into those to train on and those held out for validation.

    Files with val, valid or validation as a word of their name (folders included) are held out. If
    there are none, files with test in their name are; otherwise, test files are not used at all. A
    single file, and a file with train in its name, is always trained on. Raises ValueError if there
    is nothing to train on.
    """
    files = find_files(path, suffixes)
    root = Path(os.path.expanduser(path))
    train = []
    validation = []
    test = []
    for file in files:
        # Folders count only below `path`: those that lead to it say nothing about the file.
        name = file.name
        if root.is_dir():
            name = str(file.relative_to(root))
        words = SPLIT_WORDS.findall(name.lower())
        if len(files) == 1 or "train" in words or not words:
            train.append(file)
        elif "test" in words:
            test.append(file)
        else:
            validation.append(file)
    # Training on files that are named validation would make the validation loss worthless.
    if not train:
        raise ValueError(f"nothing to train on (data.path={path}). fix: names without val or test")
    return train, validation or test


def read_documents(files: Iterable[Path], field: str, separator: str) -> Iterator[str]:
    """Yield the documents of files, without blank ones.

    Each row of a .jsonl, .parquet or .csv is a document, with its text in `field`. Any other file
    is text, cut at lines equal to `separator`. Raises ValueError, which names the file, for a file
    that is not text.
    """
    for file in files:
        if file.suffix in OTHER_SUFFIXES:
            raise ValueError(
                f"not a text ({file}). fix: unpack it, or save it as {' or '.join(TEXT_SUFFIXES)}"
            )
        if file.suffix in ROW_SUFFIXES:
            documents = read_rows(file, field)
        else:
            documents = read_text(file, separator)
        # A blank document would teach nothing but its end.
        for document in documents:
            if document.strip():
                yield document


def read_text(file: Path, separator: str) -> Iterator[str]:
    """Yield the documents between separator lines, without the line end before a separator.

    The text is unchanged, except that a byte order mark is removed. Only \\n ends a line.
    """
    lines = []
    try:
        with naming(file), file.open(encoding="utf-8-sig", newline="\n") as opened:
            for line in opened:
                if line.strip() == separator:
                    yield "".join(lines).removesuffix("\n")
                    lines = []
                else:
                    lines.append(line)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 ({file}: {error.reason}). fix: iconv -f ENCODING -t utf8"
        ) from None
    # The text after the last separator is a document too.
    yield "".join(lines)


def read_rows(file: Path, field: str) -> Iterator[str]:
    """Yield the text in `field` of each row of a .jsonl, .parquet or .csv.

    Raises ValueError, which names the file, for a row without that text.
    """
    import pyarrow

    num_rows = 0
    try:
        for batch in open_rows(file, field):
            for text in batch.column(field):
                if not text.is_valid:
                    raise ValueError(f"no text in the field {field!r}")
                yield text.as_py()
                num_rows += 1
    except (ValueError, OSError, pyarrow.ArrowException) as error:
        # The end of the first line of pyarrow's messages says what happened.
        first_line, _, _ = str(error).partition("\n")
        _, _, reason = first_line.rpartition("Invalid: ")
        raise ValueError(
            f"{reason} ({file}, after {num_rows} rows). fix: repair it; for a text in another "
            "field: data.text_field=NAME in training, elsewhere rename it"
        ) from None


def open_rows(file: Path, field: str) -> Iterable:
    """Open a .jsonl, .parquet or .csv as pyarrow's RecordBatches, with the column `field` alone.

    The type of the column is given, so that none is guessed: text like a date stays text.
    """
    import pyarrow
    from pyarrow import csv, dataset, json

    schema = pyarrow.schema({field: pyarrow.string()})
    if file.suffix == ".jsonl":
        # Not as a dataset: pyarrow 26 does not read a single row without a line end then.
        parse = json.ParseOptions(schema, unexpected_field_behavior="ignore")
        return json.open_json(file, json.ReadOptions(block_size=BLOCK_BYTES), parse)
    file_format = "parquet"
    if file.suffix == ".csv":
        file_format = dataset.CsvFileFormat(csv.ParseOptions(newlines_in_values=True))
    return dataset.dataset(file, schema, file_format).to_batches()


def content_hash(files: list[Path]) -> str:
    """SHA-256 over the SHA-256 and the suffix of each file; names and times do not matter."""
    total = sha256()
    for file in files:
        total.update((sha256_of(file) + file.suffix).encode())
    return total.hexdigest()
