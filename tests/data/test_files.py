"""Files: the same documents are found and read, however they are named and stored."""

import bz2
import gzip
import json
import lzma
import os
import re
import tracemalloc
from collections.abc import Iterator
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


def rows(text_type: pyarrow.DataType) -> bytes:
    stream = pyarrow.BufferOutputStream()
    texts = pyarrow.array(DOCUMENTS).cast(text_type)
    parquet.write_table(table({"n": [1] * len(DOCUMENTS), "text": texts}), stream)
    return stream.getvalue().to_pybytes()


FILES = {
    "a.txt": PLAIN,
    "A.TXT": PLAIN,
    "a.md": PLAIN,
    "windows.txt": b"\xef\xbb\xbf" + PLAIN.replace(b"\n", b"\r\n"),
    "ended.txt": PLAIN + f"\n{SEPARATOR}\n \n {SEPARATOR} \n\n".encode(),
    "a.txt.gz": gzip.compress(PLAIN[:500]) + gzip.compress(PLAIN[500:]),
    "a.txt.BZ2": bz2.compress(PLAIN),
    "a.txt.xz": lzma.compress(PLAIN),
    "a.txt.zst": zstd(PLAIN),
    "a.jsonl": LINES,
    "a.JSONL": b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n\r\n"),
    "a.jsonl.zst": zstd(LINES),
    "a.parquet": rows(pyarrow.string()),
    "large.Parquet": rows(pyarrow.large_string()),
    "words.parquet": rows(pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
}


def texts(path: Path | str | list, field: str = "text") -> list[str]:
    return [*read_documents(find_files(path), field, SEPARATOR)]


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_documents_and_the_same_split(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    assert texts(str(tmp_path / name)) == DOCUMENTS
    if name != "a.md":
        assert texts(str(tmp_path)) == DOCUMENTS
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.txt").write_bytes(PLAIN)
    expected = documents_of(source(tmp_path / "plain"))
    assert documents_of(source(tmp_path / name)) == expected
    assert 0 < sum(is_held_out for _, is_held_out in expected) < 20


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_the_text_of_a_row_is_unchanged(tmp_path, name):
    given = ["2020-01-01", "NA", " a\r\nb \u2028 'c', \"d\"\n", "12", "x" * 3_000_000]
    content = table({"n": range(len(given)), "body": given})
    if name == "a.jsonl":
        lines = [json.dumps(row) for row in content.to_pylist()]
        (tmp_path / name).write_text("\n\n".join(lines), encoding="utf-8")
    else:
        parquet.write_table(content, tmp_path / name)
    assert texts(str(tmp_path / name), "body") == given


def test_a_text_file_is_split_only_at_separator_lines(tmp_path):
    text = f"one\n{SEPARATOR}\n two {SEPARATOR} 2\n\n\n{SEPARATOR}\n\n{SEPARATOR}\nthree\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert texts(str(tmp_path)) == ["one", f" two {SEPARATOR} 2\n\n", "three\n"]
    # A separator at the place where a long line is cut is inside the line.
    text = "x" * (PART_CHARS // 2) + f"{SEPARATOR}\ntwo\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert texts(str(tmp_path)) == [text]


SPELLINGS = (
    "corpus",
    "corpus/",
    "./b/../corpus",
    "~/corpus",
    "link",
    "corpus/**/*.[tT]*",
    "corpus/*",
    ["corpus/b", "corpus/t.txt", "corpus"],
    ["corpus/b/val/v.txt", "corpus/t.txt", "corpus/b/T2.TXT"],
)


@pytest.mark.parametrize("path", SPELLINGS)
def test_all_spellings_of_a_path_find_the_same_files(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("corpus/t.txt", "corpus/b/T2.TXT", "corpus/b/val/v.txt", "b/other.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name, encoding="utf-8")
    Path("link").symlink_to("corpus")
    assert [file.name for file in find_files(path)] == ["T2.TXT", "v.txt", "t.txt"]


def test_a_folder_is_searched_through_links_and_each_file_is_read_once(tmp_path):
    for name in ("corpus/a.txt", "corpus/.old/a.txt", "corpus/.b.txt", "far/b.txt", "corpus/c.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    corpus = tmp_path / "corpus"
    (corpus / "more").symlink_to(tmp_path / "far")
    (corpus / "also.txt").symlink_to(corpus / "a.txt")
    assert find_files(str(corpus)) == [corpus / "a.txt", corpus / "more" / "b.txt"]
    assert find_files(f"{corpus}/**/*.md")[0] == corpus / "c.md"
    # Two links to a folder that contains them would be followed forever.
    (corpus / "loop").symlink_to(corpus)
    (corpus / "loop2").symlink_to(corpus)
    assert find_files(str(corpus)) == [corpus / "a.txt", corpus / "more" / "b.txt"]
    (corpus / "gone.txt").symlink_to(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"gone.txt"):
        find_files(str(corpus))


@pytest.mark.parametrize("path", [None, "", [], [""], "absent", "~no-such-user/x", "empty", "*.x"])
def test_a_path_without_files_is_refused_by_name(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("a.txt").write_text("text", encoding="utf-8")
    with pytest.raises(ValueError, match=r"\(path=.*fix: .*data\.path"):
        find_files(path)
    # An entry of a list that names no file is also an error.
    if path and isinstance(path, str):
        with pytest.raises(ValueError, match=re.escape(f"(path={path}")):
            find_files(["a.txt", path])


def test_a_folder_without_text_is_refused_with_its_most_frequent_suffixes(tmp_path):
    for name in ("a.md", "b.md", "sub/c.md", "d.pdf", "e.pdf", "f.py", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text", encoding="utf-8")
    with pytest.raises(ValueError, match=r"3 \.md, 2 \.pdf, 1 \.py\)"):
        find_files(str(tmp_path))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_empty_files_have_no_documents(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert texts(str(tmp_path)) == []


# The content of a file, and a part of the error. The error also names the file.
BAD = {
    "blank.txt": (b" \n\n", "no documents"),
    "latin.txt": (b"good line\nbad \xff line", "invalid start byte"),
    "utf16.txt": ("one line\nand two".encode("utf-16-le"), "UTF-16"),
    "russian.txt": ("да\nнет".encode("utf-16-le"), "UTF-16"),
    "cut.jsonl": (b'{"text": "a"}\n{"text": "b', "after 1 documents"),
    "other.jsonl": (b'{"text": "a"}\n{"body": "b"}', "'text'"),
    "null.jsonl": (b'{"text": null}', "'text'"),
    "number.jsonl": (b'{"text": 5}', "'text'"),
    "list.jsonl": (b"[1]", "'text'"),
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xff"}', "invalid start byte"),
    "half.jsonl": (b'{"text": "a"}\n{"text": "\\ud800"}', "surrogate"),
    "deep.jsonl": (b'{"text": ' + 100_000 * b"[", "recursion"),
    "bad.parquet": (b"PAR1 not really", "bad.parquet"),
    "cut.txt.gz": (gzip.compress(PLAIN)[:-9], "Truncated"),
    "cut.txt.xz": (lzma.compress(PLAIN)[:-9], "end-of-stream"),
    "a.csv": (b"text\nplain\n", "save it as"),
    "list.json": (b'[{"text": "a"}]', "save it as"),
    "list.json.gz": (gzip.compress(b'[{"text": "a"}]'), "save it as"),
    "a.pdf": (b"%PDF-1.4\nplain text\n", "save it as"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_files_are_refused_by_name(tmp_path, name):
    content, named = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="fix: ") as error:
        documents_of(source(tmp_path / name))
    assert name in str(error.value) and named in str(error.value)


@pytest.mark.parametrize("column", [[5], [b"text"], [None], [["text"]]])
def test_only_text_columns_are_read(tmp_path, column):
    parquet.write_table(table({"text": column}), tmp_path / "a.parquet")
    for field in ("text", "absent"):
        with pytest.raises(ValueError, match=rf"a\.parquet .*'{field}'"):
            texts(str(tmp_path), field)


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match="a pipe"):
        find_files(str(tmp_path / "pipe.txt"))


LONG = {
    "lines": "".join(f"line {number} of a document\n" for number in range(300)),
    "one line": "0123456789" * 500,
    "a line at the end": "title\n" + "word " * 999,
    "short": "x" * 100,
}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_long_document_is_read_in_parts_that_end_at_line_ends(tmp_path, monkeypatch, name, kind):
    monkeypatch.setattr("data.files.PART_CHARS", 100)
    documents = ["before", LONG[kind], "after"]
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
    if kind == "lines":
        assert all(part.text.endswith("\n") for part in parts[:-1])


def test_memory_does_not_grow_with_document_length(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr("data.files.PART_CHARS", 10_000)
    monkeypatch.setattr("data.prepare.CHARS_PER_BATCH", 10_000)
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.files["tokenizer.model"])

    def peak_of(num_chars: int) -> Iterator[int]:
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
