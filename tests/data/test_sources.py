"""Sources and shards: no byte of text is lost, nothing stale or half built is used."""

import hashlib
import json
import os
import sysconfig
from pathlib import Path
from time import sleep

import numpy as np
import pytest
from pyarrow import csv, parquet, table

from data import prepare as preparation
from data.files import TEXT_SUFFIXES, find_files, split_files
from data.prepare import build_corpus, prepare
from data.sources import Stdlib
from data.tokenizer import IdTokenizer, Tokenizer
from tests.faults.harness import finish, source, start


def texts(path, **knobs) -> list[str]:
    found = source(path, **knobs)
    return [*found.texts(found.train_files)]


def is_held_out(text: str) -> bool:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 20 == 0


def is_empty(cache: Path) -> bool:
    return [path.name for path in cache.glob("*")] in ([], [".lock"])


def test_the_library_split_is_the_documented_one():
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = "test tests idlelib lib2to3 encodings pydoc_data site-packages dist-packages"
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    files = [file.as_posix() for file in files if not {*skipped.split()} & set(file.parts)]
    source = Stdlib(vocab_size=400, tokenizer=None)
    assert source.files == sorted(files)
    held_out = [held for _, held in source.documents()]
    assert held_out == [is_held_out(file) for file in sorted(files)]


def test_a_txt_is_cut_at_separator_lines_only(tmp_path):
    (tmp_path / "a.txt").write_bytes(
        "\ufeffone\r\n<|endoftext|>\n two <|endoftext|> 2\n\n\n<|endoftext|>\r\n\n<|endoftext|>\nthree".encode()
    )
    assert texts(tmp_path / "a.txt") == ["one\r", " two <|endoftext|> 2\n\n", "three"]


# Nothing is taken for a date, a number or a missing value.
ROWS = ["2020-01-01", "NA", " a\r\nb \u2028 'c', \"d\"\n", "12", "🐈", "x" * 200_000]


@pytest.mark.parametrize("suffix", TEXT_SUFFIXES[1:])
def test_rows_are_documents_as_they_are(tmp_path, suffix):
    file = tmp_path / f"rows{suffix}"
    rows = table({"n": range(len(ROWS)), "body": ROWS})
    if suffix == ".jsonl":
        file.write_text("\n\n".join(json.dumps(row) for row in rows.to_pylist()))
    elif suffix == ".csv":
        csv.write_csv(rows, file)
    else:
        parquet.write_table(rows, file)
    assert texts(file, text_field="body") == ROWS


def test_a_row_may_be_a_whole_book(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 3_000_000}))
    assert [len(text) for text in texts(tmp_path / "a.jsonl")] == [3_000_000]


def test_folders_and_globs_read_all_kinds(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.jsonl").write_text('{"text": "first"}\n\n{"text": "second", "more": 1}\n')
    (tmp_path / "note.md").write_text("not this")
    parquet.write_table(table({"text": ["table"], "n": [1]}), tmp_path / "sub" / "c.parquet")
    assert texts(tmp_path) == ["plain", "first", "second", "table"]
    assert texts(f"{tmp_path}/*.jsonl") == ["first", "second"]
    assert find_files(f"{tmp_path}/**/*.md", ()) == [tmp_path / "note.md"]


NAMES = {
    "train.bin val.bin": "val.bin",
    "fineweb_train_000001.bin fineweb_val_000000.bin": "fineweb_val_000000.bin",
    "a.bin b-VALID.bin": "b-VALID.bin",
    "train-00000-of-00001.bin validation-00000-of-00001.bin test-00000-of-00001.bin": "validation-00000-of-00001.bin",
    "train.bin test.bin": "test.bin",
    "train-test-1.bin train-val-1.bin": "",
    "evaluate.bin interval.bin latest.bin": "",
    "val.bin": "",
}


@pytest.mark.parametrize("names", NAMES)
def test_a_name_says_what_is_held_out_and_no_test_is_trained_on(tmp_path, names):
    for name in names.split():
        (tmp_path / name).touch()
    train, held = ({path.name for path in paths} for paths in split_files(str(tmp_path), (".bin",)))
    left_out = {name for name in names.split() if name.startswith("test-")}
    assert held == {NAMES[names]} - {""} and train == {*names.split()} - held - left_out


def test_files_of_a_split_are_its_documents(tmp_path):
    for split in ("train", "validation", "test"):
        rows = table({"text": [f"{split} {n}" for n in range(9)]})
        parquet.write_table(rows, tmp_path / f"{split}-00000-of-00001.parquet")
    documents = [*source(tmp_path).documents()]
    assert sorted(text for text, held in documents if held) == [f"validation {n}" for n in range(9)]
    assert sorted(text for text, held in documents if not held) == [f"train {n}" for n in range(9)]
    before = source(tmp_path).identity()
    test = tmp_path / "test-00000-of-00001.parquet"
    test.replace(tmp_path / "validation-00000-of-00001.parquet")
    assert source(tmp_path).identity() != before


def test_a_file_with_another_suffix_is_another_text(tmp_path):
    """It is read in another way, so what was prepared of it must not be found again."""
    content = '{"text": "first"}\n{"text": "second"}\n'
    found = set()
    for name in ("a.jsonl", "a.txt", "b.txt"):
        (tmp_path / name).write_text(content)
        found.add(source(tmp_path / name).identity())
    assert len(found) == 2  # the name alone changes nothing


def test_documents_are_held_out_by_their_own_hash(tmp_path):
    documents = [f"document {i}" for i in range(200)]
    for order in (documents, documents[::-1]):
        (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(order))
        held_out = {text for text, held in source(tmp_path / "a.txt").documents() if held}
        assert held_out == set(filter(is_held_out, documents))


def test_few_documents_hold_out_one_and_a_lone_one_its_end(tmp_path):
    (tmp_path / "few.txt").write_text("a\n<|endoftext|>\nb\n<|endoftext|>\nc")
    assert sum(held_out for _, held_out in source(tmp_path / "few.txt").documents()) == 1
    (tmp_path / "lone.txt").write_text("0123456789" * 10)
    assert [*source(tmp_path / "lone.txt").documents()] == [
        ("0123456789" * 9 + "01234", False),
        ("56789", True),
    ]


BAD = {
    "empty.txt": (b"", "no documents"),
    "blank.txt": (b" \n\n", "no documents"),
    "latin.txt": (b"good line\nbad \xff line", "latin.txt: invalid start byte"),
    "cut.jsonl": (b'{"text": "a"}\n{"text": "b', "in row 1"),
    "other.jsonl": (b'{"text": "a"}\n{"body": "b"}', "no text in the field 'text'"),
    "null.jsonl": (b'{"text": null}', "no text in the field 'text'"),
    "number.jsonl": (b'{"text": 5}', "changed from string to number in row 0"),
    "list.jsonl": (b"[1]", "from object to array"),
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xff"}', "after 1 rows"),
    "latin.csv": (b"text,n\na,1\n\xff,2", "Row #3"),
    "short.csv": (b"text,n\na,1\nb\n", "Row #3: Expected 2 columns"),
    "other.csv": (b"body\nb\n", "no text in the field 'text'"),
    "bad.parquet": (b"PAR1 not really", "not a parquet file"),
    "tiny.txt": (b"a", "no tokenizer from this text"),
    "a.txt.gz": (b"\x1f\x8b\x08\0", "not a text"),
    "a.pdf": (b"%PDF-1.4\nplain text\n", "not a text"),
    "list.json": (b'[{"text": "a"}]', "not a text"),
    "half.jsonl": (b'{"text": "a"}\n{"text": "\\ud800"}', "half.jsonl, after 0 rows"),
    "deep.jsonl": (b'{"text": ' + 100_000 * b"[", "deep.jsonl, after 0 rows"),
    "pipe.txt": (None, "no files"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_text_is_refused_and_leaves_nothing(tmp_path, name):
    content, said = BAD[name]
    if content is None:
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="fix: ") as error:
        prepare(source(tmp_path / name), tmp_path / "cache")
    assert said in str(error.value)
    assert name in str(error.value) or name == "tiny.txt"
    assert is_empty(tmp_path / "cache")


def test_a_corpus_is_every_document_between_bos_and_eos(tmp_path, story):
    corpus = prepare(source(story), tmp_path / "cache")
    pieces = corpus.tokenizer
    hashes = []
    for shard, is_held_out in ((corpus.train[0], False), (corpus.validation, True)):
        documents = [text for text, held in source(story).documents() if held == is_held_out]
        rows = [[pieces.bos, *pieces.encode(text), pieces.eos] for text in documents]
        assert shard.tolist() == [token for row in rows for token in row]
        assert shard.dtype == np.uint16
        assert pieces.nbytes(shard) == sum(len(text.encode()) for text in documents)
        hashes.append(hashlib.sha256(shard.tobytes()).hexdigest())
    # Runs resume by this hash.
    assert corpus.sha256 == hashlib.sha256("".join(hashes).encode()).hexdigest()


def test_a_corpus_is_built_once_and_again_when_its_text_changes(tmp_path, story, monkeypatch):
    built = []

    def build(*arguments):
        built.append(arguments)
        build_corpus(*arguments)

    monkeypatch.setattr("data.prepare.build_corpus", build)
    prepare(source(story), tmp_path / "cache")
    prepare(source(story), tmp_path / "cache")
    assert len(built) == 1
    # The same size, the same time, other bytes.
    before = story.stat()
    story.write_text(story.read_text().replace("Ann", "Ina"))
    os.utime(story, ns=(before.st_atime_ns, before.st_mtime_ns))
    prepare(source(story), tmp_path / "cache")
    assert len(built) == 2
    prepare(source(story, vocab_size=410), tmp_path / "cache")
    assert len(built) == 3
    monkeypatch.setattr("data.prepare.VERSION", 0)
    prepare(source(story), tmp_path / "cache")
    assert len(built) == 4


def test_an_interrupted_preparation_is_redone(tmp_path, story, monkeypatch):
    folders = []

    def interrupted(source, tokenizer, folder):
        folders.append(folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("data.prepare.write_shards", interrupted)
        prepare(source(story), tmp_path / "cache")
    assert is_empty(tmp_path / "cache")
    (half,) = folders
    half.mkdir(parents=True)  # as a kill leaves it
    (half / "train-00000.bin").write_bytes(b"half")
    assert prepare(source(story), tmp_path / "cache").validation.size
    assert not half.exists()


def test_two_processes_build_one_corpus(tmp_path, story, monkeypatch):
    build = preparation.build_corpus
    built = tmp_path / "built"

    def noted(*about) -> None:
        with built.open("a") as file:
            file.write("built")
        sleep(0.3)  # until the other process waits for the lock
        build(*about)

    monkeypatch.setattr(preparation, "build_corpus", noted)
    running = [start(lambda: prepare(source(story), tmp_path / "cache") and 0) for _ in "ab"]
    assert [finish(process) for process in running] == [0, 0]
    assert built.read_text() == "built"


@pytest.mark.parametrize("vocab_size, dtype", [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_a_shard_is_as_wide_as_its_vocabulary(tmp_path, story, vocab_size, dtype, monkeypatch):
    tokens = [0, 1, vocab_size - 1]
    monkeypatch.setattr(IdTokenizer, "encode_documents", lambda self, texts: [tokens] * len(texts))
    (tmp_path / "ids.model").write_bytes(IdTokenizer(vocab_size, 2).files["tokenizer.model"])
    ids = source(story, tokenizer=str(tmp_path / "ids.model"))
    (shard,) = prepare(ids, tmp_path / "cache").train
    assert shard.dtype == dtype and shard[:3].tolist() == tokens


@pytest.mark.parametrize("token, error", [(2**16, OverflowError), (None, TypeError)])
def test_a_preparation_that_fails_leaves_nothing(tmp_path, story, monkeypatch, token, error):
    monkeypatch.setattr(Tokenizer, "encode_documents", lambda self, texts: [[token]] * len(texts))
    with pytest.raises(error):  # no token wraps around
        prepare(source(story), tmp_path / "cache")
    assert is_empty(tmp_path / "cache")


def test_only_two_megabytes_are_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr("data.prepare.MAX_VALIDATION_BYTES", 300)
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} " * 20}) + "\n" for i in range(100))
    )
    corpus = prepare(source(tmp_path / "a.jsonl", holdout=3), tmp_path / "cache")
    assert 200 < corpus.tokenizer.nbytes(corpus.validation) <= 300
