"""Sources and shards: no byte of text is lost, and no stale or incomplete corpus is used."""

import hashlib
import json
import os
import sysconfig
from pathlib import Path
from time import sleep

import numpy as np
import pytest

from data import prepare as preparation
from data.prepare import build_corpus, prepare
from data.sources import Packages, Stdlib
from data.tokenizer import IdTokenizer, Tokenizer
from tests.faults.harness import documents_of, finish, source, start

SEPARATOR = "\n<|endoftext|>\n"


def hash_of(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def is_held_out(text: str) -> bool:
    return hash_of(text) % 20 == 0


def test_the_stdlib_split_matches_its_documentation():
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = "test tests idlelib lib2to3 encodings pydoc_data site-packages dist-packages"
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    files = [file.as_posix() for file in files if not {*skipped.split()} & set(file.parts)]
    source = Stdlib(vocab_size=400, tokenizer=None)
    assert source.files == sorted(files)
    held_out = [held for _, held in documents_of(source)]
    assert held_out == [is_held_out(file) for file in sorted(files)]


LINES = {name: f"{name}_long_enough = {name} * 100\n" for name in "abcdefgh"}
FILES = {
    "one.py": LINES["a"] + LINES["b"] + LINES["c"],
    "two.py": LINES["d"] + LINES["e"],
    # Two of its three long lines occur in one.py; short lines do not count.
    "copy.py": LINES["a"] + LINES["b"] + LINES["h"] + "x = 1\n" * 9,
    "half.py": LINES["d"] + LINES["f"],
    "tests/check.py": LINES["f"],
    "made.py": "# This file is auto-generated.\n" + LINES["g"],
    "late.py": "\n" * 10 + "# do not edit the line below\n" + LINES["h"],
    "empty.py": "\n",
    "notes.md": "not code",
}


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """The folder of an installed package with these files."""
    record = ""
    for name, text in FILES.items():
        path = tmp_path / "zoo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        record += f"zoo/{name},sha256={hashlib.sha256(text.encode()).hexdigest()},{len(text)}\n"
    about = tmp_path / "zoo-2.0.dist-info"
    about.mkdir()
    metadata = "Metadata-Version: 2.1\nName: Zoo\nVersion: 2.0\n"
    (about / "METADATA").write_text(metadata, encoding="utf-8")
    (about / "RECORD").write_text(record, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_tests_generated_files_and_copies_in_packages_are_skipped(package):
    source = Packages(vocab_size=400, tokenizer=None, packages=["zoo"])
    paths = [f"zoo/{name}.py" for name in ("one", "copy", "two", "half", "late")]
    paths.sort(key=lambda path: hashlib.sha256(path.encode()).hexdigest())
    # Of two files with common lines, the one whose path has the larger hash is skipped.
    paths.remove(max("zoo/one.py", "zoo/copy.py", key=paths.index))
    expected = []
    for path in paths:
        expected.append(((package / path).read_text(encoding="utf-8"), is_held_out(path)))
    assert documents_of(source) == expected


def test_a_changed_package_changes_the_corpus_identity(package):
    def identity():
        return Packages(vocab_size=400, tokenizer=None, packages=["zoo"]).identity()

    before = identity()
    assert identity() == before
    record = package / "zoo-2.0.dist-info/RECORD"
    changed = record.read_text(encoding="utf-8").replace("one.py,sha256=", "one.py,sha256=0")
    record.write_text(changed, encoding="utf-8")
    assert identity() != before


def test_a_package_that_is_not_installed_is_refused_by_name():
    with pytest.raises(ValueError, match="unheard-of"):
        Packages(vocab_size=400, tokenizer=None, packages=["numpy", "unheard-of"])


def test_line_ends_and_outer_newlines_do_not_change_the_split(tmp_path):
    texts = [f"document {i}\nwith lines" for i in range(200)]
    forms = [text.replace("\n", "\r\n") for text in texts] + [f"\n\r\n{text}\n" for text in texts]
    lines = [json.dumps({"text": text}) for text in forms]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    documents = documents_of(source(tmp_path / "a.jsonl"))
    assert [text for text, _ in documents] == forms
    assert [held_out for _, held_out in documents] == 2 * [is_held_out(text) for text in texts]


def test_a_copy_of_a_long_document_is_on_the_same_side(tmp_path, monkeypatch):
    monkeypatch.setattr("data.files.PART_CHARS", 400_000)
    texts = [f"{n}\n" + "line\n" * 90_000 for n in range(9)]
    (tmp_path / "a.txt").write_text(SEPARATOR.join(texts), encoding="utf-8")
    lines = [json.dumps({"text": text.replace("\n", "\r\n")}) for text in texts]
    (tmp_path / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    sides = [held_out for _, held_out in documents_of(source(tmp_path, holdout=2))]
    assert sides[:9] == sides[9:] and 0 < sum(sides) < 18


def test_at_least_one_document_or_the_end_of_a_single_document_is_held_out(tmp_path):
    # The document whose share is closest to one in 20, whatever the hashes are.
    for number in range(30):
        texts = [f"{number}", f"{number}" * 50, f"{number}" * 950]
        (tmp_path / "few.txt").write_text(SEPARATOR.join(texts), encoding="utf-8")
        found = documents_of(source(tmp_path / "few.txt"))
        assert not found[2][1] and (found[1][1] or is_held_out(texts[0]))
    # If every hash qualifies, one document is still left for training.
    even = [text for text in "abcdef" if hash_of(text) % 2 == 0]
    (tmp_path / "even.txt").write_text(SEPARATOR.join(even[:2]), encoding="utf-8")
    found = documents_of(source(tmp_path / "even.txt", holdout=2))
    assert [held_out for _, held_out in found] == [True, False]
    (tmp_path / "lone.txt").write_text("0123456789" * 10, encoding="utf-8")
    assert documents_of(source(tmp_path / "lone.txt")) == [
        ("0123456789" * 9 + "01234", False),
        ("56789", True),
    ]


def test_the_files_of_the_validation_path_are_held_out_and_never_trained_on(tmp_path):
    for name in ("a", "b", "val"):
        (tmp_path / f"{name}.txt").write_text(f"{name} 1{SEPARATOR}{name} 2", encoding="utf-8")
    (tmp_path / "link.txt").symlink_to(tmp_path / "val.txt")
    found = source(tmp_path, validation=[str(tmp_path / "v*.txt"), str(tmp_path / "b.txt")])
    held_out = [("b 1", True), ("b 2", True), ("val 1", True), ("val 2", True)]
    assert documents_of(found) == [*held_out, ("a 1", False), ("a 2", False)]
    # The prepared text of other held-out files is not used.
    identities = set()
    for name in ("b.txt", "val.txt"):
        other = source(tmp_path / "a.txt", validation=str(tmp_path / name))
        identities.add(other.identity())
    assert len(identities) == 2
    with pytest.raises(ValueError, match=r"data\.validation"):
        source(tmp_path, validation=str(tmp_path))


def test_a_held_out_document_is_not_trained_on_from_another_file(tmp_path, monkeypatch):
    monkeypatch.setattr("data.files.PART_CHARS", 1000)
    monkeypatch.setattr("data.sources.HASHED_CHARS", 100)
    texts = ["b\n" * 999, "a\nb", "c"]
    (tmp_path / "train.txt").write_text(SEPARATOR.join(texts), encoding="utf-8")
    copies = (texts[0].replace("\n", "\r\n"), texts[1].replace("\n", "\r") + "\r")
    lines = [json.dumps({"text": text}) for text in copies]
    (tmp_path / "val.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = source(tmp_path / "train.txt", validation=str(tmp_path / "val.jsonl"))
    assert [text for text, held_out in documents_of(found) if not held_out] == ["c"]
    # If no document is left to train on, the reason is given.
    lines.append(json.dumps({"text": texts[2]}))
    (tmp_path / "val.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = source(tmp_path / "train.txt", validation=str(tmp_path / "val.jsonl"))
    with pytest.raises(ValueError, match="no document is left"):
        prepare(found, tmp_path / "cache")
    # An excerpt does not remove the whole document.
    (tmp_path / "val.jsonl").write_text(json.dumps({"text": "b\n" * 60}), encoding="utf-8")
    found = source(tmp_path / "train.txt", validation=str(tmp_path / "val.jsonl"))
    assert [text for text, held_out in documents_of(found) if not held_out] == texts


def test_the_size_limit_of_the_held_out_text_applies_to_a_long_document(tmp_path, monkeypatch):
    monkeypatch.setattr("data.files.PART_CHARS", 100)
    monkeypatch.setattr("data.prepare.MAX_VALIDATION_BYTES", 300)
    monkeypatch.setattr("data.sources.MAX_VALIDATION_BYTES", 300)
    text = "".join(f"line {number} of a text of one document\n" for number in range(500))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    corpus = prepare(source(tmp_path / "a.txt"), tmp_path / "cache")
    pieces = corpus.tokenizer
    for shard, expected in ((corpus.train[0], text[:-300]), (corpus.validation, text[-300:])):
        assert pieces.decode(shard.tolist()) == expected
        # A document that is encoded in parts still begins and ends only once.
        assert [shard[0], shard[-1]] == [pieces.bos, pieces.eos]
        assert np.isin(shard, (pieces.bos, pieces.eos)).sum() == 2


def test_a_tokenizer_is_trained_on_the_first_training_text_only(tmp_path, monkeypatch):
    monkeypatch.setattr("data.prepare.MAX_TOKENIZER_CHARS", 1000)
    texts = [f"{i} " * 20 for i in range(100)]
    (tmp_path / "a.txt").write_text(SEPARATOR.join(texts), encoding="utf-8")
    found = source(tmp_path / "a.txt", holdout=3)
    expected = [text for text, is_held_out in documents_of(found) if not is_held_out]
    given = [*preparation.tokenizer_texts(found)]
    assert given == expected[: len(given)] and 1000 <= sum(map(len, given)) < 1100


def test_the_size_of_the_held_out_text_is_limited_to_whole_documents(tmp_path, monkeypatch):
    monkeypatch.setattr("data.prepare.MAX_VALIDATION_BYTES", 300)
    texts = [f"{i} " * 20 for i in range(100)]
    (tmp_path / "a.txt").write_text(SEPARATOR.join(texts), encoding="utf-8")
    corpus = prepare(source(tmp_path / "a.txt", holdout=3), tmp_path / "cache")
    assert 200 < corpus.tokenizer.nbytes(corpus.validation) <= 300
    assert corpus.validation[-1] == corpus.tokenizer.eos


def test_changing_a_file_suffix_changes_the_corpus_identity(tmp_path):
    """The suffix selects the reader, so a corpus with the old suffix must not be reused."""
    content = '{"text": "first"}\n{"text": "second"}\n'
    found = set()
    for name in ("a.jsonl", "a.txt", "b.txt"):
        (tmp_path / name).write_text(content, encoding="utf-8")
        found.add(source(tmp_path / name).identity())
    assert len(found) == 2  # changing only the name changes nothing


def test_every_document_in_a_corpus_is_between_bos_and_eos(tmp_path, story):
    corpus = prepare(source(story), tmp_path / "cache")
    pieces = corpus.tokenizer
    hashes = []
    for shard, is_held_out in ((corpus.train[0], False), (corpus.validation, True)):
        documents = [text for text, held in documents_of(source(story)) if held == is_held_out]
        rows = [[pieces.bos, *pieces.encode(text), pieces.eos] for text in documents]
        assert shard.tolist() == [token for row in rows for token in row]
        assert shard.dtype == np.uint16
        assert pieces.nbytes(shard) == sum(len(text.encode()) for text in documents)
        hashes.append(hashlib.sha256(shard.tobytes()).hexdigest())
    # Resumed runs compare this hash.
    assert corpus.sha256 == hashlib.sha256("".join(hashes).encode()).hexdigest()


def test_a_corpus_is_rebuilt_only_if_its_inputs_change(tmp_path, story, monkeypatch):
    built = []

    def build(*arguments):
        built.append(arguments)
        build_corpus(*arguments)

    monkeypatch.setattr("data.prepare.build_corpus", build)
    prepare(source(story), tmp_path / "cache")
    prepare(source(story), tmp_path / "cache")
    assert len(built) == 1
    # The same size and modification time, but different bytes.
    before = story.stat()
    story.write_text(story.read_text(encoding="utf-8").replace("Ann", "Ina"), encoding="utf-8")
    os.utime(story, ns=(before.st_atime_ns, before.st_mtime_ns))
    prepare(source(story), tmp_path / "cache")
    assert len(built) == 2
    prepare(source(story, vocab_size=410), tmp_path / "cache")
    assert len(built) == 3
    monkeypatch.setattr("data.prepare.VERSION", 0)
    prepare(source(story), tmp_path / "cache")
    assert len(built) == 4


def test_two_processes_build_a_corpus_only_once(tmp_path, story, monkeypatch):
    build = preparation.build_corpus
    built = tmp_path / "built"

    def noted(*about) -> None:
        with built.open("a", encoding="utf-8") as file:
            file.write("built")
        sleep(0.3)  # so that the other process waits for the lock
        build(*about)

    monkeypatch.setattr(preparation, "build_corpus", noted)
    running = [start(lambda: prepare(source(story), tmp_path / "cache") and 0) for _ in "ab"]
    assert [finish(process) for process in running] == [0, 0]
    assert built.read_text(encoding="utf-8") == "built"


@pytest.mark.parametrize("vocab_size, dtype", [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_the_shard_dtype_fits_the_vocabulary(tmp_path, story, vocab_size, dtype, monkeypatch):
    tokens = [0, 1, vocab_size - 1]
    monkeypatch.setattr(IdTokenizer, "encode_documents", lambda self, texts: [tokens] * len(texts))
    (tmp_path / "ids.model").write_bytes(IdTokenizer(vocab_size, 2).files["tokenizer.model"])
    ids = source(story, tokenizer=str(tmp_path / "ids.model"))
    (shard,) = prepare(ids, tmp_path / "cache").train
    assert shard.dtype == dtype and shard[:3].tolist() == tokens


def test_a_failed_preparation_leaves_no_files(tmp_path, story, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode_documents", lambda self, texts: [[2**16]] * len(texts))
    with pytest.raises(OverflowError):  # tokens must not wrap around
        prepare(source(story), tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").glob("*")] in ([], [".lock"])
