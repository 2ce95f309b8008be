"""Files: the same documents are found and read, however they are named and stored."""

import bz2
import gzip
import json
import lzma
import os
import re
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet, table

from data.files import PART_CHARS, find_files, read_documents, read_parts
from data.prepare import prepare
from tests.faults.harness import documents_of, source

SEPARATOR = "<|endoftext|>"
DOCUMENTS = [f"story {n}\n\n she said: \u2028 oui {n % 3} \0 🐈" for n in range(99)] + [" x\n y"]
PLAIN = f"\n{SEPARATOR}\n".join(DOCUMENTS).encode()
LINES = "\n".join(json.dumps({"n": 1, "text": text}) for text in DOCUMENTS).encode()


def zstd(content: bytes) -> bytes:
    stream = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(stream, "zstd") as opened:
        opened.write(content)
    return stream.getvalue().to_pybytes()


def rows(texts: list[str]) -> bytes:
    stream = pyarrow.BufferOutputStream()
    parquet.write_table(table({"n": [1] * len(texts), "text": texts}), stream)
    return stream.getvalue().to_pybytes()


FILES = {
    "a.txt": PLAIN,
    "windows.txt": b"\xef\xbb\xbf" + PLAIN.replace(b"\n", b"\r\n"),
    "a.txt.gz": gzip.compress(PLAIN[:500]) + gzip.compress(PLAIN[500:]),
    "a.txt.BZ2": bz2.compress(PLAIN),
    "a.txt.xz": lzma.compress(PLAIN),
    "a.txt.zst": zstd(PLAIN),
    "a.jsonl": LINES,
    "windows.JSONL": b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n\r\n"),
    "a.parquet": rows(DOCUMENTS),
}


def texts(path: Path | str | list, field: str = "text") -> list[str]:
    return [*read_documents(find_files(path), field, SEPARATOR)]


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_documents_and_the_same_split(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    assert texts(str(tmp_path)) == DOCUMENTS
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.txt").write_bytes(PLAIN)
    expected = documents_of(source(tmp_path / "plain"))
    assert documents_of(source(tmp_path / name)) == expected
    assert 0 < sum(is_held_out for _, is_held_out in expected) < 20


def test_the_text_of_a_row_is_unchanged(tmp_path):
    given = ["2020-01-01", "NA", " a\r\nb \u2028 'c', \"d\"\n", "12"]
    parquet.write_table(table({"body": given}), tmp_path / "a.parquet")
    lines = [json.dumps({"body": text}) for text in given]
    (tmp_path / "b.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    assert texts(str(tmp_path), "body") == given + given


def test_a_text_file_is_split_only_at_separator_lines(tmp_path):
    text = f"one\n  {SEPARATOR} \n two {SEPARATOR} 2\n\n\n{SEPARATOR}\n\n{SEPARATOR}\nthree\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert texts(str(tmp_path)) == ["one", f" two {SEPARATOR} 2\n\n", "three\n"]
    # A separator at the place where a long line is cut is inside the line.
    text = "x" * (PART_CHARS // 2) + f"{SEPARATOR}\ntwo\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert texts(str(tmp_path)) == [text]


SPELLINGS = (
    "corpus",
    "~/corpus",
    "corpus/**/*.[tT]*",
    ["corpus/b/val/v.txt", "corpus/t.txt", "corpus/b"],
)


@pytest.mark.parametrize("path", SPELLINGS)
def test_all_spellings_of_a_path_find_the_same_files(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("corpus/t.txt", "corpus/b/T2.TXT", "corpus/b/val/v.txt", "b/other.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name, encoding="utf-8")
    assert [file.name for file in find_files(path)] == ["T2.TXT", "v.txt", "t.txt"]


def test_a_folder_is_searched_through_links_and_each_file_is_read_once(tmp_path):
    for name in ("corpus/a.txt", "corpus/.old/a.txt", "corpus/.b.txt", "far/b.txt", "corpus/c.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    corpus = tmp_path / "corpus"
    (corpus / "more").symlink_to(tmp_path / "far")
    (corpus / "also.txt").symlink_to(corpus / "a.txt")
    assert find_files(str(corpus)) == [corpus / "a.txt", corpus / "more" / "b.txt"]
    # Two links to a folder that contains them would be followed forever.
    (corpus / "loop").symlink_to(corpus)
    (corpus / "loop2").symlink_to(corpus)
    assert find_files(str(corpus)) == [corpus / "a.txt", corpus / "more" / "b.txt"]
    # Reading from a pipe may never end.
    os.mkfifo(corpus / "pipe.txt")
    with pytest.raises(ValueError, match=r"pipe\.txt"):
        find_files(str(corpus))


@pytest.mark.parametrize("path", [None, "absent", "empty", ["a.txt", "*.x"]])
def test_a_path_without_files_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("empty/a.md").touch()
    Path("a.txt").write_text("text", encoding="utf-8")
    with pytest.raises(ValueError, match=r"data\.path"):
        find_files(path)


BAD = {
    "blank.txt": b" \n\n",
    "latin.txt": b"good line\nbad \xff line",
    "utf16.txt": "one line\nand two".encode("utf-16-le"),
    "cut.jsonl": b'{"text": "a"}\n{"text": "b',
    "absent.jsonl": b'{"text": "a"}\n{"body": "b"}',
    "half.jsonl": b'{"text": "a"}\n{"text": "\\ud800"}',  # half of a surrogate pair
    "bad.parquet": b"PAR1 not really",
    "null.parquet": rows([None]),
    "cut.txt.gz": gzip.compress(PLAIN)[:-9],
    "a.csv": b"text\nplain\n",
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_files_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(BAD[name])
    with pytest.raises(ValueError, match=re.escape(name)):
        documents_of(source(tmp_path / name))


@pytest.mark.parametrize("line", ["one line of a long document\n", "0123456789"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_long_document_is_read_in_parts_that_end_at_line_ends(tmp_path, monkeypatch, name, line):
    monkeypatch.setattr("data.files.PART_CHARS", 100)
    documents = ["before", line * 300, "after"]
    content = f"\n{SEPARATOR}\n".join(documents)
    if name == "a.jsonl":
        content = "\n".join(json.dumps({"text": text}) for text in documents)
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert texts(str(tmp_path)) == documents
    _, *parts, _ = read_parts(find_files(str(tmp_path)), "text", SEPARATOR)
    assert all(len(part.text) <= 100 for part in parts)
    assert all(len(part.text) >= 50 for part in parts[:-1])
    assert [part.is_first for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "\n" not in line or all(part.text.endswith("\n") for part in parts)


def test_memory_does_not_grow_with_document_length(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr("data.files.PART_CHARS", 10_000)
    monkeypatch.setattr("data.prepare.CHARS_PER_BATCH", 10_000)
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.files["tokenizer.model"])

    def peak_of(num_chars: int) -> int:
        text = "Ann had 12 red balls and two were of Bob, not hers. " * (num_chars // 52)
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        tracemalloc.start()
        found = source(tmp_path / "a.txt", tokenizer=str(tmp_path / "tokenizer.model"))
        prepare(found, tmp_path / "cache")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    # Keeping the whole text in memory would add its size to the peak.
    assert peak_of(300_000) - peak_of(50_000) < 50_000
