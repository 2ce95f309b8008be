"""Tokenizers preserve every byte of a text, including tokenizers that were trained elsewhere."""

import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers

from data.prepare import prepare
from data.sources import Stdlib
from data.tokenizer import PIECES, JsonTokenizer, Tokenizer
from tests.faults.harness import source

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


SOURCE = Stdlib(vocab_size=512, tokenizer=None).root.joinpath("ast.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(SOURCE.split("\n\n"), 512)


def external(folder: Path, texts: list[str], **options) -> Tokenizer:
    """A tokenizer that SentencePiece trains with other options than ours."""
    defaults = {"vocab_size": 320, "model_type": "bpe", "hard_vocab_limit": False}
    defaults |= {"byte_fallback": True, "normalization_rule_name": "identity", "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / "a"), **defaults | options
    )
    return Tokenizer.load(folder / "a.model")


@pytest.mark.parametrize("text", NASTY)
def test_any_text_round_trips(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert not {tokenizer.bos, tokenizer.eos} & set(tokens)
    assert tokenizer.encode_documents([text, "b"])[0] == [tokenizer.bos, *tokens, tokenizer.eos]


def test_random_text_round_trips(tokenizer):
    draw = random.Random(0)
    ranges = ((0, 0x7F), (0x80, 0xD7FF), (0xE000, 0x10FFFF), (0x2570, 0x2590), (0x20, 0x20))
    for _ in range(300):
        text = "".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.randint(1, 40)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_texts_are_encoded_in_pieces_with_the_same_tokens(tokenizer):
    assert len(tokenizer.cut(SOURCE)) > len(SOURCE) / 4000
    assert tokenizer.encode_batch([SOURCE, "ab"]) == tokenizer.processor.encode([SOURCE, "ab"])


def test_long_texts_round_trip_wherever_they_are_cut(tmp_path, monkeypatch, story):
    lines = story.read_text(encoding="utf-8").split("\n")
    options = {"add_dummy_prefix": True, "remove_extra_whitespaces": False}
    others = external(tmp_path, lines, **options)
    monkeypatch.setattr("data.tokenizer.MAX_PIECE_CHARS", 40)
    short = re.compile(PIECES.pattern.replace("4000", "40").replace("3999", "39"), re.DOTALL)
    monkeypatch.setattr("data.tokenizer.PIECES", short)
    # Lines, combining and unknown characters, runs of spaces, and text without spaces.
    for text in ("a red ball.\n", "e\u0301  Жили 好好 \n", " " * 10, "好", "▁ "):
        assert others.decode(others.encode(text * 99)) == text * 99


def test_a_tokenizer_that_trims_whitespace_is_not_given_pieces(tmp_path, story):
    lines = story.read_text(encoding="utf-8").split("\n")
    others = external(tmp_path, lines, remove_extra_whitespaces=True)
    text = "a red ball " * 1000
    assert others.encode_batch([text]) == others.processor.encode([text])


@pytest.mark.parametrize(("kind", "prefix"), [("bpe", True), ("unigram", False)])
def test_any_text_round_trips_through_an_external_tokenizer(tmp_path, story, kind, prefix):
    lines = story.read_text(encoding="utf-8").split("\n")
    options = {"add_dummy_prefix": prefix, "remove_extra_whitespaces": False}
    others = external(tmp_path, lines, model_type=kind, **options)
    letters = itertools.chain(*(itertools.product("▁ aé", repeat=length) for length in range(5)))
    for text in [*NASTY, *map("".join, letters)]:
        assert others.decode(others.encode(text)) == text
        assert others.encode_batch([text]) == [others.encode(text)]
        if "▁" not in text:
            assert others.encode(text) == others.processor.encode(text)


def test_a_tokenizer_that_changes_the_text_is_reported(tmp_path, story, capfd):
    text = story.read_text(encoding="utf-8").replace("ball", "\ufb01sh")
    story.write_text(text, encoding="utf-8")
    external(tmp_path, text.split("\n"), normalization_rule_name="nfkc")
    capfd.readouterr()
    prepare(source(story, tokenizer=str(tmp_path / "a.model")), tmp_path / "cache")
    assert r"\ufb01sh" in capfd.readouterr().err
    # Tokenizers trained here reproduce every document.
    prepare(source(story), tmp_path / "cache")
    assert "warning" not in capfd.readouterr().err


def test_newlines_and_indents_share_tokens_and_digits_are_single_tokens(tokenizer):
    assert len(tokenizer.encode("\n        ")) <= 3
    assert len(tokenizer.encode("2026")) == 4


def test_a_rare_character_removes_no_other_text_from_training():
    """SentencePiece ignores texts with U+2585, which charts and progress bars contain."""
    texts = ["zanzibar zanzibar \u2585 zanzibar\n" * 30, "the quick brown fox\n" * 30]
    tokenizer = Tokenizer.train(texts, 400)
    assert len(tokenizer.encode(" zanzibar")) <= 2


def test_errors_raised_by_the_text_iterator_propagate():
    def texts():
        yield "one two three"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tokenizer.train(texts(), 300)


def test_a_given_tokenizer_is_used_or_refused_if_it_is_invalid(tmp_path, story, tokenizer):
    path = tmp_path / "given.model"
    path.write_bytes(tokenizer.files["tokenizer.model"])
    corpus = prepare(source(story, tokenizer=str(path)), tmp_path / "cache")
    assert corpus.tokenizer.sha256 == tokenizer.sha256
    path.write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"given\.model"):
        Tokenizer.load(path)


@pytest.mark.parametrize("prefix", [True, False])
def test_token_byte_counts_add_up_to_the_size_of_the_text(tmp_path, prefix):
    texts = ["a red ball", "Жили-были 🐈", "  two  spaces"] * 9
    options = {"add_dummy_prefix": prefix, "remove_extra_whitespaces": False}
    tokenizer = external(tmp_path, texts, **options)
    rows = [[tokenizer.bos, *tokenizer.encode(text), tokenizer.eos] for text in texts]
    tokens = np.array([token for row in rows for token in row])
    assert tokenizer.nbytes(tokens) == sum(len(text.encode()) for text in texts)


def test_eos_takes_the_place_of_a_missing_bos(tmp_path, story):
    """SentencePiece gives -1 as the id of a token that the model does not have."""
    lines = story.read_text(encoding="utf-8").split("\n")
    tokenizer = external(tmp_path, lines, bos_id=-1, eos_id=1)
    assert (tokenizer.bos, tokenizer.eos) == (1, 1)
    with pytest.raises(ValueError, match="is -1"):
        external(tmp_path, lines, bos_id=-1, eos_id=-1)


def test_the_id_tokenizer_reads_text_as_token_ids(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"ids 50257 50256\n")
    ids = Tokenizer.load(tmp_path / "tokenizer.model")
    assert (ids.vocab_size, ids.bos, ids.eos) == (50257, 50256, 50256)
    assert ids.encode(" 464 3290\n") == [464, 3290]
    assert ids.decode([50256, 464, 3290, 50256]) == "464 3290"
    assert ids.encode_documents(["464 3290", "1"]) == [[50256, 464, 3290], [50256, 1]]
    for text in ("464 dog", "50257", "-1"):
        with pytest.raises(ValueError, match=text.split()[-1]):
            ids.encode(text)


def test_the_text_of_eos_in_a_document_is_ordinary_text(tmp_path):
    """Also if a tokenizer.json has EOS as an added token that is not special."""
    model = tokenizers.models.BPE(vocab={"a": 0, "<": 1, ">": 2, "e": 3}, merges=[])
    processor = tokenizers.Tokenizer(model)
    processor.add_tokens([tokenizers.AddedToken("<e>", special=False)])
    files = {"tokenizer.json": processor.to_str().encode()}
    own = JsonTokenizer(files | {"generation_config.json": b'{"eos_token_id": 4}'})
    assert own.encode_documents(["a<e>"]) == [[4, 0, 1, 3, 2]]
    assert own.encode_prompt("a<e>")[-1] == 4
    assert own.decode([0, 4]) == "a"
