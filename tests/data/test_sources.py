"""Sources and shards: no byte of text is lost, and no stale or incomplete corpus is used."""

import hashlib
import json
import os
import random
import shlex
import sysconfig
import tracemalloc
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from pyarrow import csv, parquet, table

from data import prepare as preparation
from data.files import TEXT_SUFFIXES, Part, find_files, read_documents, split_files
from data.prepare import build_corpus, prepare, tokenized
from data.sources import Packages, Stdlib
from data.tokenizer import IdTokenizer, JsonTokenizer, Tokenizer
from tests.conftest import STORIES
from tests.faults.harness import documents_of, finish, source, start


def texts(path, **knobs) -> list[str]:
    found = source(path, **knobs)
    return [*read_documents(found.files.train, found.text_field, found.separator)]


def is_held_out(text: str) -> bool:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 20 == 0


def is_empty(cache: Path) -> bool:
    return [path.name for path in cache.glob("*")] in ([], [".lock"])


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


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package with these files: {path: text}."""
    files = {
        "zoo/one.py": LINES["a"] + LINES["b"] + LINES["c"],
        "zoo/two.py": LINES["d"] + LINES["e"] + "x = 1\n" * 9,
        "zoo/tests/check.py": LINES["f"],
        "zoo/testing/check.py": LINES["f"],
        "zoo/made.py": "# This file is auto-generated.\n" + LINES["g"],
        "zoo/late.py": "\n" * 10 + "# do not edit the line below\n" + LINES["h"],
        "zoo/empty.py": "\n",
        "zoo/notes.md": "not code",
        "zoo/short.py": "x = 1\n" * 9,
        "zoo-2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: Zoo\nVersion: 2.0\n",
    }
    record = ""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        record += f"{name},sha256={hashlib.sha256(text.encode()).hexdigest()},{len(text)}\n"
    (tmp_path / "zoo-2.0.dist-info/RECORD").write_text(record, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_tests_and_generated_files_of_packages_are_skipped(package):
    source = Packages(vocab_size=400, tokenizer=None, packages=["zoo"])
    read = ["zoo/one.py", "zoo/two.py", "zoo/late.py", "zoo/short.py"]
    read.sort(key=lambda path: hashlib.sha256(path.encode()).hexdigest())
    documents = documents_of(source)
    assert [text for text, _ in documents] == [
        (package / path).read_text(encoding="utf-8") for path in read
    ]
    assert [held for _, held in documents] == [is_held_out(path) for path in read]


def test_copies_of_a_file_are_skipped(package):
    record = package / "zoo-2.0.dist-info/RECORD"
    # Two of the three long lines in copy.py occur in one.py. Only one of the two lines in half.py
    # occurs in a different file.
    texts = {
        "zoo/copy.py": LINES["a"] + LINES["b"] + LINES["h"] + "x = 1\n" * 9,
        "zoo/half.py": LINES["d"] + LINES["f"],
    }
    for name, text in texts.items():
        (package / name).write_text(text, encoding="utf-8")
        with record.open("a", encoding="utf-8") as file:
            file.write(f"{name},,\n")
    read = {
        text for text, _ in documents_of(Packages(vocab_size=400, tokenizer=None, packages=["zoo"]))
    }
    # The file whose path has the smaller hash is read first, so the other file is skipped.
    first, second = sorted(
        ["zoo/one.py", "zoo/copy.py"], key=lambda path: hashlib.sha256(path.encode()).hexdigest()
    )
    assert (package / first).read_text(encoding="utf-8") in read
    assert (package / second).read_text(encoding="utf-8") not in read
    assert texts["zoo/half.py"] in read


def test_a_changed_package_changes_the_corpus_identity(package):
    def identity():
        return Packages(vocab_size=400, tokenizer=None, packages=["zoo"]).identity()

    before = identity()
    assert identity() == before
    record = package / "zoo-2.0.dist-info/RECORD"
    changed = record.read_text(encoding="utf-8").replace("one.py,sha256=", "one.py,sha256=0")
    record.write_text(changed, encoding="utf-8")
    assert identity() != before


def test_the_error_names_a_package_that_is_not_installed():
    with pytest.raises(ValueError, match=r"not installed .unheard-of.\. fix: pip install"):
        Packages(vocab_size=400, tokenizer=None, packages=["numpy", "unheard-of"])


def test_a_txt_file_is_split_only_at_separator_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes(
        "\ufeffone\r\n<|endoftext|>\n two <|endoftext|> 2\n\n\n<|endoftext|>\r\n\n<|endoftext|>\nthree".encode()
    )
    assert texts(tmp_path / "a.txt") == ["one\r", " two <|endoftext|> 2\n\n", "three"]


# No row may be parsed as a date, a number or a missing value.
ROWS = ["2020-01-01", "NA", " a\r\nb \u2028 'c', \"d\"\n", "12", "🐈", "x" * 200_000]


@pytest.mark.parametrize("suffix", TEXT_SUFFIXES[1:])
def test_each_row_becomes_one_unchanged_document(tmp_path, suffix):
    file = tmp_path / f"rows{suffix}"
    rows = table({"n": range(len(ROWS)), "body": ROWS})
    if suffix == ".jsonl":
        file.write_text("\n\n".join(json.dumps(row) for row in rows.to_pylist()), encoding="utf-8")
    elif suffix == ".csv":
        csv.write_csv(rows, file)
    else:
        parquet.write_table(rows, file)
    assert texts(file, text_field="body") == ROWS


def test_a_jsonl_row_can_contain_a_whole_book(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 3_000_000}), encoding="utf-8")
    assert [len(text) for text in texts(tmp_path / "a.jsonl")] == [3_000_000]


def test_folders_and_globs_include_all_text_formats(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("plain", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(
        '{"text": "first"}\n\n{"text": "second", "more": 1}\n', encoding="utf-8"
    )
    (tmp_path / "note.md").write_text("not this", encoding="utf-8")
    parquet.write_table(table({"text": ["table"], "n": [1]}), tmp_path / "sub" / "c.parquet")
    assert texts(tmp_path) == ["plain", "first", "second", "table"]
    assert texts(f"{tmp_path}/*.jsonl") == ["first", "second"]
    assert find_files(f"{tmp_path}/**/*.md", ()) == [tmp_path / "note.md"]


SPELLINGS = (
    "corpus",
    "corpus/",
    "./b/../corpus",
    "~/corpus",
    "link",
    "corpus/**/*.[tT]*",
    "corpus/*",
    "[corpus/b,corpus/t.txt]",
    "[corpus/b/val/v.txt,corpus/t.txt,corpus/b/T2.TXT]",
)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_all_spellings_of_a_path_find_the_same_files(tmp_path, monkeypatch, spelling):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("t.txt", "b/T2.TXT", "b/val/v.txt"):
        file = tmp_path / "corpus" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name, encoding="utf-8")
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to("corpus")
    path = spelling.strip("[]").split(",") if "[" in spelling else spelling
    split = split_files(path, TEXT_SUFFIXES)
    assert {file.name for file in split.validation} == {"v.txt"}
    assert {file.name for file in split.train} == {"t.txt", "T2.TXT"}


def test_folder_search_follows_links_and_skips_hidden_files(tmp_path):
    for name in ("corpus/a.txt", "corpus/val/v.txt", "elsewhere/b.txt", "corpus/.old/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    corpus = tmp_path / "corpus"
    (corpus / ".c.txt").write_text("hidden", encoding="utf-8")
    (corpus / "more").symlink_to(tmp_path / "elsewhere")
    (corpus / "loop").symlink_to(corpus)
    # Links cannot add held-out files to the training set, and no file is read twice.
    (corpus / "again").symlink_to(corpus / "val")
    (corpus / "also.txt").symlink_to(corpus / "a.txt")
    split = split_files(str(corpus), TEXT_SUFFIXES)
    assert split.train == [corpus / "a.txt", corpus / "more" / "b.txt"]
    assert [file.resolve() for file in split.validation] == [corpus / "val" / "v.txt"]
    (corpus / "gone.txt").symlink_to(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"broken link \(.*gone.txt\). fix: "):
        find_files(str(corpus), TEXT_SUFFIXES)


@pytest.mark.parametrize("path", [None, "", [], [""], "absent", "~no-such-user/x", ["absent"]])
def test_a_path_without_files_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no matching files .*\. fix: "):
        find_files(path, TEXT_SUFFIXES)
    # A missing entry in a list is also an error.
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    if path == ["absent"]:
        with pytest.raises(ValueError, match="path='absent'"):
            find_files(["a.txt", *path], TEXT_SUFFIXES)


def test_a_separator_that_no_line_can_match_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one\n---\ntwo", encoding="utf-8")
    with pytest.raises(ValueError, match=r"whitespace around lines .* fix: data\.separator='---'"):
        source(tmp_path / "a.txt", separator="---\n")


def test_skipped_files_in_a_folder_are_reported(tmp_path, capsys):
    for name in ("a.md", "b.MD", "c.pdf"):
        (tmp_path / name).write_text("text", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"has 2 .md, 1 .pdf\). fix: .*: 'data\.path=.*/\*\*/\*.md'"
    ):
        find_files(str(tmp_path), TEXT_SUFFIXES)
    for name in ("a.txt", "test.txt", "val.txt"):
        (tmp_path / name).write_text("text", encoding="utf-8")
    said = source(tmp_path).note()
    assert (
        said
        == "files: 1 for training, 1 held out; not read: 2 .md, 1 .pdf, 1 with test in the name"
    )
    assert source(tmp_path / "a.txt").note() is None


def test_the_globs_suggested_by_an_error_match_all_files(tmp_path):
    (tmp_path / "deep").mkdir()
    for number in range(30):
        (tmp_path / f"{number}.md").write_text(f"page {number}", encoding="utf-8")
        (tmp_path / "deep" / f"{number}.py").write_text(f"code = {number}", encoding="utf-8")
    (tmp_path / "more.py").write_text("code = 30", encoding="utf-8")
    with pytest.raises(ValueError, match=r"31 \.py, 30 \.md") as refused:
        find_files(str(tmp_path), TEXT_SUFFIXES)
    fix = str(refused.value).partition("any suffix: ")[2]
    (value,) = shlex.split(fix)
    globs = json.loads(value.removeprefix("data.path="))
    assert globs == [f"{tmp_path}/**/*.py", f"{tmp_path}/**/*.md"]
    assert len(find_files(globs, TEXT_SUFFIXES)) == 61


def test_suffixes_are_case_insensitive(tmp_path):
    (tmp_path / "a.JSONL").write_text('{"text": "row"}\n', encoding="utf-8")
    (tmp_path / "b.CSV").write_text("text\ncell\n", encoding="utf-8")
    parquet.write_table(table({"text": ["table"]}), tmp_path / "c.Parquet")
    assert texts(tmp_path) == texts(f"{tmp_path}/*") == ["row", "cell", "table"]
    (tmp_path / "d.GZ").write_text("text", encoding="utf-8")
    with pytest.raises(ValueError, match="not a text"):
        texts(tmp_path / "d.GZ")


@pytest.mark.parametrize("suffix", (".txt", ".jsonl", ".csv"))
@pytest.mark.parametrize("content", (b"", b"\n \n"))
def test_empty_files_in_a_folder_are_skipped(tmp_path, suffix, content):
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    (tmp_path / f"empty{suffix}").write_bytes(content)
    assert texts(tmp_path) == ["text"]


def test_a_csv_row_can_contain_a_whole_book(tmp_path):
    csv.write_csv(table({"text": ["x" * 3_000_000, "y"]}), tmp_path / "a.csv")
    assert [len(text) for text in texts(tmp_path / "a.csv")] == [3_000_000, 1]


def byte_level() -> JsonTokenizer:
    """A byte-level tokenizer as in GPT-2 that prepends a space to the text, as some models do."""
    built = tokenizers.Tokenizer(tokenizers.models.BPE())
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"])
    built.train_from_iterator(SCRIPTS, trainer)
    special = b'{"bos_token_id": 0, "eos_token_id": 1}'
    files = {"tokenizer.json": built.to_str().encode(), "generation_config.json": special}
    return JsonTokenizer(files)


SCRIPTS = [
    "Ann had 12 red balls;  two\tof \u2581 them\n\nwere Bob's. ",
    "她有一个红球。\n他说：好！ Тест e\u0301 ",
]
TOKENIZERS = {
    "ours": lambda: Tokenizer.train([text * 30 for text in SCRIPTS], 400),
    "with a space in front": lambda: Tokenizer.load(STORIES / "tokenizer.model"),
    "tokenizer.json": byte_level,
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_encoding_a_document_in_parts_gives_the_same_tokens(tmp_path, monkeypatch, kind):
    if kind == "with a space in front" and not STORIES.exists():
        pytest.skip("needs the datasets next to the repository")
    tokenizer = TOKENIZERS[kind]()
    draw = random.Random(0)
    text = "".join(draw.choice(SCRIPTS)[: draw.randrange(60)] for _ in range(200))
    text = text.replace("\u2581", "") if kind == "with a space in front" else text
    documents = [text, "short", text[::-1] + "\n"]
    (tmp_path / "a.txt").write_text(
        "\n<|endoftext|>\n".join(documents), newline="\n", encoding="utf-8"
    )
    monkeypatch.setattr("data.files.PART_CHARS", 100)
    monkeypatch.setattr("data.prepare.PART_CHARS", 100)
    monkeypatch.setattr("data.prepare.CHARS_PER_BATCH", 300)

    found = source(tmp_path / "a.txt")
    assert texts(tmp_path / "a.txt") == documents
    encoded = []
    longest = 0
    for part, tokens in tokenized(found, tokenizer):
        encoded += tokens
        longest = max(longest, len(part.text))
    expected = tokenizer.encode_documents(documents)
    assert longest <= 100 and encoded == [token for tokens in expected for token in tokens]


def test_a_text_without_cut_points_is_encoded_completely(tmp_path, monkeypatch):
    tokenizer = Tokenizer.train([text * 30 for text in SCRIPTS], 400)
    monkeypatch.setattr("data.prepare.PART_CHARS", 100)
    monkeypatch.setattr(Tokenizer, "last_cut", lambda self, text: 0)
    text = "".join(SCRIPTS) * 20
    tokens = []
    for _, more in tokenized(source_of([Part(text)]), tokenizer):
        tokens += more
    assert tokens[0] == tokenizer.bos and tokens[-1] == tokenizer.eos
    assert tokenizer.decode(tokens) == text


def source_of(parts: list[Part]) -> SimpleNamespace:
    return SimpleNamespace(parts=lambda: iter(parts))


def test_size_limits_apply_to_a_single_long_document(tmp_path, monkeypatch):
    """At most MAX_VALIDATION_BYTES at the end of a single text are held out."""
    for name, value in (("PART_CHARS", 100), ("MAX_VALIDATION_BYTES", 300)):
        monkeypatch.setattr(f"data.prepare.{name}", value)
    monkeypatch.setattr("data.files.PART_CHARS", 100)
    monkeypatch.setattr("data.sources.MAX_VALIDATION_BYTES", 300)
    monkeypatch.setattr("data.prepare.MAX_TOKENIZER_CHARS", 5_000)
    trained_on = []
    train = Tokenizer.train
    monkeypatch.setattr(
        Tokenizer, "train", lambda given, size: trained_on.extend(given) or train(trained_on, size)
    )
    text = "".join(f"line {number} of a text of one document\n" for number in range(500))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    corpus = prepare(source(tmp_path / "a.txt"), tmp_path / "cache")
    pieces = corpus.tokenizer
    assert pieces.decode(corpus.validation.tolist()) == text[-300:]
    assert pieces.decode(corpus.train[0].tolist()) == text[:-300]
    (seen,) = trained_on
    assert text.startswith(seen) and 5_000 <= len(seen) < 5_200
    # A file that is held out by name is truncated to the same size.
    (tmp_path / "val.txt").write_text(text, encoding="utf-8")
    corpus = prepare(source(tmp_path), tmp_path / "cache")
    held_out = pieces.decode(corpus.validation.tolist())
    assert text.startswith(held_out) and 200 < len(held_out) <= 300


def test_memory_does_not_grow_with_document_length(tmp_path, monkeypatch):
    monkeypatch.setattr("data.files.PART_CHARS", 10_000)
    monkeypatch.setattr("data.prepare.PART_CHARS", 10_000)
    monkeypatch.setattr("data.prepare.CHARS_PER_BATCH", 10_000)
    tokenizer = Tokenizer.train([text * 30 for text in SCRIPTS], 400)
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.files["tokenizer.model"])
    peaks = []
    for size in (50_000, 300_000):
        (tmp_path / "a.txt").write_text(
            "Ann had 12 red balls and two were of Bob, not hers. " * (size // 52), encoding="utf-8"
        )
        tracemalloc.start()
        prepare(
            source(tmp_path / "a.txt", tokenizer=tmp_path / "tokenizer.model"), tmp_path / "cache"
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Keeping the whole text in memory would add its size to the peak.
    assert peaks[1] - peaks[0] < 50_000


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
def test_validation_files_are_held_out_and_test_files_are_never_trained_on(tmp_path, names):
    for name in names.split():
        (tmp_path / name).touch()
    split = split_files(str(tmp_path), (".bin",))
    train, held, unused = ({path.name for path in paths} for paths in split)
    assert unused == {name for name in names.split() if name.startswith("test-")}
    assert held == {NAMES[names]} - {""} and train == {*names.split()} - held - unused


def test_each_split_is_read_from_its_own_files(tmp_path):
    for split in ("train", "validation", "test"):
        rows = table({"text": [f"{split} {n}" for n in range(9)]})
        parquet.write_table(rows, tmp_path / f"{split}-00000-of-00001.parquet")
    documents = documents_of(source(tmp_path))
    assert sorted(text for text, held in documents if held) == [f"validation {n}" for n in range(9)]
    assert sorted(text for text, held in documents if not held) == [f"train {n}" for n in range(9)]
    before = source(tmp_path).identity()
    test = tmp_path / "test-00000-of-00001.parquet"
    test.replace(tmp_path / "validation-00000-of-00001.parquet")
    assert source(tmp_path).identity() != before


def test_changing_a_file_suffix_changes_the_corpus_identity(tmp_path):
    """The suffix selects the reader, so a corpus with the old suffix must not be reused."""
    content = '{"text": "first"}\n{"text": "second"}\n'
    found = set()
    for name in ("a.jsonl", "a.txt", "b.txt"):
        (tmp_path / name).write_text(content, encoding="utf-8")
        found.add(source(tmp_path / name).identity())
    assert len(found) == 2  # changing only the name changes nothing


def test_documents_are_held_out_by_hash_in_any_order(tmp_path):
    documents = [f"document {i}" for i in range(200)]
    for order in (documents, documents[::-1]):
        (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(order), encoding="utf-8")
        held_out = {text for text, held in documents_of(source(tmp_path / "a.txt")) if held}
        assert held_out == set(filter(is_held_out, documents))


def test_at_least_one_document_or_the_end_of_a_single_document_is_held_out(tmp_path):
    (tmp_path / "few.txt").write_text("a\n<|endoftext|>\nb\n<|endoftext|>\nc", encoding="utf-8")
    assert sum(held_out for _, held_out in documents_of(source(tmp_path / "few.txt"))) == 1
    # If every hash qualifies, one document is still left for training.
    even = [
        text for text in "abcdef" if int(hashlib.sha256(text.encode()).hexdigest(), 16) % 2 == 0
    ]
    (tmp_path / "even.txt").write_text("\n<|endoftext|>\n".join(even[:2]), encoding="utf-8")
    found = documents_of(source(tmp_path / "even.txt", holdout=2))
    assert [held_out for _, held_out in found] == [True, False]
    (tmp_path / "lone.txt").write_text("0123456789" * 10, encoding="utf-8")
    assert documents_of(source(tmp_path / "lone.txt")) == [
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
    "tiny.txt": (b"a", "cannot train a tokenizer on this text"),
    "a.txt.gz": (b"\x1f\x8b\x08\0", "not a text"),
    "a.pdf": (b"%PDF-1.4\nplain text\n", "not a text"),
    "list.json": (b'[{"text": "a"}]', "not a text"),
    "half.jsonl": (b'{"text": "a"}\n{"text": "\\ud800"}', "half.jsonl, after 0 rows"),
    "deep.jsonl": (b'{"text": ' + 100_000 * b"[", "deep.jsonl, after 0 rows"),
    "pipe.txt": (None, "a pipe"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_text_is_refused_and_leaves_no_files(tmp_path, name):
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


def test_an_interrupted_preparation_starts_over(tmp_path, story, monkeypatch):
    folders = []

    def interrupted(source, tokenizer, folder):
        folders.append(folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("data.prepare.write_shards", interrupted)
        prepare(source(story), tmp_path / "cache")
    assert is_empty(tmp_path / "cache")
    (half,) = folders
    half.mkdir(parents=True)  # the state after a kill
    (half / "train-00000.bin").write_bytes(b"half")
    assert prepare(source(story), tmp_path / "cache").validation.size
    assert not half.exists()


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


@pytest.mark.parametrize("token, error", [(2**16, OverflowError), (None, TypeError)])
def test_a_failed_preparation_leaves_no_files(tmp_path, story, monkeypatch, token, error):
    monkeypatch.setattr(Tokenizer, "encode_documents", lambda self, texts: [[token]] * len(texts))
    with pytest.raises(error):  # tokens must not wrap around
        prepare(source(story), tmp_path / "cache")
    assert is_empty(tmp_path / "cache")


def test_the_size_of_the_held_out_text_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("data.prepare.MAX_VALIDATION_BYTES", 300)
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} " * 20}) + "\n" for i in range(100)), encoding="utf-8"
    )
    corpus = prepare(source(tmp_path / "a.jsonl", holdout=3), tmp_path / "cache")
    assert 200 < corpus.tokenizer.nbytes(corpus.validation) <= 300
