"""Sources, tokenizer and shards: no byte of text is lost, nothing stale or half built is used."""

import hashlib
import io
import json
import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from data.prepare import build_corpus, prepare
from data.sources import Stdlib, Text
from data.tokenizer import Tokenizer
from inference.load import load
from inference.text import StreamingDetokenizer
from run import checkpoint
from tests.conftest import DATASETS, LONG, ROOT

NASTY = [
    "",
    " ",
    "  two  spaces  ",
    "\ttab\n\n\nlines\r\nand\rmore",
    "</s><s><unk><0x0A><|endoftext|>",
    "NUL \0 and \x7f",
    "\ufeffmark \u2028 \u00a0 \ufffd \U0010ffff",
    "Жили-были 🐈‍⬛ 12345 e\u0301",
    "▁lower▁▁block▁ ▁",
]


def text_source(path, **knobs) -> Text:
    given = {
        "text_field": "text",
        "separator": "<|endoftext|>",
        "holdout": 20,
        "vocab_size": 400,
        "tokenizer": None,
    }
    return Text(path=str(path), **(given | knobs))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(
        Stdlib(vocab_size=512, tokenizer=None).root.joinpath("ast.py").read_text().split("\n\n"),
        512,
    )


@pytest.mark.parametrize("text", NASTY)
def test_any_text_comes_back(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert not {tokenizer.bos, tokenizer.eos} & set(tokens)
    stream = StreamingDetokenizer(tokenizer, [])
    assert "".join(stream.push(token) for token in tokens) + stream.pending_text() == text


def test_any_random_text_comes_back(tokenizer):
    draw = random.Random(0)
    ranges = ((0, 0x7F), (0x80, 0xD7FF), (0xE000, 0x10FFFF), (0x2570, 0x2590), (0x20, 0x20))
    for _ in range(300):
        text = "".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.randint(1, 40)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_newlines_and_indents_are_pieces_and_digits_are_alone(tokenizer):
    assert len(tokenizer.encode("\n        ")) <= 3
    assert len(tokenizer.encode("2026")) == 4


def test_a_stream_keeps_the_leading_space_of_a_dummy_prefix():
    path = DATASETS / "stories260K" / "tokenizer.model"
    if not path.exists():
        pytest.skip("the shared datasets are not here")
    tokenizer = Tokenizer.load(path)
    tokens = tokenizer.encode("Once upon a time")
    assert "".join(map(StreamingDetokenizer(tokenizer, []).push, tokens)) == "Once upon a time"
    rest = "".join(map(StreamingDetokenizer(tokenizer, tokens[:1]).push, tokens[1:]))
    assert tokenizer.decode(tokens[:1]) + rest == "Once upon a time"


def test_the_library_split_is_the_documented_one():
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "encodings",
        "pydoc_data",
        "site-packages",
        "dist-packages",
    }
    files = [
        p.relative_to(root)
        for p in sorted(root.rglob("*.py"))
        if not skipped & set(p.relative_to(root).parts)
    ]
    held = [
        f for f in files if int(hashlib.sha256(f.as_posix().encode()).hexdigest(), 16) % 20 == 0
    ]
    source = Stdlib(vocab_size=400, tokenizer=None)
    assert sorted(source.files) == sorted(f.as_posix() for f in files)
    assert sum(held_out for _, held_out in source.documents()) == len(held) > 0


def test_a_txt_is_cut_at_separator_lines_only(tmp_path):
    (tmp_path / "a.txt").write_bytes(
        "\ufeffone\r\n<|endoftext|>\n two <|endoftext|> 2\n\n\n<|endoftext|>\r\n\n<|endoftext|>\nthree".encode()
    )
    assert [*text_source(tmp_path / "a.txt").texts()] == [
        "one\r",
        " two <|endoftext|> 2\n\n",
        "three",
    ]


def test_folders_and_globs_read_all_kinds(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.jsonl").write_text('{"text": "first"}\n\n{"text": "second", "more": 1}\n')
    (tmp_path / "note.md").write_text("not this")
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["table"], "n": [1]}), tmp_path / "sub" / "c.parquet"
    )
    assert [*text_source(tmp_path).texts()] == ["plain", "first", "second", "table"]
    assert [*text_source(f"{tmp_path}/*.jsonl").texts()] == ["first", "second"]


def test_documents_are_held_out_by_their_own_hash(tmp_path):
    texts = [f"document {i}" for i in range(200)]
    splits = []
    for name, order in (("a", texts), ("b", texts[::-1])):
        (tmp_path / f"{name}.txt").write_text("\n<|endoftext|>\n".join(order))
        splits.append(
            {
                text
                for text, held_out in text_source(tmp_path / f"{name}.txt").documents()
                if held_out
            }
        )
    assert (
        splits[0]
        == splits[1]
        == {t for t in texts if int(hashlib.sha256(t.encode()).hexdigest(), 16) % 20 == 0}
    )


def test_few_documents_hold_out_one_and_a_lone_one_its_end(tmp_path):
    (tmp_path / "few.txt").write_text("a\n<|endoftext|>\nb\n<|endoftext|>\nc")
    assert sum(held_out for _, held_out in text_source(tmp_path / "few.txt").documents()) == 1
    (tmp_path / "lone.txt").write_text("0123456789" * 10)
    assert [*text_source(tmp_path / "lone.txt").documents()] == [
        ("0123456789" * 9 + "01234", False),
        ("56789", True),
    ]


BAD = {
    "empty.txt": (b"", "no documents"),
    "blank.txt": (b" \n\n", "no documents"),
    "latin.txt": (b"good line\nbad \xff line", "at byte 14"),
    "cut.jsonl": (b'{"text": "a"}\n{"text": "b', "line 2"),
    "other.jsonl": (b'{"text": "a"}\n{"body": "b"}', "line 2 has ['body']"),
    "null.jsonl": (b'{"text": null}', "no text in the field 'text'"),
    "list.jsonl": (b"[1]", "has list"),
    "bad.parquet": (b"PAR1 not really", "not parquet"),
    "tiny.txt": (b"a", "no tokenizer from this text|no training text|too small"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_text_is_refused_and_leaves_nothing(tmp_path, name):
    (tmp_path / name).write_bytes(BAD[name][0])
    with pytest.raises(ValueError, match="fix: ") as error:
        prepare(text_source(tmp_path / name), tmp_path / "cache")
    assert any(part in str(error.value) for part in BAD[name][1].split("|"))
    assert not (tmp_path / "cache").exists()


def test_a_corpus_is_every_document_between_bos_and_eos(tmp_path, story):
    corpus = prepare(text_source(story), tmp_path / "cache")
    pieces = corpus.tokenizer
    for shards, held in ((corpus.train, False), (corpus.validation, True)):
        documents = [text for text, held_out in text_source(story).documents() if held_out == held]
        expected = [
            token for text in documents for token in (pieces.bos, *pieces.encode(text), pieces.eos)
        ]
        assert np.concatenate(shards).tolist() == expected
        assert shards[0].dtype == np.uint16
        if held:
            assert corpus.validation_bytes == sum(len(text.encode()) for text in documents)


def test_a_corpus_is_built_once_and_again_when_its_text_changes(tmp_path, story, monkeypatch):
    built = []

    def build(*arguments):
        built.append(arguments)
        build_corpus(*arguments)

    monkeypatch.setattr("data.prepare.build_corpus", build)
    prepare(text_source(story), tmp_path / "cache")
    prepare(text_source(story), tmp_path / "cache")
    assert len(built) == 1
    before = story.stat()
    story.write_text(story.read_text().replace("Ann", "Ina"))
    os.utime(
        story, ns=(before.st_atime_ns, before.st_mtime_ns)
    )  # same size, same time, other bytes
    prepare(text_source(story), tmp_path / "cache")
    assert len(built) == 2
    prepare(text_source(story, vocab_size=410), tmp_path / "cache")
    assert len(built) == 3


def test_an_interrupted_preparation_is_redone(tmp_path, story, monkeypatch):

    folders = []

    def interrupted(source, tokenizer, unsealed, quiet):
        folders.append(unsealed.folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("data.prepare.write_shards", interrupted)
        prepare(text_source(story), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    (half,) = folders
    half.mkdir(parents=True)  # as a kill leaves it
    (half / "train-00000.bin").write_bytes(b"half")
    assert prepare(text_source(story), tmp_path / "cache").validation_bytes > 0
    assert not half.exists()


def test_four_processes_build_one_corpus(tmp_path, story):
    code = (
        "import sys; sys.path.insert(0, sys.argv[3])\n"
        "from pathlib import Path; from data import prepare as m; from data.sources import Text\n"
        "build = m.build_corpus\n"
        "m.build_corpus = lambda *a: (print('built'), build(*a))\n"
        "knobs = dict(text_field='text', separator='<|endoftext|>', holdout=20, vocab_size=400, tokenizer=None)\n"
        "m.prepare(Text(path=sys.argv[1], **knobs), Path(sys.argv[2]))\n"
    )
    start = [sys.executable, "-c", code, str(story), str(tmp_path / "cache"), str(ROOT)]
    running = [subprocess.Popen(start, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert "".join(process.communicate(timeout=LONG)[0] for process in running).count("built") == 1
    assert [process.returncode for process in running] == [0] * 4


def test_a_preparation_that_fails_leaves_nothing(tmp_path, story, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode_documents", lambda self, texts: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        prepare(text_source(story), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_given_tokenizer_is_used(tmp_path, story, tokenizer):
    (tmp_path / "given.model").write_bytes(tokenizer.proto)
    corpus = prepare(
        text_source(story, tokenizer=str(tmp_path / "given.model")), tmp_path / "cache"
    )
    assert corpus.tokenizer.sha256 == tokenizer.sha256
    (tmp_path / "given.model").write_bytes(b"not a model")
    for path in ("given.model", "absent.model"):
        with pytest.raises(ValueError, match="fix: "):
            prepare(text_source(story, tokenizer=str(tmp_path / path)), tmp_path / "cache")


@pytest.mark.parametrize("vocab_size, dtype", [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_a_shard_is_as_wide_as_its_vocabulary(tmp_path, vocab_size, dtype, monkeypatch):
    ids = f"0 1 {vocab_size - 1}"
    (tmp_path / "ids.model").write_bytes(b"ids %d 2\n" % vocab_size)
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join([ids] * 3))
    (tmp_path / "val.txt").write_text(ids)
    source = text_source(tmp_path, tokenizer=str(tmp_path / "ids.model"))
    (shard,) = prepare(source, tmp_path / "cache").train
    assert shard.dtype == dtype and shard.tolist() == [2, 0, 1, vocab_size - 1] * 3


def test_no_token_wraps_around(tmp_path, story, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode_documents", lambda self, texts: [[2**16]] * len(texts))
    with pytest.raises(OverflowError, match="65536"):
        prepare(text_source(story), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_only_two_megabytes_are_held_out(tmp_path, monkeypatch):

    monkeypatch.setattr("data.prepare.MAX_VALIDATION_BYTES", 300)
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} " * 20}) + "\n" for i in range(100))
    )
    corpus = prepare(text_source(tmp_path / "a.jsonl", holdout=3), tmp_path / "cache")
    assert 200 < corpus.validation_bytes <= 300


@pytest.mark.parametrize("words", [["caf\udce9"], ["-"], ["--interactive"]])
def test_a_prompt_that_is_not_utf8_is_refused(command, drawn_run, monkeypatch, words):
    typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"))
    monkeypatch.setattr(sys, "stdin", typed)
    result = command("generate.py", *words, "--device", "cpu")
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert line.startswith("error: not UTF-8 (") and "at byte 3). fix: " in line


def test_generation_on_a_gpu_uses_no_attention_that_plans_for_each_length(drawn_run, monkeypatch):
    loaded = checkpoint.load_model(checkpoint.find_model(drawn_run), "cpu")
    monkeypatch.setattr(checkpoint, "load_model", lambda *_: loaded)
    try:
        load(drawn_run, "cpu")
        assert torch.backends.cuda.cudnn_sdp_enabled()
        load(drawn_run, torch.device("cuda"))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
