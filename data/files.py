"""Find the user's files by path, separate the held-out files, and read their documents."""

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from glob import glob
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from run.checkpoint import sha256_of

ROW_SUFFIXES = (".jsonl", ".parquet", ".csv")  # each row is a document
TEXT_SUFFIXES = (".txt", *ROW_SUFFIXES)
SPLIT_WORDS = re.compile("(?<![a-z])(train|test|val|valid|validation)(?![a-z])")
# Files that are not text, although some of them could be read as text.
OTHER_SUFFIXES = (
    *(".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".pdf", ".docx", ".bin"),
    *(".json", ".ndjson", ".ipynb", ".tsv", ".arrow", ".feather"),
)
MOST_SUFFIXES = 3  # maximum number of suffixes that an error suggests
BLOCK_BYTES = 2**26  # bytes of a .jsonl or .csv file read at a time; no row may be longer
ROWS_AHEAD = 1024  # rows of a .parquet file decoded at a time
# A longer document is read, encoded and written in parts. UTF-8 takes up to 4 bytes per character.
PART_CHARS = 500_000

Paths = str | list[str] | None  # data.path: a file, a glob, a folder, or a list of them


class Part(NamedTuple):
    """A document, or one of several consecutive parts of a long document."""

    text: str
    is_held_out: bool = False
    is_last: bool = True  # whether the document ends with this part


class Split(NamedTuple):
    """The files that a path names, grouped by use."""

    train: list[Path]
    validation: list[Path]
    unused: list[Path]  # test files, if there are validation files


def find_files(path: Paths, suffixes: tuple[str, ...]) -> list[Path]:
    """List the files that `path` names, sorted by path, each file once.

    Raises ValueError if an entry of `path` names no file, and OSError for an unreadable folder.
    """
    # Links are resolved, so a file counts only once even if several links lead to it.
    files = {}
    for file in named_files(path, suffixes):
        files.setdefault(file.resolve(), file)
    return list(files.values())


def named_files(path: Paths, suffixes: tuple[str, ...]) -> list[Path]:
    """List the files that `path` names, each path once. Raises the same errors as find_files()."""
    files = []
    missing = []
    for entry in entries_of(path):
        found = expand(entry, suffixes)
        if not found:
            missing.append(no_files(entry, suffixes))
        files += found
    if missing:
        raise ValueError("\n".join(missing))
    for file in files:
        # Reading from a pipe or a device may never end.
        if not file.is_file():
            raise ValueError(
                f"not a regular file but a pipe, device or broken link ({file}). fix: remove it, "
                "or use a different path"
            )
    return sorted(set(files), key=lambda file: Path(os.path.abspath(file)))


def entries_of(path: Paths) -> list[str]:
    """Return a path's entries, with ~ replaced by the home folder. Raises ValueError if empty."""
    entries = path if isinstance(path, list) else [path]
    if not entries or not all(entries):
        raise ValueError(
            f"no matching files ({path=}). fix: pass a file, a glob or a folder; for train.py: "
            "data.path=my/texts"
        )
    return [os.path.expanduser(entry) for entry in entries]


def expand(entry: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files that an entry names. An entry is a file, a folder, or a glob of both.

    Folders are searched for `suffixes`; files named directly or by a glob may have any suffix.
    """
    paths = [Path(entry)]
    if not paths[0].exists():
        paths = [Path(name) for name in glob(entry, recursive=True)]
    files = []
    for path in paths:
        if path.is_dir():
            files += [file for file in walk(path) if file.suffix.lower() in suffixes]
        else:
            files.append(path)
    return files


def walk(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, following links.

    Hidden files and folders, whose names begin with a dot, are skipped.
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


def skipped_suffixes(path: Paths, suffixes: tuple[str, ...]) -> Counter:
    """Count, by suffix, the files in the folders of `path` that are skipped."""
    skipped = Counter()
    for entry in entries_of(path):
        if Path(entry).is_dir():
            skipped.update(file.suffix.lower() or "without a suffix" for file in walk(Path(entry)))
    for suffix in suffixes:
        del skipped[suffix]
    return skipped


def no_files(entry: str, suffixes: tuple[str, ...]) -> str:
    """Return the error message for an entry that names no file."""
    skipped = skipped_suffixes(entry, suffixes)
    problem = f"no matching files (path={entry!r}"
    fix = f"pass a file, a glob or a folder of {' '.join(suffixes)}, such as data.path=my/texts"
    if skipped:
        problem += f" has {listing(skipped)}"
        texts = [suffix for suffix, _ in skipped.most_common() if suffix.startswith(".")]
        texts = [suffix for suffix in texts if suffix not in OTHER_SUFFIXES]
        if texts and suffixes == TEXT_SUFFIXES:
            globs = [f"{entry.rstrip('/')}/**/*{suffix}" for suffix in texts[:MOST_SUFFIXES]]
            value = globs[0] if len(globs) == 1 else json.dumps(globs, separators=(",", ":"))
            fix = f"use a glob, which accepts any suffix: {shlex.quote(f'data.path={value}')}"
    return f"{problem}). fix: {fix}"


def listing(counts: Counter) -> str:
    """Format counts in descending order, such as "12 .md, 1 .pdf"."""
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def split_files(path: Paths, suffixes: tuple[str, ...]) -> Split:
    """Split the files that `path` names into those to train on and those held out for validation.

    Files whose name (including subfolders) contains the word val, valid or validation are held out.
    If there are none, files with test in their name are held out; otherwise test files are unused.
    A single file, and any file with train in its name, is always used for training. Raises
    ValueError if there is nothing to train on.
    """
    files = named_files(path, suffixes)
    is_single = len({file.resolve() for file in files}) == 1
    root = common_folder(path)
    train = {}
    validation = {}
    test = {}
    for file in files:
        # Only folders below `root` count: its parent folders do not affect the split.
        name = os.path.relpath(file, root)
        words = SPLIT_WORDS.findall(name.lower())
        if is_single or "train" in words or not words:
            kind = train
        elif "test" in words:
            kind = test
        else:
            kind = validation
        kind.setdefault(file.resolve(), file)

    # A file that has several names through links is held out if any of its names matches.
    unused = {}
    if validation:
        unused = test
    else:
        validation = test
    for kind in (train, unused):
        for file in validation.keys() & kind.keys():
            del kind[file]
    # Training on files named validation would make the validation loss worthless.
    if not train:
        raise ValueError(
            f"no training files (data.path={path}). fix: add files without val or test in their "
            "names"
        )
    return Split(list(train.values()), list(validation.values()), list(unused.values()))


def describe_files(path: Paths, suffixes: tuple[str, ...], split: Split) -> str | None:
    """Return a line with the numbers of files read and skipped; None for a single file."""
    skipped = skipped_suffixes(path, suffixes)
    if split.unused:
        skipped["with test in the name"] = len(split.unused)
    if not skipped and len(split.train) == 1 and not split.validation:
        return None
    text = f"files: {len(split.train)} for training, {len(split.validation)} held out"
    if skipped:
        text += f"; not read: {listing(skipped)}"
    return text


def common_folder(path: Paths) -> str:
    """Return the folder that contains all entries of a path, such as corpus for corpus/*/*.txt."""
    folders = []
    for entry in entries_of(path):
        # The folder itself, or the one that contains the file or the first wildcard.
        folder = Path(entry)
        while not folder.is_dir():
            folder = folder.parent
        folders.append(os.path.abspath(folder))
    return os.path.commonpath(folders)


def read_documents(files: Iterable[Path], field: str, separator: str) -> Iterator[str]:
    """Yield the full text of each document in the files; see read_parts()."""
    texts = []
    for part in read_parts(files, field, separator):
        texts.append(part.text)
        if part.is_last:
            yield "".join(texts)
            texts = []


def read_parts(files: Iterable[Path], field: str, separator: str) -> Iterator[Part]:
    """Yield the non-blank documents in files. Long documents in text files are yielded in parts.

    Each row of a .jsonl, .parquet or .csv file is a document, with its text in `field`. Any other
    file is text, split at lines equal to `separator`. Raises ValueError, with the file's name, if a
    file is not text.
    """
    for file in files:
        suffix = file.suffix.lower()
        if suffix in OTHER_SUFFIXES:
            raise ValueError(
                f"not a text file ({file}). fix: unpack it, or save it as "
                f"{' or '.join(TEXT_SUFFIXES)}; for token ids, use data=tokens"
            )
        parts = read_text(file, separator)
        if suffix in ROW_SUFFIXES:
            parts = map(Part, read_rows(file, field))
        # A blank document would add nothing except special tokens.
        is_first = True
        for part in parts:
            if not is_first or not part.is_last or part.text.strip():
                yield part
            is_first = part.is_last


def read_text(file: Path, separator: str) -> Iterator[Part]:
    """Yield the documents between separator lines, without the newline before a separator.

    The text is unchanged, except that a byte order mark is removed. Only \\n ends a line. A
    long document's parts have between PART_CHARS and 2 * PART_CHARS characters.
    """
    lines = []
    num_chars = 0
    is_line_start = True
    try:
        with file.open(encoding="utf-8-sig", newline="\n") as opened:
            # A line may be as long as the file.
            for line in iter(partial(opened.readline, PART_CHARS), ""):
                if is_line_start and line.strip() == separator:
                    yield Part("".join(lines).removesuffix("\n"))
                    lines = []
                    num_chars = 0
                else:
                    # The document continues, so the newline before this line belongs to it.
                    if num_chars >= PART_CHARS:
                        yield Part("".join(lines), is_last=False)
                        lines = []
                        num_chars = 0
                    lines.append(line)
                    num_chars += len(line)
                is_line_start = line.endswith("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 ({file}: {error.reason}). fix: iconv -f ENCODING -t utf8"
        ) from None
    # The text after the last separator is also a document.
    yield Part("".join(lines))


def read_rows(file: Path, field: str) -> Iterator[str]:
    """Yield the text in `field` of each row of a .jsonl, .parquet or .csv file.

    Raises ValueError, with the file's name, if a row has no such text.
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
        # pyarrow's messages state the cause at the end of their first line.
        first_line, _, _ = str(error).partition("\n")
        _, _, reason = first_line.rpartition("Invalid: ")
        fix = "repair the file"
        if "block" in reason:
            fix = f"limit rows to {BLOCK_BYTES // 2**20} MB, or use .parquet"
        raise ValueError(
            f"{reason} ({file}, after {num_rows} rows). fix: {fix}; if the text is in a different "
            "field, set data.text_field=NAME (train.py), or rename the field (other commands)"
        ) from None


def open_rows(file: Path, field: str) -> Iterable:
    """Open a .jsonl, .parquet or .csv file as pyarrow RecordBatches with only the column `field`.

    pyarrow is given the column's type, so it does not infer one, and text that looks like a date
    stays text.
    """
    import pyarrow
    from pyarrow import csv, dataset, json

    schema = pyarrow.schema({field: pyarrow.string()})
    if file.suffix.lower() == ".parquet":
        # Read few rows ahead: the default reads 2 million rows, however long they are.
        rows = dataset.dataset(file, schema, "parquet")
        return rows.to_batches(batch_size=ROWS_AHEAD, batch_readahead=1, fragment_readahead=1)
    # pyarrow rejects a file without rows. Here, such a file is valid and has no documents.
    if is_blank(file):
        return []
    if file.suffix.lower() == ".jsonl":
        # Do not open it as a dataset: pyarrow 26 fails to read a single row without a newline.
        parse = json.ParseOptions(schema, unexpected_field_behavior="ignore")
        return json.open_json(file, json.ReadOptions(block_size=BLOCK_BYTES), parse)
    return csv.open_csv(
        file,
        csv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False),  # errors get row numbers
        csv.ParseOptions(newlines_in_values=True),
        csv.ConvertOptions(
            column_types=schema, include_columns=[field], include_missing_columns=True
        ),
    )


def is_blank(file: Path) -> bool:
    """Whether a file contains only whitespace."""
    with file.open("rb") as opened:
        return not any(line.strip() for line in opened)


def content_hash(files: list[Path]) -> str:
    """Return one SHA-256 over all files' hashes and suffixes; names and times do not matter."""
    total = sha256()
    for file in files:
        total.update((sha256_of(file) + file.suffix.lower()).encode())
    return total.hexdigest()
