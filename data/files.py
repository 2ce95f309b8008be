"""Files of the user: which ones a path names, which of them are held out, and their documents."""

import re
from collections.abc import Iterable, Iterator
from glob import glob
from hashlib import sha256
from pathlib import Path

from run.sealed import sha256_of

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet", ".csv")
SPLIT_WORDS = re.compile("(?<![a-z])(train|test|val|valid|validation)(?![a-z])")
OTHER_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zip", ".pdf", ".docx", ".json", ".tsv")
BLOCK_BYTES = 2**26  # of a .jsonl that are read at a time; no row may have more


def find_files(path: str | None, suffixes: tuple[str, ...]) -> list[Path]:
    """List the files that `path` names: one file, a glob, or a folder, searched for `suffixes`.

    Raises ValueError if there are none.
    """
    files = []
    if path is not None:
        root = Path(path).expanduser()
        # The suffix matters only in a folder: a file or glob that the user names is taken as it is.
        if root.is_dir():
            files = [file for file in root.rglob("*") if file.suffix in suffixes]
        elif root.is_file():
            files = [root]
        else:
            files = [Path(name) for name in glob(str(root), recursive=True)]
    # A pipe or a device may have no end.
    files = sorted(filter(Path.is_file, files))
    if not files:
        raise ValueError(
            f"no files ({path=}). fix: a file, a glob, or a folder of {' '.join(suffixes)}; "
            "train.py takes it as data.path=my/texts"
        )
    return files


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
        name = str(file.relative_to(root)) if root.is_dir() else file.name
        words = SPLIT_WORDS.findall(name.lower())
        if len(files) == 1 or "train" in words or not words:
            train.append(file)
        elif "test" in words:
            test.append(file)
        else:
            validation.append(file)
    # Training on what is called validation would make its loss worthless.
    if not train:
        raise ValueError(f"nothing to train on (data.path={path}). fix: names without val or test")
    return train, validation or test


def read_documents(files: Iterable[Path], field: str, separator: str) -> Iterator[str]:
    """Yield the documents of files, without blank ones.

    Rows of .jsonl, .parquet and .csv are documents, with their text in `field`; any other file is
    text, cut at lines that are `separator`. Raises ValueError, with the file, for what is not text.
    """
    for file in files:
        if file.suffix in OTHER_SUFFIXES:
            raise ValueError(
                f"not a text ({file}). fix: unpack it, or save it as {' or '.join(TEXT_SUFFIXES)}"
            )
        if file.suffix in TEXT_SUFFIXES[1:]:
            documents = read_rows(file, field)
        else:
            documents = read_text(file, separator)
        # A blank document would teach nothing but its end.
        yield from filter(str.strip, documents)


def read_text(file: Path, separator: str) -> Iterator[str]:
    """Yield what is between separator lines, without the line end before a separator.

    Text is unchanged but for a byte order mark; only \\n ends a line.
    """
    lines = []
    try:
        with file.open(encoding="utf-8-sig", newline="\n") as opened:
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
    # What follows the last separator is a document too.
    yield "".join(lines)


def read_rows(file: Path, field: str) -> Iterator[str]:
    """Yield the text in `field` of each row of a .jsonl, .parquet or .csv."""
    import pyarrow
    from pyarrow import csv, dataset, json

    # Given the type of the field, nothing is guessed: a text that looks like a date stays a text.
    schema = pyarrow.schema({field: pyarrow.string()})
    number = 0
    try:
        if file.suffix == ".jsonl":
            # Not as a dataset: pyarrow 26 reads no lone row without a line end then.
            options = json.ParseOptions(schema, unexpected_field_behavior="ignore")
            batches = json.open_json(file, json.ReadOptions(block_size=BLOCK_BYTES), options)
        else:
            options = csv.ParseOptions(newlines_in_values=True)
            formats = {".csv": dataset.CsvFileFormat(options), ".parquet": "parquet"}
            batches = dataset.dataset(file, schema, formats[file.suffix]).to_batches()
        for batch in batches:
            for text in batch.column(0):
                if not text.is_valid:
                    raise ValueError(f"no text in the field {field!r}")
                yield text.as_py()
                number += 1
    except (ValueError, OSError, pyarrow.ArrowException) as error:
        # Of the library's errors, the end of the first line says what happened.
        reason = str(error).partition("\n")[0].rpartition("Invalid: ")[2]
        raise ValueError(
            f"{reason} ({file}, after {number} rows). fix: repair it; for a text in another field: "
            "data.text_field=NAME in training, elsewhere rename it"
        ) from None


def content_hash(files: list[Path]) -> str:
    """SHA-256 over the SHA-256 and the suffix of each file, whatever its name or time."""
    total = sha256()
    for file in files:
        total.update((sha256_of(file) + file.suffix).encode())
    return total.hexdigest()
