"""Text comes out of tokens as it went in, and prompts are text."""

import io
import sys

import pytest
import torch

from data.tokenizer import Tokenizer
from inference.batch import Sequence
from inference.load import load, load_model
from inference.text import stream_texts
from run import checkpoint, hardware
from tests.conftest import DATASETS
from tests.data.test_tokenizer import NASTY


@pytest.mark.parametrize("text", NASTY)
def test_any_text_comes_back_token_by_token(tokenizer, text):
    assert streamed(tokenizer, [], tokenizer.encode(text)) == text


def streamed(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """The text of tokens that are drawn one by one after a prompt."""
    sequence = Sequence([*prompt], len(tokens))
    generated = (sequence for token in tokens if sequence.append(token) is None)
    text = ""
    for stream in stream_texts(generated, tokenizer, []):
        text = stream.text
    return text


def test_a_stream_keeps_the_leading_space_of_a_dummy_prefix():
    path = DATASETS / "stories260K" / "tokenizer.model"
    if not path.exists():
        pytest.skip("the shared datasets are not here")
    tokenizer = Tokenizer.load(path)
    tokens = tokenizer.encode("Once upon a time")
    assert streamed(tokenizer, [], tokens) == "Once upon a time"
    rest = streamed(tokenizer, tokens[:1], tokens[1:])
    assert tokenizer.decode(tokens[:1]) + rest == "Once upon a time"


@pytest.mark.parametrize("words", [["caf\udce9"], ["-"]])
def test_a_prompt_that_is_not_utf8_is_refused(command, drawn_run, monkeypatch, words):
    typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"))
    monkeypatch.setattr(sys, "stdin", typed)
    result = command("generate.py", *words, "--device", "cpu")
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert line.startswith("error: 'utf-8' codec can't ") and "position 3: " in line


def test_generation_on_a_gpu_uses_no_attention_that_plans_for_each_length(drawn_run, monkeypatch):
    loaded = load_model(checkpoint.find_model(drawn_run), "cpu")
    monkeypatch.setattr(sys.modules["inference.load"], "load_model", lambda *_: loaded)
    try:
        load(drawn_run, "cpu")
        assert torch.backends.cuda.cudnn_sdp_enabled()
        monkeypatch.setattr(hardware, "pick_device", torch.device)
        load(drawn_run, "cuda")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
