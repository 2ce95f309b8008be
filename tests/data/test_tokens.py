"""Pretokenized text: all published formats can be read, and training needs no tokenizer."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from data.prepare import prepare
from data.pretokenized import Pretokenized
from data.tokenizer import Tokenizer
from tests.conftest import SHORT, TINY
from tests.faults.harness import source as text_source
from tests.training.test_train_command import metrics

BOS, VOCABULARY = 96, 100
FORMATS = {"nanogpt": None, "llm.c": (20240520, 1, "H"), "llama-3": (20240801, 7, "I")}


def encode(ids: list[int], form: str = "nanogpt", count: int | None = None) -> bytes:
    """Encode ids in the formats of nanoGPT's prepare.py and llm.c's dev/data/data_common.py."""
    magic, version, kind = FORMATS[form] or (None, None, "H")
    head = b""
    if magic is not None:
        head = struct.pack("<3i1012x", magic, version, len(ids) if count is None else count)
    return head + struct.pack(f"<{len(ids)}{kind}", *ids)


def ids_of(count: int, seed: int) -> list[int]:
    """Documents of 20 ids, which begin with BOS and count up."""
    ids = (np.arange(count) + 7 * seed) % 90
    ids[::20] = BOS
    return ids.tolist()


def source(path: Path, **options) -> Pretokenized:
    defaults = {"validation_tokens": 500, "vocab_size": VOCABULARY, "bos": BOS, "tokenizer": None}
    return Pretokenized(path=str(path), **(defaults | options))


def held_out(folder: Path, **options) -> Pretokenized:
    """A corpus whose validation files have "val" in their names."""
    return source(folder, validation=f"{folder}/*val*", **options)


def fill(folder: Path, form: str, seed: int = 0) -> None:
    """Write both splits of a corpus, with the publisher's file names."""
    folder.mkdir(exist_ok=True)
    for split, count, more in (("train", 4000, 0), ("val", 700, 1)):
        name = f"{split}.bin" if form == "nanogpt" else f"fineweb_{split}_000001.bin"
        (folder / name).write_bytes(encode(ids_of(count, seed + more), form))


@pytest.mark.parametrize("form", FORMATS)
def test_a_corpus_contains_the_ids_in_its_files(tmp_path, form):
    fill(tmp_path / "corpus", form)
    corpus = prepare(held_out(tmp_path / "corpus"), tmp_path / "cache")
    assert np.concatenate(corpus.train).tolist() == ids_of(4000, 0)
    assert corpus.validation.tolist() == ids_of(700, 1)[:500]
    assert corpus.tokenizer.bos == corpus.tokenizer.eos == BOS
    assert isinstance(corpus.train[0], np.memmap) and not (tmp_path / "cache").exists()
    assert prepare(held_out(tmp_path / "corpus"), tmp_path / "cache").sha256 == corpus.sha256
    fill(tmp_path / "other", form, seed=5)
    for path in (tmp_path / "other").glob("*val*"):
        path.replace(tmp_path / "corpus" / path.name)
    assert prepare(held_out(tmp_path / "corpus"), tmp_path / "cache").sha256 != corpus.sha256


def test_several_validation_files_are_held_out_in_order(tmp_path):
    for name, ids in (("a", [9] * 300), ("val1", [1] * 300), ("val2", [2] * 300)):
        (tmp_path / f"{name}.bin").write_bytes(encode(ids))
    corpus = prepare(held_out(tmp_path), tmp_path / "cache")
    assert corpus.validation.tolist() == [1] * 300 + [2] * 200
    assert corpus.train[0].tolist() == [9] * 300 and len(corpus.train) == 1


def test_ids_of_a_different_tokenizer_are_refused(tmp_path, story):
    corpus = prepare(text_source(story), tmp_path / "cache")
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    own = folder / "tokenizer.model"
    options = {"validation": str(folder / "validation-00000.bin"), "tokenizer": str(own)}
    again = prepare(source(folder, **options), tmp_path / "cache")
    assert np.array_equal(again.train[0], corpus.train[0])
    assert np.array_equal(again.validation, corpus.validation[:500])
    other = Tokenizer.train(["other words"] * 99, 400)
    (tmp_path / "other.model").write_bytes(other.files["tokenizer.model"])
    for tokenizer in (str(tmp_path / "other.model"), None):
        found = source(folder / "train-00000.bin", tokenizer=tokenizer, vocab_size=400)
        with pytest.raises(ValueError, match=f"data.tokenizer={own}"):
            prepare(found, tmp_path / "cache")
    # Another EOS that ends only generations does not matter.
    same = tmp_path / "same" / "tokenizer.model"
    same.parent.mkdir()
    same.write_bytes(own.read_bytes())
    config = same.with_name("generation_config.json")
    config.write_text(json.dumps({"eos_token_id": [corpus.tokenizer.eos, 5]}), encoding="utf-8")
    prepare(source(folder, **options | {"tokenizer": str(same)}), tmp_path / "cache")
    # A link to the file, and a tokenizer that differs only in the EOS at the end of a document.
    (tmp_path / "link.bin").symlink_to(folder / "train-00000.bin")
    config.write_text('{"eos_token_id": 5}', encoding="utf-8")
    names = {tmp_path / "link.bin": tmp_path / "other.model", folder / "train-00000.bin": same}
    for path, tokenizer in names.items():
        with pytest.raises(ValueError, match=f"data.tokenizer={own}"):
            prepare(source(path, tokenizer=str(tokenizer), vocab_size=400), tmp_path / "cache")


@pytest.mark.parametrize("most, held", [(500, 50), (7, 7)])
def test_the_end_of_the_last_file_is_held_out_without_a_validation_file(tmp_path, most, held):
    (tmp_path / "a.bin").write_bytes(encode([1] * 300))
    (tmp_path / "b.bin").write_bytes(encode([*range(100)] * 10))
    corpus = prepare(source(tmp_path, validation_tokens=most), tmp_path / "cache")
    assert np.concatenate(corpus.train).tolist() == [1] * 300 + ([*range(100)] * 10)[:-held]
    assert corpus.validation.tolist() == [*range(100 - held, 100)]


def test_a_run_on_token_ids_needs_no_tokenizer(command):
    fill(Path("corpus"), "llama-3")
    words = [*TINY, *SHORT, "data=tokens", "data.path=corpus", "data.validation=corpus/*val*"]
    words += [f"data.vocab_size={VOCABULARY}", f"data.bos={BOS}"]
    words += ["run_dir=run", "document_mask=true"]
    command("train.py", *words).succeeded()
    first, last = (line for line in metrics("run") if "val_loss" in line)
    assert first["val_bpb"] is last["val_bpb"] is None
    # Losses over 5 seeds, in fp32 and bf16: 4.44 to 4.46 at the start, 4.08 to 4.11 at the end.
    assert last["val_loss"] < first["val_loss"] < 4.7

    asked = ("generate.py", "--run", "run", "5 6 7", "--max-new-tokens", "9")
    result = command(*asked).succeeded()
    assert all(word.isdecimal() for word in result.out.split())
    assert command(*asked, "--stop", "4").code == 2  # would match 4, 40 and 14
    result = command("generate.py", "--run", "run", "five")
    assert (result.code, result.out) == (2, "") and "(five)" in result.err
    fill(Path("corpus"), "llama-3", seed=2)
    assert command("train.py", *words, "steps=8", "resume=true").code == 2


@pytest.mark.parametrize("vocab_size, dtype", [(70_001, None), (100, "uint32")])
def test_a_bin_file_without_a_header_can_be_uint32(tmp_path, vocab_size, dtype):
    """Shards that data/prepare.py writes are uint32 if the vocabulary does not fit into uint16."""
    ids = [*range(1, 90)] * 9 + [vocab_size - 1]
    np.array(ids, "<u4").tofile(tmp_path / "a.bin")
    options = {"vocab_size": vocab_size, "validation_tokens": 2}
    if dtype is not None:
        options["dtype"] = dtype
    corpus = prepare(source(tmp_path / "a.bin", **options), tmp_path / "cache")
    assert [*corpus.train[0], *corpus.validation] == ids


ONES = [1] * 500
# The content of a.bin, and a part of the error.
BAD = [
    (encode(ONES, "llm.c", count=501), "a.bin"),
    (bytes(2001), "a.bin"),
    (encode([*ONES, 100]), "a.bin contains 100"),
    (np.array(ONES, "<u4").tobytes(), "data.dtype=uint32"),
    (np.arange(2**16, 2**16 + 500, dtype="<u4").tobytes(), "data.dtype=uint32"),
]


@pytest.mark.parametrize(("content", "named"), BAD)
def test_unusable_token_files_are_refused(tmp_path, content, named):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match=named):
        prepare(source(tmp_path), tmp_path / "cache")


@pytest.mark.parametrize("options", [{"dtype": "uint32"}, {"vocab_size": 70_000}])
def test_64_bit_ids_are_refused(tmp_path, options):
    np.array(ONES, "<i8").tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="64-bit"):
        prepare(source(tmp_path, **options), tmp_path / "cache")


def test_small_and_large_ids_may_alternate_if_the_dtype_is_known(tmp_path):
    ids = [1, 99] * 250
    (tmp_path / "a.bin").write_bytes(encode(ids, "llm.c"))
    prepare(source(tmp_path), tmp_path / "cache")
    (tmp_path / "a.bin").write_bytes(encode(ids))
    with pytest.raises(ValueError, match=r"data\.dtype=uint16"):
        prepare(source(tmp_path), tmp_path / "cache")
    corpus = prepare(source(tmp_path, dtype="uint16"), tmp_path / "cache")
    assert corpus.train[0].tolist() == ids[: len(corpus.train[0])]


def test_settings_that_contradict_the_token_files_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(encode(ONES))
    for options, named in (({"bos": VOCABULARY}, "data.bos"), ({"dtype": "uint32"}, "uint32")):
        with pytest.raises(ValueError, match=named):
            prepare(source(path, **options), tmp_path / "cache")
    text = tmp_path / "story.txt"
    text.write_text("text that could be read as ids " * 100, encoding="utf-8")
    with pytest.raises(ValueError, match=r"story\.txt"):
        source(text, vocab_size=2**16)
