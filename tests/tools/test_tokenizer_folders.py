"""Tokenizers in Hugging Face folders give the same ids as in transformers, or are refused."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from data.prepare import prepare
from data.tokenizer import Tokenizer
from tests.conftest import tell
from tests.faults.harness import source
from tests.tools.families import CONFIGS, NASTY, SPECIAL, sentence_pieces, write_tokenizer
from tools.import_hf import import_tokenizer

Change = Callable[[Path], None]


def edit(name: str, **entries: object) -> Change:
    """A change to a JSON file in the folder; None removes an entry."""

    def change(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        content = {key: value for key, value in (content | entries).items() if value is not None}
        file.write_text(json.dumps(content), encoding="utf-8")

    return change


config = partial(edit, "tokenizer_config.json")
fast = partial(
    config,
    tokenizer_class="LlamaTokenizer",
    bos_token="<s>",
    eos_token="</s>",
    unk_token="<unk>",
    add_bos_token=True,
    add_prefix_space=False,
)
SMOL = "SmolLM2-135M"
TINY = "TinyLlama-1.1B"
# A folder and the changes to it. SentencePiece models are "plain" or prepend a space.
FOLDERS = {
    "SmolLM2": [SMOL],
    "Llama 3": ["Llama-3.2-1B"],
    "Qwen": ["Qwen3-0.6B"],
    "SmolLM3": ["SmolLM3-3B"],
    "TinyLlama": [TINY],
    "Mistral": ["Mistral-7B-v0.3", config(tokenizer_class="LlamaTokenizer")],
    "special tokens are text": [SMOL, config(split_special_tokens=True)],
    "a space in front": [SMOL, config(tokenizer_class="GPT2Tokenizer", add_prefix_space=True)],
    "no BOS": [TINY, config(tokenizer_class="LlamaTokenizer", add_bos_token=False)],
    "SentencePiece": ["plain", fast()],
    "SentencePiece, no BOS": ["plain", fast(add_bos_token=False)],
}
REFUSED = {
    # This adds more than BOS to a prompt, which our checkpoints cannot express.
    "EOS after a text": ["plain", fast(add_eos_token=True)],
    "ids unlike those of its model": ["plain"],
    "no tokens": [SMOL, edit("tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": []})],
    "no EOS": [SMOL, edit("config.json", eos_token_id=None), config(eos_token=None)],
    "EOS outside": [SMOL, edit("generation_config.json", eos_token_id=[2, 128001])],
}


def make_folder(folder: Path, name: str, *changes: Change) -> Path:
    """Write a tokenizer of a family or a SentencePiece model, and change its files."""
    folder.mkdir()
    texts = tell(folder).read_text(encoding="utf-8").split("\n")
    model_type = "llama"
    eos_id = 2
    if name in SPECIAL:
        write_tokenizer(folder, name, texts)
        tokens, _, eos = SPECIAL[name]
        model_type = CONFIGS.get(name, {}).get("model_type", "llama")
        eos_id = tokens.index(eos[0])
    else:
        model = sentence_pieces(texts, add_dummy_prefix=name == "space")
        (folder / "tokenizer.model").write_bytes(model.files["tokenizer.model"])
    edit("config.json", model_type=model_type, eos_token_id=eos_id)(folder)
    for change in changes:
        change(folder)
    return folder


def texts() -> list[str]:
    """NASTY and 200 random texts with words, spaces and special tokens."""
    parts = ("Ann", " had", " a", "ball", ".", ",", "\n", " ", "  ", "\t", "12", " 6", "Тест", "é")
    special = ("<s>", "</s>", "<|im_start|>", "<|endoftext|>", "<pad>", "<0x41>")
    draw = random.Random(0)
    drawn = ["".join(draw.choices(parts + special, k=draw.randint(1, 9))) for _ in range(200)]
    return [*NASTY, *drawn]


@pytest.mark.parametrize("kind", FOLDERS)
def test_ids_and_text_match_transformers(kind, tmp_path):
    from transformers import AutoTokenizer

    folder = make_folder(tmp_path / "model", *FOLDERS[kind])
    ours = import_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in texts():
        ids = ours.encode_prompt(text)
        assert ids == (theirs(text)["input_ids"] or [ours.bos]), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        # In a document, the text of BOS or EOS is ordinary text.
        assert {ours.bos, *ours.eos_ids}.isdisjoint(ours.encode(text)), text


@pytest.mark.parametrize("kind", REFUSED)
def test_a_folder_that_cannot_be_expressed_is_refused(kind, tmp_path):
    with pytest.raises(ValueError):
        import_tokenizer(make_folder(tmp_path / "model", *REFUSED[kind]))


def test_a_sentencepiece_model_without_a_config_is_read_as_by_transformers_4(tmp_path):
    """It prepends BOS and a space, as the model itself does."""
    from transformers import LlamaTokenizer

    folder = make_folder(tmp_path / "model", "space")
    ours = import_tokenizer(folder)
    theirs = LlamaTokenizer.from_pretrained(folder, add_bos_token=True)
    for text in texts():
        assert ours.encode_prompt(text) == theirs(text)["input_ids"]
    model = Tokenizer.load(folder / "tokenizer.model")
    assert ours.encode_documents(["Ann had a ball"]) == model.encode_documents(["Ann had a ball"])


@pytest.mark.parametrize("family", [SMOL, "Llama-3.2-1B", "SmolLM3-3B"])
def test_documents_are_encoded_as_plain_text_between_bos_and_eos(family, story, tmp_path):
    tokenizer = import_tokenizer(make_folder(tmp_path / "model", family))
    text = f"a {tokenizer.piece(tokenizer.eos)} ж"
    assert tokenizer.eos in tokenizer.encode_prompt(text)
    (document,) = tokenizer.encode_documents([text])
    assert tokenizer.decode(document) == text
    # If BOS is an EOS, the BOS of the next document ends this one.
    ends = [] if tokenizer.bos in tokenizer.eos_ids else [tokenizer.eos]
    assert document == [tokenizer.bos, *tokenizer.encode(text), *ends]
    assert tokenizer.nbytes(np.array(document)) == len(text.encode())

    for name, content in tokenizer.files.items():
        (tmp_path / name).write_bytes(content)
    corpus = prepare(source(story, tokenizer=str(tmp_path / "tokenizer.json")), tmp_path / "cache")
    assert corpus.tokenizer.files == tokenizer.files and corpus.validation[0] == tokenizer.bos
