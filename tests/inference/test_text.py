"""Streamed text matches text decoded at once, and prompts must be valid UTF-8."""

import io
import random
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import sentencepiece
import tokenizers
import torch

from data.tokenizer import SentencePieceTokenizer, Tokenizer
from inference.batch import Sequence
from inference.load import load
from inference.text import detokenize
from run import checkpoint, hardware
from run.checkpoint import load_model
from tests.conftest import tell
from tests.data.test_tokenizer import NASTY
from tests.tools.families import write_tokenizer
from tools.import_hf import import_tokenizer


def byte_pairs(folder: Path, family: str) -> Tokenizer:
    write_tokenizer(folder, family, [tell(folder).read_text(encoding="utf-8")])
    return import_tokenizer(folder)


def sentence_pieces(folder: Path) -> Tokenizer:
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tell(folder).read_text(encoding="utf-8").split("\n")),
        model_writer=proto,
        hard_vocab_limit=False,
        vocab_size=300,
        byte_fallback=True,
    )
    return SentencePieceTokenizer({"tokenizer.model": proto.getvalue()})


def word_pieces(folder: Path) -> Tokenizer:
    pieces = ["[UNK]", "[SEP]", "a", "ball", "##s", "##ed", "walk", ".", "n't", "é"]
    model = tokenizers.models.WordPiece(dict(zip(pieces, range(10), strict=True)))
    processor = tokenizers.Tokenizer(model)
    processor.add_special_tokens(["[SEP]"])
    processor.decoder = tokenizers.decoders.WordPiece()
    processor.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}', encoding="utf-8")
    return Tokenizer.load(folder / "tokenizer.json")


KINDS = {
    "byte level": partial(byte_pairs, family="SmolLM2-135M"),
    "byte fallback": partial(byte_pairs, family="TinyLlama-1.1B"),
    "SentencePiece": sentence_pieces,
    "WordPiece": word_pieces,
}


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_matches_text_decoded_at_once(kind, tmp_path):
    tokenizer = KINDS[kind](tmp_path)
    draw = random.Random(0)
    sequences = [tokenizer.encode(text) for text in [*NASTY, "ab 😀👩‍👩‍👧 éü Жили-были🐈"]]
    # Invalid UTF-8 and random tokens.
    for most in 100 * [min(259, tokenizer.vocab_size), tokenizer.vocab_size]:
        sequences.append([draw.randrange(most) for _ in range(draw.randint(1, 12))])
    for tokens in sequences:
        for cut in (0, len(tokens) // 2):
            before = tokenizer.decode(tokens[:cut])
            if not before.endswith("\ufffd"):  # prompts are valid text
                after = tokenizer.decode(tokens)[len(before) :]
                assert streamed(tokenizer, tokens[:cut], tokens[cut:]) == after, tokens


def streamed(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """Stream tokens one by one after a prompt; return their text."""
    sequence = Sequence([*prompt], len(tokens))
    generated = (sequence for token in tokens if sequence.append(token) is None)
    text = ""
    with patch.object(tokenizer, "decode", wraps=tokenizer.decode) as decode:
        for stream in detokenize(generated, tokenizer, []):
            text = stream.text
    assert decode.call_count <= 1 + 2 * len(tokens)  # at most two calls per token
    return text


@pytest.mark.parametrize("words", [["caf\udce9"], ["-"]])
def test_a_prompt_that_is_not_utf8_is_refused(command, drawn_run, monkeypatch, words):
    typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"))
    monkeypatch.setattr(sys, "stdin", typed)
    result = command("generate.py", *words, "--device", "cpu")
    (line,) = result.err.splitlines()
    assert result.code == 2 and "position 3" in line


def test_generation_on_a_gpu_disables_cudnn_attention(drawn_run, monkeypatch):
    loaded = load_model(checkpoint.find_model(drawn_run), "cpu")
    monkeypatch.setattr(checkpoint, "load_model", lambda *_: loaded)
    try:
        load(drawn_run, "cpu")
        assert torch.backends.cuda.cudnn_sdp_enabled()
        monkeypatch.setattr(hardware, "pick_device", torch.device)
        load(drawn_run, "cuda")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize(("is_native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_int8_models_compute_in_a_dtype_that_the_cpu_does_not_emulate(
    drawn_run, monkeypatch, is_native, dtype
):
    monkeypatch.setattr(hardware, "multiplies_bf16", lambda device: is_native)
    model, _, _ = load(drawn_run, "cpu", "int8")
    assert model.embed.weight.dtype == dtype and model.head.levels.dtype == torch.int8
