"""Text that others have tokenized: every format is read as it was published, and a run needs no tokenizer for it."""

import io
import json
import struct
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
from pyarrow import parquet, table

from data.files import split_files
from data.prepare import prepare
from data.pretokenized import Pretokenized
from data.tokenizer import IdTokenizer, Tokenizer
from tests.conftest import SHORT, TINY, close
from tests.inference.test_text import text_source
from tools.compare.runs import Run

BOS, VOCABULARY = 96, 100
FORMATS = {"nanogpt": None, "llm.c": (20240520, 1, "H"), "llama-3": (20240801, 7, "I")}


def save(path: Path, ids: list[int], form: str = "nanogpt", count: int | None = None) -> None:
    """As nanoGPT's prepare.py and llm.c's dev/data/data_common.py describe it."""
    magic, version, kind = FORMATS[form] or (None, None, "H")
    head = (
        b""
        if magic is None
        else struct.pack("<3i1012x", magic, version, len(ids) if count is None else count)
    )
    path.write_bytes(head + struct.pack(f"<{len(ids)}{kind}", *ids))


def stories(count: int, seed: int) -> list[list[int]]:
    """Documents that count up from somewhere."""
    draw = np.random.default_rng(seed)
    return [
        [BOS, *range(start := int(draw.integers(60)), start + int(draw.integers(5, 30)))]
        for _ in range(count)
    ]


def joined(rows: list[list[int]]) -> list[int]:
    return [token for row in rows for token in row]


def source(path: Path, **knobs) -> Pretokenized:
    defaults = {"validation_tokens": 500, "vocab_size": VOCABULARY, "bos": BOS, "tokenizer": None}
    return Pretokenized(path=str(path), **(defaults | knobs))


def fill(folder: Path, form: str, seed: int = 0) -> None:
    """A corpus with both splits, named as its owners do."""
    folder.mkdir(exist_ok=True)
    for split, count in (("train", 200), ("val", 40)):
        rows, seed = stories(count, seed), seed + 1
        name = f"{split}.bin" if form == "nanogpt" else f"fineweb_{split}_000001.bin"
        save(folder / name, joined(rows), form)


@pytest.mark.parametrize("form", FORMATS)
def test_a_corpus_is_the_ids_of_its_files(tmp_path, form):
    fill(tmp_path / "corpus", form)
    corpus = prepare(source(tmp_path / "corpus"), tmp_path / "cache")
    assert np.concatenate(corpus.train).tolist() == joined(stories(200, 0))
    assert np.concatenate(corpus.validation).tolist() == joined(stories(40, 1))[:500]
    assert corpus.validation_bytes is None and corpus.tokenizer.bos == corpus.tokenizer.eos == BOS
    assert isinstance(corpus.train[0], np.memmap) and not (tmp_path / "cache").exists()
    again = {
        prepare(source(tmp_path / "corpus", **knobs), tmp_path / "cache").sha256
        for knobs in ({}, {"bos": BOS})
    }
    assert again == {corpus.sha256}
    fill(tmp_path / "other", form, seed=5)
    for path in (tmp_path / "other").glob("*val*"):
        path.replace(tmp_path / "corpus" / path.name)
    assert prepare(source(tmp_path / "corpus"), tmp_path / "cache").sha256 != corpus.sha256


def test_a_corpus_keeps_the_hash_by_which_older_runs_resume(tmp_path, story):
    save(tmp_path / "a.bin", [*range(100)] * 10)
    digest = "37924b99330f1ef635d907d4bbb8d5fabb3807d3e96c9f17dfcd1789018c3baf"
    assert prepare(source(tmp_path), tmp_path / "cache").sha256 == digest

    prepared = prepare(text_source(story), tmp_path / "cache")
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    hashes = [
        sha256((folder / name).read_bytes()).hexdigest()
        for name in ("train-00000.bin", "validation-00000.bin")
    ]
    assert prepared.sha256 == sha256(json.dumps(hashes).encode()).hexdigest()


def test_another_format_is_prepared_anew_and_too_little_text_leaves_nothing(
    tmp_path, story, monkeypatch
):
    with pytest.raises(ValueError, match="too little text"):
        prepare(text_source(story), tmp_path / "cache", min_tokens=10**6)
    assert not (tmp_path / "cache").exists()
    for version in (1, 2, 2):
        monkeypatch.setattr("data.prepare.FORMAT_VERSION", version)
        prepare(text_source(story), tmp_path / "cache", min_tokens=10)
        assert len([*(tmp_path / "cache").glob("text-*")]) == version


@pytest.mark.parametrize("most, held", [(500, 50), (7, 7)])
def test_without_a_name_the_end_of_the_last_file_is_held_out(tmp_path, most, held):
    save(tmp_path / "a.bin", [1] * 300)
    save(tmp_path / "b.bin", [*range(100)] * 10)
    corpus = prepare(source(tmp_path, validation_tokens=most), tmp_path / "cache")
    assert np.concatenate(corpus.train).tolist() == [1] * 300 + ([*range(100)] * 10)[:-held]
    assert np.concatenate(corpus.validation).tolist() == [*range(100 - held, 100)]


def test_of_several_files_the_first_tokens_are_held_out(tmp_path):
    for name, ids in (("train", [1] * 50), ("val_0", [2] * 5), ("val_1", [3] * 9)):
        save(tmp_path / f"{name}.bin", ids)
    (held,) = prepare(source(tmp_path, validation_tokens=7), tmp_path / "cache").validation
    assert held.tolist() == [2] * 5 + [3] * 2


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


def test_parquet_of_the_hub_keeps_its_own_splits(tmp_path):
    for split in ("train", "validation", "test"):
        rows = table({"text": [f"{split} {n}" for n in range(9)], "n": range(9)})
        parquet.write_table(rows, tmp_path / f"{split}-00000-of-00001.parquet")
    documents = [*text_source(tmp_path).documents()]
    assert sorted(text for text, held in documents if held) == [f"validation {n}" for n in range(9)]
    assert sorted(text for text, held in documents if not held) == [f"train {n}" for n in range(9)]
    before = text_source(tmp_path).fingerprint()
    (tmp_path / "test-00000-of-00001.parquet").replace(
        tmp_path / "validation-00000-of-00001.parquet"
    )
    assert text_source(tmp_path).fingerprint() != before


@pytest.mark.parametrize("prefix", [True, False])
def test_the_tokenizer_of_the_ids_knows_their_bytes(tmp_path, story, prefix):
    texts, written = story.read_text().replace("\n", " ").split("<|endoftext|> "), io.BytesIO()
    how = {"model_type": "bpe", "vocab_size": 80, "minloglevel": 2, "add_dummy_prefix": prefix}
    how |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=written, **how
    )
    (tmp_path / "a.model").write_bytes(written.getvalue())
    pieces = Tokenizer.load(tmp_path / "a.model")
    tokens = [[pieces.bos, *pieces.encode(text), pieces.eos] for text in texts]
    save(tmp_path / "train.bin", joined(tokens))
    save(tmp_path / "val.bin", joined(tokens[:5]))
    knobs = {"tokenizer": str(tmp_path / "a.model"), "validation_tokens": 10**6}
    corpus = prepare(source(tmp_path / "*.bin", **knobs), tmp_path / "cache")
    assert corpus.validation_bytes == sum(len(text.encode()) for text in texts[:5])
    assert corpus.tokenizer.sha256 == pieces.sha256


def test_without_a_tokenizer_ids_are_their_own_text(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"ids 50257 50256\n")
    ids = Tokenizer.load(tmp_path / "tokenizer.model")
    assert (ids.vocab_size, ids.bos, ids.eos) == (50257, 50256, 50256) and IdTokenizer(
        50257, 50256
    ).sha256 == ids.sha256
    assert (
        ids.encode(" 464 3290\n") == [464, 3290]
        and ids.decode([50256, 464, 3290, 50256]) == "464 3290"
    )
    assert ids.encode_documents(["1 2"])[0] == [50256, 1, 2] and ids.id_to_piece([5]) == ["5"]
    for text in ("464 dog", "50257", "-1", "1.5"):
        with pytest.raises(ValueError, match=text.split()[-1]):
            ids.encode(text)


@pytest.mark.parametrize("form", ["nanogpt", "llama-3"])
def test_a_run_needs_no_tokenizer(command, monkeypatch, form):
    fill(Path("corpus"), form)
    words = [
        *TINY,
        "data=tokens",
        "data.path=corpus",
        f"data.vocab_size={VOCABULARY}",
        f"data.bos={BOS}",
    ]
    words += ["run_dir=run", "document_mask=true"]
    result = command("train.py", *words, *SHORT)
    assert (
        result.code == 0 and "nats per token\n" in result.err and "bits per byte" not in result.err
    ), result.err
    looks = [
        json.loads(line)
        for line in Path("run/metrics.jsonl").read_text().splitlines()
        if "val_loss" in line
    ]
    assert [look["val_bpb"] for look in looks] == [None, None]
    # Over 5 seeds, in fp32 and in bf16: 4.44 to 4.46, then 4.08 to 4.11.
    assert looks[1]["val_loss"] < looks[0]["val_loss"] < 4.7
    assert (
        Path("run/samples.txt").read_text().split()[3].isdecimal() and Path("run/loss.png").exists()
    )
    result = command("generate.py", "--run", "run", "5 6 7", "--max-new-tokens", "9", "--stop", "!")
    assert (
        result.code == 0
        and all(word.isdecimal() for word in result.out.split())
        and result.out.strip()
    ), result.err
    result = command("generate.py", "--run", "run", "five")
    assert (result.code, result.out) == (2, "") and "(five). fix: " in result.err
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"5 6\nfive\n"), isatty=lambda: False)
    )
    result = command("generate.py", "--run", "run", "--interactive")
    assert result.code == 2 and len(result.out.splitlines()) == 1 and "(five). fix: " in result.err
    assert "resuming step 4" in command("train.py", *words, *SHORT, "steps=6", "resume=true").err
    result = command(
        "train.py", *TINY[1:], *SHORT, *words[len(TINY) : -2], "init_from=run", "run_dir=other"
    )
    assert result.code == 0 and "starting with the weights of run" in result.err, result.err
    result = command("tools/compare/__main__.py", "--report", "run", "--dir", "report")
    assert result.code == 0 and "bits per byte" not in Path("report/report.md").read_text(), (
        result.err
    )
    close(
        Run.read(Path("run")).loss,
        json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["val_loss"],
    )
    fill(Path("corpus"), form, seed=2)
    result = command("train.py", *words, *SHORT, "steps=8", "resume=true")
    assert result.code == 2 and "was made with another text" in result.err


def raw(name: str, content: bytes) -> None:
    Path(name).write_bytes(content)


ONES = [1] * 500
BAD = {
    "a cut shard": (lambda: save(Path("a.bin"), ONES, "llm.c", count=501), "a.bin: 2024 bytes"),
    "a cut shard of Llama 3": (
        lambda: save(Path("a.bin"), ONES, "llama-3", count=600),
        "600 tokens by its header",
    ),
    "another version": (
        lambda: raw("a.bin", struct.pack("<3i1012x1000x", 20240520, 2, 500)),
        "version 2",
    ),
    "half a token": (lambda: raw("a.bin", bytes(2001)), "2001 bytes"),
    "an empty shard": (lambda: raw("a.bin", b""), "0 bytes"),
    "a header alone": (lambda: raw("a.bin", struct.pack("<2i", 20240520, 1)), "8 bytes"),
    "an id outside": (lambda: save(Path("a.bin"), [*ONES, 100]), "a.bin has 100, of 100"),
    "an id outside, held out": (
        lambda: [save(Path(n), [*ONES, i]) for n, i in (("a.bin", 9), ("val.bin", 100))],
        "val.bin",
    ),
    "ids in parquet": (lambda: raw("a.parquet", b"PAR1"), "a folder of .bin"),
    "only held out": (
        lambda: [save(Path(f"val{n}.bin"), ONES) for n in (1, 2)],
        "nothing to train on",
    ),
    "too little": (lambda: save(Path("a.bin"), [1, 2, 3]), "too little text"),
}


@pytest.mark.parametrize("case", BAD)
def test_unusable_tokens_are_a_line_and_leave_nothing(command, case):
    BAD[case][0]()
    before = {path.name for path in Path().iterdir()}
    words = ["data=tokens", "data.path=.", f"data.vocab_size={VOCABULARY}", f"data.bos={BOS}"]
    result = command("train.py", *TINY, "steps=2", *words)
    (line,) = result.err.splitlines()
    assert (result.code, result.out) == (2, "") and line.startswith("error: ") and ". fix: " in line
    assert BAD[case][1] in line and {path.name for path in Path().iterdir()} == before


@pytest.mark.parametrize(
    "word", ["data.bos=100", "data.validation_tokens=1", "data.path=null", "data.path=a.parquet"]
)
def test_unusable_knobs_are_a_line(command, word):
    save(Path("a.bin"), [1] * 500)
    raw("a.parquet", b"PAR1")
    words = ["data=tokens", "data.path=.", f"data.vocab_size={VOCABULARY}", f"data.bos={BOS}"]
    result = command("train.py", *TINY, "steps=2", *words, word)
    (line,) = result.err.splitlines()
    assert result.code == 2 and word.partition("=")[0] in line and ". fix: " in line
