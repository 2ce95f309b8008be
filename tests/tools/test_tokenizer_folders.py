"""Tokenizers in Hugging Face folders give the same ids as in transformers, or are refused."""

import io
import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from sentencepiece import SentencePieceTrainer

from data.tokenizer import Tokenizer
from tests.conftest import tell
from tests.tools.families import CONFIGS, SPECIAL, write_tokenizer
from tests.tools.test_export import NASTY
from tools.import_hf import import_tokenizer

EXTRA = {"content": "<extra>", "lstrip": False, "rstrip": False, "single_word": False}
LLAMA = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}
FAST = {"add_bos_token": True, "add_prefix_space": False}
GREEDY_STRIP = {"lstrip": True, "rstrip": True, "special": True}


def edit(name: str, **entries: object) -> Callable[[Path], None]:
    """A change to a JSON file in the folder, which is created if missing; None removes an entry."""

    def change(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        content = {key: value for key, value in (content | entries).items() if value is not None}
        file.write_text(json.dumps(content), encoding="utf-8")

    return change


def flag_tokens(special: bool | None) -> Callable[[Path], None]:
    """A change that marks added tokens in tokenizer.json as special or not; None removes them."""

    def change(folder: Path) -> None:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        tokens = [token | {"special": special} for token in content["added_tokens"]]
        content["added_tokens"] = [] if special is None else tokens
        file.write_text(json.dumps(content), encoding="utf-8")

    return change


def read_as(model_type: str, **entries: object) -> Callable[[Path], None]:
    """A change to the model class and the tokenizer configuration."""

    def change(folder: Path) -> None:
        edit("config.json", model_type=model_type)(folder)
        edit("tokenizer_config.json", **entries)(folder)

    return change


config = partial(edit, "tokenizer_config.json")
SMOL = "SmolLM2-135M"
QWEN = "Qwen3-0.6B"
TINY = "TinyLlama-1.1B"
MISTRAL = "Mistral-7B-v0.3"
# A folder and a change to it. SentencePiece models are "plain" or prepend a space.
FOLDERS = {
    "SmolLM2": (SMOL, config()),
    "GPT-2's class": (SMOL, config(tokenizer_class="GPT2Tokenizer", add_prefix_space=False)),
    "special tokens are text": (SMOL, config(split_special_tokens=True)),
    "an entry without effect": (SMOL, config(add_bos_token=True)),
    "an extra token it has": (SMOL, config(extra_special_tokens=["<|im_start|>"])),
    "padding": (SMOL, config(pad_token="<|im_end|>")),
    "tokens that are not special": (SMOL, flag_tokens(False)),
    "Llama 3": ("Llama-3.2-1B", config()),
    "Llama 3 without an effect": ("Llama-3.2-1B", config(add_bos_token=False)),
    "Llama's class, bytes": ("Llama-3.2-1B", config(tokenizer_class="LlamaTokenizer")),
    "Qwen": (QWEN, config()),
    "Qwen's class": (QWEN, config(tokenizer_class="Qwen2Tokenizer")),
    "no class": (QWEN, config(tokenizer_class=None)),
    "SmolLM3": ("SmolLM3-3B", config()),
    "TinyLlama": (TINY, config()),
    "TinyLlama's class": (TINY, config(tokenizer_class="LlamaTokenizer")),
    "Mistral": (MISTRAL, config(tokenizer_class="LlamaTokenizer")),
    "Llama 3 as Qwen2": ("Llama-3.2-1B", read_as("qwen2")),
    "SmolLM2 as Qwen3": (SMOL, read_as("qwen3", tokenizer_class=None)),
    "Qwen as GPT-2": (QWEN, config(tokenizer_class="GPT2TokenizerFast")),
    "Mistral as Cohere": (MISTRAL, read_as("llama", tokenizer_class="CohereTokenizer")),
    "the tokenizer of Qwen2": (QWEN, read_as("qwen2", tokenizer_class="LlamaTokenizerFast")),
    "a class that Mistral ignores": ("Llama-3.2-1B", read_as("mistral", tokenizer_class="Cohere")),
    "GPT-2's space": (SMOL, config(tokenizer_class="GPT2Tokenizer", add_prefix_space=True)),
    "Qwen's space": (QWEN, config(tokenizer_class="Qwen2TokenizerFast", add_prefix_space=True)),
    "a new token": (SMOL, config(added_tokens_decoder={"600": EXTRA})),
    "other options": (
        SMOL,
        config(added_tokens_decoder={"1": EXTRA | GREEDY_STRIP | {"content": "<|im_start|>"}}),
    ),
    "an extra token": (SMOL, config(extra_special_tokens=["<extra>"])),
    "a named extra token": (SMOL, config(extra_special_tokens={"image_token": "<extra>"})),
    "an additional token": (SMOL, config(additional_special_tokens=["ball"])),
    "new padding": (SMOL, config(pad_token="<pad>")),
    "a normal token as BOS": (SMOL, config(bos_token="ball")),
    "added_tokens.json": (SMOL, edit("added_tokens.json", **{"<extra>": 600})),
    "special_tokens_map.json": (SMOL, edit("special_tokens_map.json", sep_token="<extra>")),
    "no special tokens": (SMOL, flag_tokens(None)),
    "no space": (TINY, config(tokenizer_class="LlamaTokenizer", add_prefix_space=False)),
    "no BOS": (TINY, config(tokenizer_class="LlamaTokenizer", add_bos_token=False)),
    "an entry that transformers ignores": (
        TINY,
        config(tokenizer_class="LlamaTokenizer", add_eos_token=True),
    ),
    "SentencePiece": ("plain", config(**LLAMA | FAST)),
    "SentencePiece, no BOS": ("plain", config(**LLAMA | FAST | {"add_bos_token": False})),
    "SentencePiece, no special": ("plain", config(**LLAMA | FAST, split_special_tokens=True)),
    "SentencePiece, no space": ("space", config(**LLAMA | FAST)),
    "SentencePiece of Qwen3": ("plain", read_as("qwen3", **LLAMA | FAST)),
    "SentencePiece of Mistral": ("space", read_as("mistral", **FAST)),
    "SentencePiece of Qwen2": ("plain", read_as("qwen2", **LLAMA | FAST)),
    "SentencePiece of Gemma": (
        "plain",
        config(**LLAMA | FAST | {"tokenizer_class": "GemmaTokenizer"}),
    ),
    "SentencePiece, a new token": (
        "plain",
        config(**LLAMA | FAST, added_tokens_decoder={"600": EXTRA}),
    ),
}
# Tokenizers that our checkpoints cannot express: they add more than BOS to a prompt.
REFUSED = {
    "SentencePiece of T5": (
        "plain",
        config(**LLAMA | FAST | {"tokenizer_class": "T5TokenizerFast"}),
    ),
    "SentencePiece, EOS after a text": ("plain", config(**LLAMA | FAST, add_eos_token=True)),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A function that returns a folder with the tokenizer of a family or SentencePiece model."""
    root = tmp_path_factory.mktemp("originals")
    texts = tell(root).read_text(encoding="utf-8").split("\n")

    def made(name: str) -> Path:
        folder = root / name
        if folder.exists():
            return folder
        folder.mkdir()
        entries = {"model_type": "llama", "eos_token_id": 2, "bos_token_id": 1}
        if name in CONFIGS:
            write_tokenizer(folder, name, texts)
            tokens, _, (eos, *_) = SPECIAL[name]
            entries = {"model_type": CONFIGS[name]["model_type"], "eos_token_id": tokens.index(eos)}
        else:
            written = io.BytesIO()
            SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=written,
                model_type="bpe",
                vocab_size=400,
                hard_vocab_limit=False,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=name == "space",
                minloglevel=2,
            )
            (folder / "tokenizer.model").write_bytes(written.getvalue())
        (folder / "config.json").write_text(json.dumps(entries), encoding="utf-8")
        return folder

    return made


@pytest.fixture
def changed(originals, tmp_path):
    """A function that returns a changed copy of a folder."""

    def copy(name: str, change: Callable[[Path], None]) -> Path:
        folder = shutil.copytree(originals(name), tmp_path / "model")
        change(folder)
        return folder

    return copy


def texts() -> list[str]:
    """NASTY and 200 random texts with words, spaces and special tokens."""
    parts = ("Ann", " had", " a", "ball", ".", ",", "\n", " ", "  ", "\t", "12", " 6", "Тест", "é")
    special = ("<s>", "</s>", "<|im_start|>", "<|endoftext|>", "<extra>", "<pad>", "<0x41>")
    draw = random.Random(0)
    drawn = ["".join(draw.choices(parts + special, k=draw.randint(1, 9))) for _ in range(200)]
    return [*NASTY, *drawn]


@pytest.mark.parametrize("kind", FOLDERS)
def test_ids_and_text_match_transformers(kind, changed):
    from transformers import AutoTokenizer

    folder = changed(*FOLDERS[kind])
    ours = import_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in texts():
        ids = ours.encode_prompt(text)
        assert ids == (theirs(text)["input_ids"] or [ours.bos]), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_folder_that_transformers_reads_differently_is_refused(kind, changed):
    with pytest.raises(ValueError, match="in transformers"):
        import_tokenizer(changed(*REFUSED[kind]))


def test_a_sentencepiece_model_without_a_config_is_read_as_by_transformers_4(originals):
    """It prepends BOS and a space, as the model itself does."""
    from transformers import LlamaTokenizer

    ours = import_tokenizer(originals("space"))
    theirs = LlamaTokenizer.from_pretrained(originals("space"), add_bos_token=True)
    for text in texts():
        assert ours.encode_prompt(text) == theirs(text)["input_ids"]
    model = Tokenizer.load(originals("space") / "tokenizer.model")
    assert ours.encode_documents(["Ann had a ball"]) == model.encode_documents(["Ann had a ball"])
    # transformers would prepend a space that this model does not.
    with pytest.raises(ValueError, match="fix: set tokenizer_class"):
        import_tokenizer(originals("plain"))
